"""The ranks of a run as they meet: what the main one decides for all, what they wait for, whose failure ends them all.

Ranks meet in two ways. In collectives, which go on in the middle of a step: a rank that is late there holds up the
others, and after `COLLECTIVE` torch ends them all. And in a store of small texts, where one waits for what may take
long: the config that the main rank decides on, everyone's rows, weights and plan, a checkpoint being written. Nobody is
in a collective meanwhile, so none runs into its limit; who waits knows what the missing ones do.

A rank that fails leaves a note in the store and says why. A thread of every other one sees the note and ends its
process wherever it is, also inside a collective that the failed rank will never join. So one failure is told, once.
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
"""How long the first rank to start waits for the last."""
WAIT = timedelta(hours=12)
"""How long the others wait for one that reads, loads or saves."""
TELL_AFTER = 60.0
"""Seconds of waiting after which the main rank says for whom."""
GRACE = 3.0
"""Seconds that a rank has to end by itself, once another has failed."""
FIRST = "tunesmith/0/0"
"""Prefix of the keys of ranks that meet for the first time: `launch` writes there, which starts no rank twice."""
LAUNCHER = "parent"
"""Key that is set where the process which started the ranks watches over them and names one that was killed."""
FAILED = "failed"
_TELLS = "tells"
"""Key of the rank that says why all end. It has said so before the others learn of it, and a launcher of them."""
ALIVE = "here"
"""Key of a rank that knows what to do about Ctrl-C."""
_PAUSE = 0.2
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Socket Timeout", "Timed out", "timed out", "unreachable")
_meetings = itertools.count()


class Coordinator:
    """One process on its own. `ranks` says who this is; all that several would agree on is as this one says."""

    ranks: Ranks = ALONE

    def shared(self, name: str, make: Callable[[], str]) -> str:
        """A text that the main rank makes, while the others wait for it. Each name once a run."""
        return make()

    def gathered(self, name: str, text: str) -> list[str]:
        """The texts of all ranks, in their order, when the last has given its own. Each name once a run."""
        return [text]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it, those that wait for this rank know what it does."""
        with doing(name):
            yield

    def start(self, config: TrainingConfig) -> torch.device | None:
        """Get ready for collectives on this rank's device; None: it has the machine for itself."""
        return None


class _ProcessGroup(Coordinator):
    """One of several."""

    def __init__(self, found: Launched) -> None:
        self.ranks = Ranks(found.rank, found.world, found.local_rank, found.local_world, self._meet)
        os.environ.update(  # torch's names, where it was srun that started us
            {"RANK": str(found.rank), "WORLD_SIZE": str(found.world), "LOCAL_RANK": str(found.local_rank)},
            MASTER_ADDR=found.address,
            MASTER_PORT=str(found.port),
        )
        base, _, _ = next(rendezvous("env://", found.rank, found.world, timeout=ARRIVAL))
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._base = PrefixStore(f"tunesmith/{again}/{next(_meetings)}", base)
        self._store: Store = self._base.clone()  # type: ignore[attr-defined]
        self.has_parent = PrefixStore(FIRST, base).check([LAUNCHER])
        self._meets = itertools.count()
        self._parted = threading.Event()
        self._note: dict[str, int] | None = None
        watched: Store = self._base.clone()  # type: ignore[attr-defined]
        threading.Thread(target=self._watch, args=(watched,), daemon=True).start()
        if not self.ranks.is_main:
            # The main rank speaks for all
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

    def _meet(self) -> None:
        self.gathered(f"met/{next(self._meets)}", "")

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
            # the norm of gradients that are in host memory is summed there, and who has run out of memory is told there
            backend = "cpu:gloo,cuda:nccl"
        ranks = self.ranks = replace(self.ranks, checks_in=config.adds_up_after_backward)
        store = PrefixStore("torch", self._base)
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=COLLECTIVE, device_id=bound
        )
        return device

    def _wait(self, keys: list[str], who: "range | list[int]") -> None:
        begun, told = time.monotonic(), False
        while not self._store.check(keys):
            if self._note is not None:
                _end(self._note["code"])  # before the store goes, which may be in the process that has failed
            waited = time.monotonic() - begun
            missing = [rank for key, rank in zip(keys, who, strict=True) if not self._store.check([key])]
            if waited > WAIT.total_seconds() and missing:
                raise TrainingStopped(f"rank {self.ranks.rank} has waited for {WAIT} in vain: {self._doing(missing)}")
            if waited > TELL_AFTER and self.ranks.is_main and not told:
                print(f"waiting for {self._doing(missing)}", file=sys.stderr, flush=True)
                told = True
            time.sleep(min(_PAUSE, 0.01 + waited / 10))

    def _doing(self, ranks: list[int]) -> str:
        """What some ranks do, as they have said."""
        phases = {rank: self._store.get(key) for rank in ranks if self._store.check([key := f"phase/{rank}"])}
        return "; ".join(f"rank {rank}: {phases.get(rank, b'not there yet').decode()}" for rank in ranks)

    # -- failures
    def _watch(self, store: Store) -> None:
        """End this process when another has failed, or when the store has gone and with it who kept it."""
        while not self._parted.wait(_PAUSE):
            try:
                if not store.check([FAILED]):
                    continue
                note = json.loads(store.get(FAILED))
                self._note = note if note["rank"] != self.ranks.rank else None
                store.set(f"seen/{self.ranks.rank}", "")
            except RuntimeError:  # also what a socket that was closed raises
                note = {"rank": -1, "code": 4}
            if note["rank"] == self.ranks.rank:
                return
            if not self._parted.wait(GRACE):
                self._tell_of_parent()
                _end(note["code"])

    def leave_failing(self, error: BaseException) -> None:
        """Leave a note that this rank has failed. Does not return where another did before, whose failure is told.

        Raises TrainingStopped instead of an error that says no more than that another rank has gone.
        """
        code = getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1)
        # whether it only says that another rank does not answer
        says_so = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)
        lost = not isinstance(error, TunesmithError) and (says_so or isinstance(error, dist.DistError))
        # What all ranks run into together is the main one's to tell; what a loss is due to, someone else's.
        self._await_note(10.0 if lost else 1.5 * (not self.ranks.is_main))
        if lost and self._note is not None:
            _end(self._note["code"])  # who has failed has said so, and the store has gone with it
        mine = {"rank": self.ranks.rank, "code": 4 if lost else code}
        with contextlib.suppress(RuntimeError):
            first = json.loads(self._store.compare_set(_TELLS, "", json.dumps(mine)))
            if first["rank"] != self.ranks.rank:
                self._await_note(10.0)
                _end(first["code"])
        if lost and self.has_parent:
            self._tell_of_parent()
            _end(4)  # the parent knows which rank was killed
        if not lost:
            self._tell(error)
        with contextlib.suppress(RuntimeError):
            note = json.loads(self._store.compare_set(FAILED, "", json.dumps(mine)))
            if note["rank"] != self.ranks.rank:  # the parent has found one that was killed
                _end(note["code"])
        if self.ranks.is_main and not self.has_parent:
            # Keep the store, which may be in this process, until the others have read the note.
            end, keys = time.monotonic() + GRACE, [f"seen/{rank}" for rank in self._others()]
            with contextlib.suppress(RuntimeError):
                while time.monotonic() < end and not self._store.check(keys):
                    time.sleep(_PAUSE / 2)
        self._parted.set()
        if lost:
            doing = "and who kept their store has gone"
            with contextlib.suppress(RuntimeError):
                doing = self._doing(self._others())
            raise TrainingStopped(
                f"another rank ended without a word, or hangs ({doing}); checkpoints are intact. "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error

    def _tell_of_parent(self) -> None:
        """Say where the process that started the ranks, and would say why they end, has gone itself."""
        if not (self.has_parent and self.ranks.is_main):
            return
        try:
            self._store.check([LAUNCHER])
        except RuntimeError:
            with contextlib.suppress(OSError):
                gone = "error the process that started the ranks was killed: all end; checkpoints are intact"
                print(gone, file=sys.stderr, flush=True)

    def _tell(self, error: BaseException) -> None:
        """Say why all end, at once: torchrun ends this process as soon as another one has ended."""
        if not isinstance(error, Exception):
            return
        said = str(error) if isinstance(error, TunesmithError) else f"{type(error).__name__}: {error}"
        who = "" if self.ranks.is_main else f"rank {self.ranks.rank} of {self.ranks.world} on {socket.gethostname()}: "
        with contextlib.suppress(OSError):
            kind = "" if isinstance(error, Interrupted) else "error "
            print(f"{kind}{who}{said}", file=sys.stderr, flush=True)
        if isinstance(error, TunesmithError):
            error.is_reported = True

    def part(self) -> None:
        """All is done: nobody watches any longer. The main rank, which may keep the store, leaves last."""
        self.gathered("parting", "")
        self._parted.set()
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
    """The ranks that were started together, met; within another such block the same. One process is a crew of its own.

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
        coordinator.part()
    finally:
        _current.pop()


def require_world(config: TrainingConfig, ranks: Ranks) -> None:
    """Raises RequestError unless as many ranks have met as devices are asked for."""
    if config.gpu.count != ranks.world:
        asked = f"{counted(config.gpu.count, 'device is', 'devices are')} asked for"
        there = f"{counted(ranks.world, 'process takes', 'processes take')} part"
        expected = f"gpu.count={ranks.world}, or as many processes: torchrun --nproc-per-node {config.gpu.count}"
        raise RequestError([Problem("gpu.count", f"{asked}, {there}", expected=expected)])


def _device(config: TrainingConfig, local_rank: int) -> torch.device:
    """The card of a rank: its own number on the machine, or the only one that it was given to see."""
    if config.gpu.name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        message = f"rank {local_rank} of this machine has no card: it has {count}"
        raise RequestError([Problem("gpu.count", message, expected=f"at most {count} processes a machine")])
    index = local_rank if count > 1 else 0
    os.environ["LOCAL_RANK"] = str(index)
    torch.cuda.set_device(index)
    if not check_cuda_p2p_ib_support():  # RTX 40 under old drivers: accelerate refuses them, unless told as here
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    return torch.device("cuda", index)


def _end(code: int) -> None:
    """End the process where it is: a collective that will never be done, or a library's threads, must not hold it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def plan_of_all(coordinator: Coordinator, plan: Plan | None, name: str = "plan") -> Plan | None:
    """The main rank's plan, on every rank: so all refuse together, and each can explain its own memory. Each `name`
    once a run."""
    text = coordinator.shared(name, lambda: json.dumps(plan.to_json() if plan is not None else None))
    document = json.loads(text)
    return Plan.from_json(document) if plan is None and document is not None else plan
