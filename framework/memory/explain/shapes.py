"""Tables of known failure messages: patterns for text without white space, and for whole lines.

Assembled from public reports (tests/memory/explain has one case for each wording) and from the sources behind them:
PyTorch's allocators for CUDA, XPU, MPS and the CPU, NCCL, bitsandbytes.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

SIZE = r"(\d{1,20}(?:\.\d{1,20})?)(bytes|[KMGTPE]i?B)"
"""A size as the allocators print it. Their KB, MB and GB are powers of 1024 as well."""


class Kind(StrEnum):
    """Kind of failure."""

    OUT_OF_MEMORY = "out_of_memory"
    NAN = "nan"
    HANG = "hang"


class Space(StrEnum):
    """Memory that ran out, if the message shows it."""

    CARD = "card"
    HOST = "host"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Shape:
    """One message. `pattern` may capture the requested size, as number and unit."""

    name: str
    pattern: re.Pattern[str]
    kind: Kind = Kind.OUT_OF_MEMORY
    space: Space = Space.CARD
    is_line: bool = False
    """Whether the pattern is for one line with white space, rather than for compact text."""


def _card(name: str, pattern: str) -> Shape:
    return Shape(name, re.compile(pattern, re.IGNORECASE))


def _host(name: str, pattern: str) -> Shape:
    return Shape(name, re.compile(pattern, re.IGNORECASE), space=Space.HOST)


def _host_line(name: str, pattern: str) -> Shape:
    return Shape(name, re.compile(pattern), space=Space.HOST, is_line=True)


def _nan(name: str, pattern: str) -> Shape:
    return Shape(name, re.compile(pattern, re.IGNORECASE), Kind.NAN, Space.UNKNOWN, is_line=True)


def _hang(name: str, pattern: str) -> Shape:
    return Shape(name, re.compile(pattern, re.IGNORECASE), Kind.HANG, Space.UNKNOWN)


ASYNC = re.compile(r"Allocationondevice\d+wouldexceedallowedmemory")
"""CUDA's own allocator in PyTorch (`backend:cudaMallocAsync`), which lists named figures."""
MPS = re.compile(rf"MPSbackendoutofmemory\(MPSallocated:{SIZE}", re.IGNORECASE)
ABSURD = re.compile(r"Triedtoallocatemorethan1EBmemory")
"""A wrongly computed size, usually a consequence of another failure."""

PLACEMENT, SMALLEST_BATCH, HANDLE, RANKS_SHARE = "placement", "smallest batch", "cublas handle", "nccl shared memory"
_SHELL = r"(?:.*: line \d+: *|(?:zsh|bash|sh|ksh|fish|make)(?:\[\d+\])?: *(?:\*\*\* \[.*\] *)?)?"
_BESTS = ("best ", "best_", "best_val_", "best_eval_", "best val ", "best eval ", "min_", "lowest ")
_LOSS = "".join(f"(?<!{best})" for best in _BESTS) + r"(?<![A-Za-z])loss(?:es)?\b"
"""Names of best values, which are inf before the first evaluation."""

SHAPES: tuple[Shape, ...] = (
    Shape("torch allocator", re.compile(rf"outofmemory[.:!]?(?:NPU\w+)?Triedtoallocate{SIZE}", re.IGNORECASE)),
    Shape("cuda async", ASYNC),
    _card("cuda async", r"OutOfMemoryError:Allocationondevice(?!\d+wouldexceed)"),
    _card("largest block", rf"cannotallocatememoryblockwithsizelargerthan4GB!Triedtoallocate{SIZE}"),
    Shape("cut torch message", re.compile(rf"Triedtoallocate{SIZE}(?=\(GPU|\.GPU)")),
    Shape("mps", MPS),
    _card("mps", r"MPSbackendoutofmemory(?!\(MPSallocated:\d)"),
    Shape("absurd size", ABSURD),
    _card("mps", rf"Invalidbuffersize:{SIZE}"),
    _card("mps", r"kIOGPUCommandBufferCallbackErrorOutOfMemory"),
    _card(PLACEMENT, r"modulesaredispatchedontheCPUorthedisk\.MakesureyouhaveenoughGPURAM"),
    _card(SMALLEST_BATCH, r"Noexecutablebatchsizefound,reachedzero"),
    _card("first torch", r"cudaruntimeerror\(2\):outofmemory"),
    _card("cuda", r"CUDA(?:driver|runtime)?(?:error|failure)\d*:?outofmemory|cudaMalloc\w*failed:outofmemory"),
    _card("hip", r"HIPerror:outofmemory|hipErrorOutOfMemory|hipErrorMemoryAllocation"),
    _card("hip", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    _card("cuda", r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|TritonError\[CUDA\]:outofmemory"),
    _card("cublas", r"(?:CU|HIP)(?:BLAS|SPARSE|SOLVER)_STATUS_ALLOC_FAILED|FFT_ALLOC_FAILED"),
    _card(HANDLE, r"BLAS_STATUS_NOT_INITIALIZEDwhencalling`?(?:cu|hip)blas(?:Lt)?Create"),
    _card("cudnn", r"CUDNN_STATUS_(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED|miopenStatusAllocFailed"),
    _host("cudnn", r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    _host("pinned", r"Cudafailure(?:2)?'outofmemory'.{0,200}?FailedtoCUDAhostalloc(\d{1,20})(bytes)"),
    _host("pinned", r"FailedtoCUDAhostalloc(\d{1,20})(bytes)"),
    _card("nccl", r"Cudafailure(?:2)?'outofmemory'"),
    _card("nccl", r"FailedtoCUDA[cm]alloc(?:async)?(\d{1,20})(bytes)"),
    _host(RANKS_SHARE, r"failedtoextend/dev/shm/nccl-\w+?to(\d{1,20})(bytes)"),
    _host(RANKS_SHARE, r"NCCLWARNErrorwhilecreatingsharedmemorysegment\S{1,80}?\(size(\d{1,20})()\)"),
    _card("bitsandbytes", r"Erroroutofmemoryat(?:line\d+infile)?"),
    _card("xpu", r"(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"),
    _card("xpu", r"Allocationisoutofdevicememory"),
    _host("xpu", r"(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_HOST_MEMORY"),
    _host("cpu allocator", rf"DefaultCPUAllocator:(?:can't|notenough)\w+:youtriedtoallocate{SIZE}"),
    _host("first cpu allocator", r"posix_memalign\(&data,gAlignment,nbytes\)==0\.12vs0"),
    _host("mmap", r"unabletommap(\d{1,20})(bytes)fromfile<.{1,300}>:Cannotallocatememory"),
    _host("numpy", rf"Unabletoallocate{SIZE}foranarray"),
    _host("arrow", r"ArrowMemoryError:(?:(?:re|m|c)allocofsize(\d{1,20})()failed)?"),
    _host("rust", r"memoryallocationof(\d{1,20})(bytes)failed"),
    _host("pinned", rf"couldnotpin{SIZE}ofhostmemory"),
    _host("pinned", r"cudaHostAlloc.{0,80}outofmemory"),
    _host("shared memory", r"insufficientsharedmemory\(shm\)|workersareoutofsharedmemory"),
    _host("shared memory", r"unabletowritetofile</torch_[^>]*>:Nospaceleftondevice"),
    _host("loader", r"DataLoaderworker\(pid\(?s?\)?\d+\)iskilledbysignal:(?:Killed|Buserror)"),
    _host("errno", r"\[Errno12\]Cannotallocatememory|std::bad_alloc|Cannotallocatememory(?!block)"),
    _host("windows", r"WinError1455|errorcode:<1455>|pagingfileistoosmallforthisoperation"),
    _host("kernel", r"outofmemory:Killedprocess\d+"),
    _host("kernel", r"oom-kill:constraint=|oom_reaper:reapedprocess"),
    _host("kernel", r"systemd-oomd\[\d+\]:Killed|Killed/\S{1,200}?duetomemorypressurefor"),
    _host("slurm", r"oom[-_]killevents?(?:\(s\))?in|JobState=OUT_OF_MEMORY"),
    _host("slurm", r"exceededmemorylimit\(|Exceeded(?:job|step)memorylimit"),
    _host("batch system", r"TERM_MEMLIMIT|killed:v?mem\d+kbexceededlimit"),
    _host("kubernetes", r"OOMKilled|Thenodewaslowonresource:memory"),
    _host("ray", r"killedduetothenoderunninglowonmemory|killedduetomemorypressure\(OOM\)"),
    _host("torchelastic", r"exitcode:-9\b|Signal9\(SIGKILL\)receivedbyPID"),
    _host("launcher", r"(?:returncode|exitstatus|exitcode|exitedwithcode)[=:]?(?:-9|137)(?!\d)|<Signals\.SIGKILL:9>"),
    _host("launcher", r"terminated(?:with|by)signal(?:SIGKILL|9(?!\d))|rank\d+waskilled\(SIGKILL\)"),
    _host("launcher", r"subprocesseshasabruptlydied|processpoolwasterminatedabruptly"),
    _host("notebook", r"triedtoallocatemorememorythanisavailable|crashedafterusingallavailableRAM"),
    _host_line("killed", rf"^\s*+{_SHELL}(?:\[\d+\]\s*[+-]?\s*)?(?:\d+\s+)?[Kk]illed(?:: 9)?(?:\s+\S.*)?$"),
    _host_line("launcher", r"\*\*\* \[.*\] Error 137\b"),
    _host_line("slurm", r"\bsrun: error: .*: Out Of Memory"),
    _host_line("python", r"^\s*(?:[\w.]+\.)?MemoryError\b(?::(?! Unable to allocate \d).*)?$"),
    _hang("nccl watchdog", r"Watchdogcaughtcollectiveoperationtimeout"),
    _hang("nccl heartbeat", r"heartbeatmonitortimedout|stuckduetohang"),
    _hang("nccl watchdog", r"TimeoutatNCCLwork:\d+"),
    _hang("another rank", r"ncclRemoteError|pair\.cc:\d+\]Connection(?:closed|reset)bypeer"),
    _hang("barrier", r"failedtopassmonitoredBarrier"),
    _hang("gloo", r"Timedoutwaiting\d+msfor(?:recv|send)operation"),
    _hang("store", r"DistStoreError:Timedout|Sockettimeout|waittimeoutafter\d+ms"),
    _hang("store", r"clientsockethastimedout|RendezvousTimeoutError"),
    _nan("loss", rf"{_LOSS}.{{0,24}}?(?:\bis\b|\bbecame\b|[=:])[\s'\"]*(?:infinite or )?(?:nan|inf)\b"),
    _nan("loss", r"\bloss returned in .{1,40} is (?:nan|inf)\b"),
    _nan("loss", r"\bloss\s+(?:nan|inf)\b"),
    _nan("loss", r"\b(?:nan|non-finite|infinite) (?:training )?loss\b|\bloss is not finite\b"),
    _nan("ours", r"step \d+: loss [\w.+-]+, gradient norm [\w.+-]+ over \d+ (?:supervised|pairs|answers|rows)\b"),
    _nan("norm", r"grad(?:ient)?[_ ]norm\b['\"]?\s*[:=]\s*['\"]?(?:tensor\()?(?:nan|inf)\b"),
    _nan("norm", r"total norm .{0,60} is non-finite|gradient norm.{0,20}is (?:nan|not finite|non-finite)"),
    _nan("scaler", r"Minimum loss scale reached|loss scale already at minimum"),
    _nan("input", r"NaN or Inf found in input tensor|contains either `inf`, `nan` or element < 0"),
    _nan("anomaly", r"returned nan values in its \d+th output"),
)  # fmt: skip
"""In order of preference for messages that begin at the same place."""

_WORDS = (
    *("alloc", "memory", "kill", "oom", "mmap", "winerror", "errno", "nan", "finite", "minimum", "timed out"),
    *("timedout", "timeout", "waiting", "hang", "barrier", "resources", "abruptly", "terminated", "dispatched on"),
    *("batch size found", "buffer size", "blascreate", "/dev/shm", "ncclremote", "pair.cc", "<1455>"),
)
_RARE = re.compile(r"\binf\b|(?:code|status|error)\W{0,12}(?:9|137)\b")


def is_telling(line: str) -> bool:
    """Whether a line may belong to a message, however wrapped: every message above has such a line."""
    text = line.lower()
    return any(word in text for word in _WORDS) or _RARE.search(text) is not None


LOOSE = Shape(
    "other",
    re.compile(r"(?:Error|Exception|\berror|FATAL).{0,120}\bout[ _-]of[ _-]memory\b", re.IGNORECASE),
    space=Space.UNKNOWN,
    is_line=True,
)
BARE = Shape(
    "bare",
    re.compile(r"\b(?:CUDA|HIP|XPU|NPU|GPU|[Dd]evice)\b.{0,20}\b[Oo]ut [Oo]f [Mm]emory\b\s*(?:[.!:(]|$)"),
    is_line=True,
)
"""Remains of messages without figures, searched if nothing else is found."""
