"""One run of a sweep, in the process that Hydra's launcher has chosen. Loads no torch.

The run is `tunesmith train` in a child process, which isolates its memory, exit code and failures. Its result is a file
in the sweep's folder.
"""

import contextlib
import fcntl
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from framework.compose import draft
from framework.compose.sweep import Job, Sweep, quoted
from framework.memory.cards import installed_cards
from framework.run.ranks.environment import launched, train_command
from framework.run.ranks.signals import passing_signals_on
from framework.run.record.layout import checkpoints, discard, replace_file

INTERRUPTED = 130
KILLED = 4
"""Exit code of a run ended by a signal or lost by its launcher."""
_WORST_FIRST = (INTERRUPTED, 1, 4, 3, 2, 0)
_RESULTS = "results"
_STOP = "interrupted"


@dataclass(frozen=True)
class Result:
    """Result of a run. Losses are the last ones of a finished run; `exit_code` None: it was not started."""

    number: int
    overrides: tuple[str, ...]
    folder: str
    exit_code: int | None
    seconds: float = 0.0
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    peak_allocated_bytes: int | None = None

    @property
    def value(self) -> float:
        """The value to minimize: the held-out loss, else the loss of the last step."""
        loss = self.eval_loss if self.eval_loss is not None else self.loss
        return math.inf if loss is None else loss


@dataclass(frozen=True)
class SweptRun:
    """The function that Hydra calls for each run of a sweep. It is pickled for other processes and machines."""

    recipe: str
    sweep: Sweep
    options: tuple[str, ...] = ()
    """Options of `train`, as typed."""
    nproc: int | None = None
    resume: bool = False
    """Whether runs with a checkpoint resume from it; others start from the beginning."""
    fail_fast: bool = False
    quiet: bool = False

    def __call__(self, job: Job) -> float:
        """Run the job and store its result. Returns `Result.value`; a failed run raises nothing."""
        found = launched()
        if found is not None and found.rank > 0:  # one of several tasks of one run: the first records the result
            return float(subprocess.run(self.command(job), check=False).returncode and math.inf)
        results = job.sweep / _RESULTS
        results.mkdir(parents=True, exist_ok=True)
        own = (job.number, job.overrides, str(job.folder))
        if found is None and self._is_over(job.sweep):
            return _keep(Result(*own, exit_code=None), results)
        began = time.monotonic()
        waiting = partial(print, f"[{job.number}] waits until a card is free", file=sys.stderr)
        with own_cards(self._cards(job) if found is None else 0, waiting) as environment:
            code = self._run(job, results / f"{job.number}.log", environment)
        seconds = round(time.monotonic() - began, 1)
        return _keep(Result(*own, code, seconds, **(_read(job.folder) if code == 0 else {})), results)

    def overrides(self, job: Job) -> list[str]:
        """The overrides after the recipe that define this run."""
        overrides = [
            override for override in self.sweep.overrides_of(job) if not override.startswith("training.output_dir=")
        ]
        return [*overrides, f"training.output_dir={quoted(str(job.folder))}"]

    def arguments(self, job: Job) -> list[str]:
        """The arguments of `tunesmith train`."""
        going_on = ["--resume"] if self.resume and has_checkpoint(job.folder) else []
        options = [*self.options, *(["--nproc", str(self.nproc)] if self.nproc else []), *going_on]
        return [self.recipe, *self.overrides(job), *options]

    def command(self, job: Job) -> list[str]:
        """The whole command line."""
        return train_command(*self.arguments(job))

    def _cards(self, job: Job) -> int:
        """Number of this machine's cards that the run uses, from a fresh composition, which depends on the machine."""
        gpu = draft(self.recipe, self.overrides(job), self.nproc).config.gpu
        return 0 if gpu.name == "cpu" else gpu.count

    def _is_over(self, sweep: Path) -> bool:
        """Whether results of other runs keep this one from starting."""
        codes = {result.exit_code for result in results_of(sweep)}
        return INTERRUPTED in codes or is_stopped(sweep) or (self.fail_fast and bool(codes - {0, None}))

    def _run(self, job: Job, log: Path, environment: Mapping[str, str]) -> int:
        """Run the command and return its exit code. Its lines go to the log, and to stderr with the run's number."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        discard(log)
        with (
            log.open("x", encoding="utf-8") as file,
            subprocess.Popen(
                self.command(job), env={**os.environ, **environment}, start_new_session=True, **pipes
            ) as process,
            passing_signals_on([process]),
        ):
            file.write(f"tunesmith train {shlex.join(self.arguments(job))}\n")
            assert process.stdout is not None
            for raw in process.stdout:
                line = raw.decode(errors="replace")
                file.write(line)
                file.flush()
                if not self.quiet:
                    print(f"[{job.number}] {line}", end="", file=sys.stderr, flush=True)
        return process.returncode if process.returncode >= 0 else KILLED


def has_checkpoint(folder: Path) -> bool:
    """Whether a run can resume in this folder."""
    return bool(checkpoints(folder))


def forget_results(sweep: Path) -> None:
    """Remove the results that an earlier start of this sweep has stored. Its runs are kept."""
    for file in [*(sweep / _RESULTS).glob("*.json"), sweep / _RESULTS / _STOP]:
        file.unlink(missing_ok=True)


def stop(sweep: Path) -> None:
    """Keep further runs of this sweep from starting, on any machine."""
    (sweep / _RESULTS).mkdir(parents=True, exist_ok=True)
    (sweep / _RESULTS / _STOP).touch()


def is_stopped(sweep: Path) -> bool:
    """Whether no further run may start."""
    return (sweep / _RESULTS / _STOP).exists()


def results_of(sweep: Path) -> list[Result]:
    """Results of the runs so far, by number."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in (sweep / _RESULTS).glob("*.json")]
    return sorted((Result(**values) for values in found), key=lambda result: result.number)


def reason_of(sweep: Path, result: Result) -> str:
    """First error that a run printed."""
    file = sweep / _RESULTS / f"{result.number}.log"
    log = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    errors = (line.removeprefix("error ") for line in log.splitlines() if line.startswith("error "))
    return next(errors, f"exit code {result.exit_code}")


def worst(codes: Iterable[int | None]) -> int:
    """Exit code of a sweep whose runs ended with `codes`."""
    found = set(codes)
    return next(code for code in _WORST_FIRST if code in found or code == 0)


def _keep(result: Result, results: Path) -> float:
    replace_file(results / f"{result.number}.json", json.dumps(asdict(result)) + "\n")
    return result.value


def _read(folder: Path) -> dict[str, Any]:
    """Last figures in a run folder; empty after a dry run, which creates no folder."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        peak = json.loads((folder / "memory.json").read_text(encoding="utf-8"))["measured"]["allocated_bytes"]
    except FileNotFoundError:
        return {}
    last = {name: line[name] for line in lines for name in ("step", "loss", "eval_loss") if name in line}
    found = {"steps": last.get("step"), "loss": last.get("loss"), "eval_loss": last.get("eval_loss")}
    return {**found, "peak_allocated_bytes": peak}


_PAUSE = 1.0


@contextlib.contextmanager
def own_cards(count: int, waits: Callable[[], None]) -> Iterator[dict[str, str]]:
    """Reserve `count` cards that no other sweep run of this user has, and yield an environment with only them visible.

    Waits until so many are free, and calls `waits` once if it has to. The environment is empty if the machine has
    fewer (the run itself reports that) or partitioned cards. Locks end with their process, however that ends.
    """
    cards = installed_cards() if count else []
    if not count or len(cards) < count or any(card.is_partitioned for card in cards):
        yield {}
        return
    has_waited = False
    while True:
        with contextlib.ExitStack() as locks:
            held: list[str] = []
            for card in cards:
                if len(held) < count and _lock(card.uuid, locks):
                    held.append(card.uuid)
            if len(held) == count:
                yield {"CUDA_VISIBLE_DEVICES": ",".join(held)}
                return
        if not has_waited:
            waits()
            has_waited = True
        time.sleep(_PAUSE)


def _lock(uuid: str, locks: contextlib.ExitStack) -> bool:
    """Try to lock a card. Returns whether it was free; the lock is then held until `locks` closes."""
    path = Path(tempfile.gettempdir()) / f"tunesmith-{os.getuid()}-{uuid}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    locks.callback(os.close, descriptor)
    return True
