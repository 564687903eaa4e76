"""Coordination of ranks: decisions of the main rank, waiting outside of collectives, and a common end after a failure.

Ranks synchronize in two ways. Collectives run in the middle of a step: a late rank blocks the others, and after
`COLLECTIVE` torch ends them all. A store of small texts is used for waits that may take long: the main rank's decisions
on the config, rows, weights and plan, a checkpoint being written. No rank is in a collective meanwhile, so no timeout
is hit, and each rank can say what the missing ones are doing.

A rank that fails prints its error and leaves a note in the store. A thread of every other rank sees the note and ends
its process wherever it is, even inside a collective that the failed rank will never join. So a failure is printed once.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import check_cuda_p2p_ib_support
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from framework.activity import doing
from framework.build.ranks import ALONE, COLLECTIVE, Ranks
from framework.errors import Interrupted, Problem, RequestError, TrainingStopped, TunesmithError
from framework.memory.ledger import Plan
from framework.run.ranks.environment import Launched, launched
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

ARRIVAL = timedelta(minutes=30)
"""Longest wait of the first rank to start for the last."""
WAIT = timedelta(hours=12)
"""Longest wait for a rank that reads, loads or saves."""
REPORT_AFTER = 60.0
"""Seconds of waiting after which the main rank prints for whom it waits."""
GRACE = 3.0
"""Seconds that a rank has to end by itself after another has failed."""
FIRST = "tunesmith/0/0"
"""Key prefix of the first rendezvous, where `launch` also writes; it never restarts ranks."""
LAUNCHER = "parent"
"""Key that is set if the launching process supervises the ranks and reports a killed one."""
FAILED = "failed"
_TELLS = "tells"
"""Key of the failed rank that reports why all end. It is set after the report is printed."""
ALIVE = "here"
"""Key of a rank that handles Ctrl-C."""
_PAUSE = 0.2
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Socket Timeout", "Timed out", "timed out", "unreachable")
_meetings = itertools.count()


class Coordinator:
    """Coordination of a single process, which decides everything itself. `ranks` identifies it."""

    ranks: Ranks = ALONE

    def shared(self, name: str, make: Callable[[], str]) -> str:
        """Broadcast a text that the main rank makes while the others wait. Each name may be used once per run."""
        return make()

    def gathered(self, name: str, text: str) -> list[str]:
        """Gather the texts of all ranks, in their order. Each name may be used once per run."""
        return [text]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank does within the block, for messages of ranks that wait for it."""
        with doing(name):
            yield

    def start(self, config: TrainingConfig) -> torch.device | None:
        """Prepare for collectives and return this rank's device; None for a single process."""
        return None


class _ProcessGroup(Coordinator):
    """Coordination of one of several processes."""

    def __init__(self, found: Launched) -> None:
        self.ranks = Ranks(found.rank, found.world, found.local_rank, found.local_world, self._barrier)
        os.environ.update(  # torch's names, in case srun started this process
            {"RANK": str(found.rank), "WORLD_SIZE": str(found.world), "LOCAL_RANK": str(found.local_rank)},
            MASTER_ADDR=found.address,
            MASTER_PORT=str(found.port),
        )
        base, _, _ = next(rendezvous("env://", found.rank, found.world, timeout=ARRIVAL))
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._base = PrefixStore(f"tunesmith/{again}/{next(_meetings)}", base)
        self._store: Store = self._base.clone()  # type: ignore[attr-defined]
        self.has_parent = PrefixStore(FIRST, base).check([LAUNCHER])
        self._barriers = itertools.count()
        self._disconnected = threading.Event()
        self._note: dict[str, int] | None = None
        watched: Store = self._base.clone()  # type: ignore[attr-defined]
        threading.Thread(target=self._watch, args=(watched,), daemon=True).start()
        if not self.ranks.is_main:
            # The main rank prints for all
            warnings.filterwarnings("ignore")
            logging.disable(logging.WARNING)
        self._store.set(f"{ALIVE}/{self.ranks.rank}", "")

    # -- together
    def shared(self, name: str, make: Callable[[], str]) -> str:
        if self.ranks.is_main:
            self._store.set(name, make())
        else:
            self._wait([name], [0])
        return str(self._store.get(name).decode())

    def gathered(self, name: str, text: str) -> list[str]:
        keys = [f"{name}/{rank}" for rank in range(self.ranks.world)]
        self._store.set(keys[self.ranks.rank], text)
        self._wait(keys, range(self.ranks.world))
        return [self._store.get(key).decode() for key in keys]

    def _barrier(self) -> None:
        self.gathered(f"met/{next(self._barriers)}", "")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._store.set(f"phase/{self.ranks.rank}", name)
        with super().phase(name):
            yield
        self._store.set(f"phase/{self.ranks.rank}", "training")

    def start(self, config: TrainingConfig) -> torch.device | None:
        device = _device(config, self.ranks.local_rank)
        backend = "gloo" if device.type == "cpu" else "nccl"
        if device.type == "cuda" and (config.fsdp.is_on_host or config.adds_up_after_backward):
            # sums the norm of gradients in host memory, and signals which rank ran out of memory
            backend = "cpu:gloo,cuda:nccl"
        ranks = self.ranks = replace(self.ranks, checks_in=config.adds_up_after_backward)
        store = PrefixStore("torch", self._base)
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=COLLECTIVE, device_id=bound
        )
        return device

    def _wait(self, keys: list[str], who: "range | list[int]") -> None:
        begun, reported = time.monotonic(), False
        while not self._store.check(keys):
            if self._note is not None:
                _end(self._note["code"])  # before the store vanishes, which may be in the failed process
            waited = time.monotonic() - begun
            missing = [rank for key, rank in zip(keys, who, strict=True) if not self._store.check([key])]
            if waited > WAIT.total_seconds() and missing:
                raise TrainingStopped(f"rank {self.ranks.rank} has waited {WAIT}: {self._doing(missing)}")
            if waited > REPORT_AFTER and self.ranks.is_main and not reported:
                print(f"waiting for {self._doing(missing)}", file=sys.stderr, flush=True)
                reported = True
            time.sleep(min(_PAUSE, 0.01 + waited / 10))

    def _doing(self, ranks: list[int]) -> str:
        """Current phases of some ranks."""
        phases = {rank: self._store.get(key) for rank in ranks if self._store.check([key := f"phase/{rank}"])}
        return "; ".join(f"rank {rank}: {phases.get(rank, b'not there yet').decode()}" for rank in ranks)

    # -- failures
    def _watch(self, store: Store) -> None:
        """End this process when another has failed, or when the store's process has ended."""
        while not self._disconnected.wait(_PAUSE):
            try:
                if not store.check([FAILED]):
                    continue
                note = json.loads(store.get(FAILED))
                self._note = note if note["rank"] != self.ranks.rank else None
                store.set(f"seen/{self.ranks.rank}", "")
            except RuntimeError:  # also raised by a closed socket
                note = {"rank": -1, "code": 4}
            if note["rank"] == self.ranks.rank:
                return
            if not self._disconnected.wait(GRACE):
                self._report_parent()
                _end(note["code"])

    def leave_failing(self, error: BaseException) -> None:
        """Leave a note that this rank has failed. Does not return if another failed first, since that one reports.

        Raises TrainingStopped instead of an error that only says that another rank is gone.
        """
        code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        # whether it only says that another rank does not answer
        says_so = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)
        lost = not isinstance(error, TunesmithError) and (says_so or isinstance(error, dist.DistError))
        # The main rank reports what all ranks run into; a lost connection is reported by the rank that caused it.
        self._await_note(10.0 if lost else 1.5 * (not self.ranks.is_main))
        if lost and self._note is not None:
            _end(self._note["code"])  # the failed rank has reported, and the store ended with it
        mine = {"rank": self.ranks.rank, "code": 4 if lost else code}
        with contextlib.suppress(RuntimeError):
            first = json.loads(self._store.compare_set(_TELLS, "", json.dumps(mine)))
            if first["rank"] != self.ranks.rank:
                self._await_note(10.0)
                _end(first["code"])
        if lost and self.has_parent:
            self._report_parent()
            _end(4)  # the parent knows which rank was killed
        if not lost:
            self._report(error)
        with contextlib.suppress(RuntimeError):
            note = json.loads(self._store.compare_set(FAILED, "", json.dumps(mine)))
            if note["rank"] != self.ranks.rank:  # the parent has found a killed rank
                _end(note["code"])
        if self.ranks.is_main and not self.has_parent:
            # Keep the store, which may be in this process, until the others have read the note.
            end, keys = time.monotonic() + GRACE, [f"seen/{rank}" for rank in self._others()]
            with contextlib.suppress(RuntimeError):
                while time.monotonic() < end and not self._store.check(keys):
                    time.sleep(_PAUSE / 2)
        self._disconnected.set()
        if lost:
            doing = "and the process with their store has ended"
            with contextlib.suppress(RuntimeError):
                doing = self._doing(self._others())
            raise TrainingStopped(
                f"another rank ended without a message, or hangs ({doing}); checkpoints are intact. "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error

    def _report_parent(self) -> None:
        """Report if the launching process, which would explain the end of the ranks, was killed itself."""
        if not (self.has_parent and self.ranks.is_main):
            return
        try:
            self._store.check([LAUNCHER])
        except RuntimeError:
            with contextlib.suppress(OSError):
                gone = "error the process that started the ranks was killed: all end; checkpoints are intact"
                print(gone, file=sys.stderr, flush=True)

    def _report(self, error: BaseException) -> None:
        """Print why all end, immediately, because torchrun ends this process as soon as another one has ended."""
        if not isinstance(error, Exception):
            return
        text = str(error) if isinstance(error, TunesmithError) else f"{type(error).__name__}: {error}"
        who = "" if self.ranks.is_main else f"rank {self.ranks.rank} of {self.ranks.world} on {socket.gethostname()}: "
        with contextlib.suppress(OSError):
            kind = "" if isinstance(error, Interrupted) else "error "
            print(f"{kind}{who}{text}", file=sys.stderr, flush=True)
        if isinstance(error, TunesmithError):
            error.is_reported = True

    def disconnect(self) -> None:
        """Stop watching at the end of the run. The main rank, whose process may hold the store, leaves last."""
        self.gathered("parting", "")
        self._disconnected.set()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store.set(f"parted/{self.ranks.rank}", "")
        if self.ranks.is_main:
            self._wait([f"parted/{rank}" for rank in self._others()], self._others())

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]

    def _await_note(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and not self._store.check([FAILED]):
                time.sleep(_PAUSE / 2)


_current: list[Coordinator] = []


@contextlib.contextmanager
def process_group() -> Iterator[Coordinator]:
    """Connect the ranks that were started together; nested blocks share one coordinator. A single process gets its own.

    An error that leaves the block ends all ranks.
    """
    if _current:
        yield _current[-1]
        return
    found = launched()
    if found is None or found.world == 1:
        yield Coordinator()
        return
    coordinator = _ProcessGroup(found)
    _current.append(coordinator)
    try:
        yield coordinator
    except BaseException as error:
        coordinator.leave_failing(error)
        raise
    else:
        coordinator.disconnect()
    finally:
        _current.pop()


def require_world(config: TrainingConfig, ranks: Ranks) -> None:
    """Raise RequestError unless there are as many ranks as requested devices."""
    if config.gpu.count != ranks.world:
        asked = f"{counted(config.gpu.count, 'device is', 'devices are')} asked for"
        there = f"{counted(ranks.world, 'process takes', 'processes take')} part"
        expected = f"gpu.count={ranks.world}, or as many processes: torchrun --nproc-per-node {config.gpu.count}"
        raise RequestError([Problem("gpu.count", f"{asked}, {there}", expected=expected)])


def _device(config: TrainingConfig, local_rank: int) -> torch.device:
    """The card of a rank: the one with its local number, or the only visible one."""
    if config.gpu.name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        message = f"rank {local_rank} of this machine has no card: it has {count}"
        raise RequestError([Problem("gpu.count", message, expected=f"at most {count} processes a machine")])
    index = local_rank if count > 1 else 0
    os.environ["LOCAL_RANK"] = str(index)
    torch.cuda.set_device(index)
    if not check_cuda_p2p_ib_support():  # RTX 40 with old drivers, which accelerate refuses without this
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return torch.device("cuda", index)


def _end(code: int) -> None:
    """Exit immediately, without waiting for an unfinished collective or a library's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def plan_of_all(coordinator: Coordinator, plan: Plan | None, name: str = "plan") -> Plan | None:
    """Broadcast the main rank's plan, so that all ranks refuse together and each can explain its memory. Each `name`
    may be used once per run."""
    text = coordinator.shared(name, lambda: json.dumps(plan.to_json() if plan is not None else None))
    document = json.loads(text)
    return Plan.from_json(document) if plan is None and document is not None else plan
