"""Python processes that tests start, forked from one that has imported torch, transformers, peft and the package.

A fresh one spends seconds of a processor on these imports. While `forked` is entered, `subprocess.Popen` sends
`python [-P] [-u] [-W ignore] -c CODE ...` (workers of pytest-xdist are such) and `python -m framework ...` to that
process, from what is forked too, and starts every other command as ever. A test about a fresh interpreter (its imports,
its flags) is marked `fresh_process`.
"""

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from array import array
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).absolute().parents[1]
ADDRESS = "TUNESMITH_TEST_FORKS"
"""Variable with the socket of the process that forks; without it all processes are started afresh."""
_READ_LATE = {"COLUMNS", "GLOO_SOCKET_IFNAME", "NO_COLOR", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONSAFEPATH", "TERM"}
_READ_LATE |= {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_READ_LATE |= {"PYTEST_CURRENT_TEST", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_CPP_LOG_LEVEL", "XDG_CACHE_HOME", ADDRESS}
_READ_LATE |= {"PYTORCH_NVML_BASED_CUDA_CHECK", "TOKENIZERS_PARALLELISM"}
_READ_LATE |= {"TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
"""Variables of the environment that nothing reads while it is imported; where others differ a process is started."""
_PRELOADED = ("framework.cli", "framework.run.trainer", "framework.run.launch.launch", "tests.sharded")
_PRELOADED += ("framework.run.planning.what_if", "framework.run.planning.plan_pool", "datasets", "peft")
_PRELOADED += ("bitsandbytes", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
_MODULE, _RUN_MODULE = (
    ["-m", "framework"],
    "import runpy; runpy.run_module('framework', run_name='__main__', alter_sys=True)",
)
_CARDS = ("/dev/nvidiactl", "/dev/kfd")
"""On a machine with cards bitsandbytes and Inductor start CUDA as they are imported, which no fork survives."""
_Started = subprocess.Popen
_environment: dict[str, str] = {}
"""That of the process that forks, but for what is read late."""


class _Popen(_Started):  # type: ignore[type-arg]
    """A process that is forked where that comes to the same."""

    _status: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        told = dict(zip(_Started._execute_child.__code__.co_varnames[1:], given, strict=False))  # type: ignore[attr-defined]
        asked = _request(told)
        if asked is None:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        self._status = socket.socket(socket.AF_UNIX)
        self._status.connect(os.environ[ADDRESS])
        ends = [told[end] if told[end] != -1 else own for own, end in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        message = json.dumps(asked).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", ends))
        self._status.sendmsg([len(message).to_bytes(4, "big")], [rights])
        self._status.sendall(message)
        self.pid = int.from_bytes(_exactly(self._status, 4), "big")
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[end] for end in pipes))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As `os.waitpid` answers."""
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        self._status.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = _exactly(self._status, 4)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, int.from_bytes(status, "big")

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc,no-any-return]
        return super()._internal_poll(*given, **named, _waitpid=lambda pid, flags: self._try_wait(flags))  # type: ignore[misc,no-any-return]


def _request(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is asked of the process that forks; None for a process that has to be started."""
    words, environment = told["args"], dict(os.environ if told["env"] is None else told["env"])
    if ADDRESS not in environment or not isinstance(words, list) or words[0] != sys.executable:
        return None
    begins = next((at for at, word in enumerate(words) if word == "-c" or words[at : at + 2] == _MODULE), 0)
    if not begins:
        return None
    flags, (code, *arguments) = words[1:begins], words[begins + 1 :]
    code = _RUN_MODULE if words[begins] == "-m" else code
    changed = {name for name, _ in environment.items() ^ _environment.items()}
    unusual = told["shell"] or told["preexec_fn"] or told["pass_fds"] or told["executable"]
    if unusual or set(flags) - {"-P", "-u", "-W", "ignore"} or changed - _READ_LATE:
        return None
    return {
        "safe": "-P" in flags or "PYTHONSAFEPATH" in environment,
        "ignore": "ignore" in flags,
        "code": code,
        "arguments": arguments,
        "environment": environment,
        "cwd": os.path.abspath(told["cwd"] or "."),
        "session": told["start_new_session"],
    }


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise RuntimeError("the process that forks has ended")
        found += more
    return found


@contextlib.contextmanager
def serving(at_once: bool) -> Iterator[None]:
    """Have a process that forks, on Linux and where there is no card, for this process and those that it starts. It
    imports `at_once`, or nothing before it is first asked."""
    if not hasattr(os, "pidfd_open") or any(map(os.path.exists, _CARDS)):
        yield
        return
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.forks import serve; serve({at_once})"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        address = f"{folder}/forks"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(address)
            door.listen(64)
            command, kept = [sys.executable, "-P", "-c", code, str(door.fileno())], [door.fileno()]
            server = _Started(command, stdin=subprocess.PIPE, pass_fds=kept)
        with server:
            patch.setenv(ADDRESS, address)
            yield
            server.kill()


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Fork Python processes that are started inside, where there is a process that does. What tests leave in the
    environment fails at the end: later processes were started afresh, which nothing would show but the time."""
    _environment.update(os.environ)
    if ADDRESS not in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _Popen)
        yield
    left = {name for name, _ in os.environ.items() ^ _environment.items()} - _READ_LATE
    assert not left, f"{sorted(left)} of the environment stayed changed; undo that, or name them in _READ_LATE"


def serve(at_once: bool) -> None:
    """Fork what is asked for at the socket that is inherited, until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process too
    _environment.update(os.environ)
    filters = list(warnings.filters)
    door = socket.socket(fileno=int(sys.argv[1]))
    watch = selectors.DefaultSelector()
    watch.register(door, selectors.EVENT_READ)
    watch.register(sys.stdin, selectors.EVENT_READ)
    if at_once:
        _preload()
    while True:
        for key, _ in watch.select():
            if key.fileobj is door:
                connection, _ = door.accept()
                if "torch" not in sys.modules:
                    _preload()
                pid = os.fork()
                if not pid:
                    _child(connection, filters)
                connection.sendall(pid.to_bytes(4, "big"))
                watch.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            elif key.fileobj is sys.stdin:
                return
            else:
                pid, connection = key.data
                watch.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(os.waitpid(pid, 0)[1].to_bytes(4, "big"))


def _preload() -> None:
    import transformers.conversion_mapping

    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            if find_spec(name) is not None:
                import_module(name)
        transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")  # half a second, then it is kept
    sys.path.remove(str(ROOT))
    gc.collect()
    gc.freeze()
    gc.enable()


def _child(connection: socket.socket, filters: list[Any]) -> NoReturn:
    """Become the process that is asked for over the connection."""
    length, handles, _, _ = socket.recv_fds(connection, 4, 3)
    asked = json.loads(_exactly(connection, int.from_bytes(length, "big")))
    for own, handle in enumerate(handles):
        os.dup2(handle, own)
    os.closerange(3, 4096)
    _become(asked, filters)
    code = 1
    try:
        exec(compile(asked["code"], "<string>", "exec"), sys.modules["__main__"].__dict__)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if not isinstance(ending.code, int | None):
            print(ending.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _become(asked: Mapping[str, Any], filters: list[Any]) -> None:
    """Take over what a fresh interpreter would have from its command line and its environment."""
    import torch

    if asked["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    _environment.clear()
    _environment.update(asked["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    sys.argv = ["-c", *asked["arguments"]]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [*([] if asked["safe"] else [""]), *paths]
    warnings.filters[:] = [("ignore", None, Warning, None, 0)] if asked["ignore"] else filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    subprocess.Popen = _Popen  # type: ignore[misc]
