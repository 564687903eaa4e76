"""Reader of a run folder's files, from which the report takes every figure. No torch."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from framework.compose import load_of_run
from framework.errors import Problem, RequestError
from framework.memory.declared import declared
from framework.memory.explain.causes import Repair
from framework.memory.ledger import Plan
from framework.paths import open_regular, path_like, read_regular
from framework.run.record.layout import checkpoints, step_of
from framework.run.record.metrics_log import SAMPLES
from framework.run.record.predicted_and_measured import last_line
from framework.schema.config import TrainingConfig

T = TypeVar("T")
Point = tuple[int, float]
"""(step, value)."""

GREATEST = 1e200
"""Larger values count as not finite, since the arithmetic of a drawing would overflow."""
_MARKS = ("metrics.jsonl", "environment.json", "plan.json")
"""Files that identify a run folder. (A recipe may also be called config.yaml.)"""


@dataclass(frozen=True)
class Series:
    """One metric over the steps, in order. `broken` are the steps at which it was not finite."""

    points: tuple[Point, ...] = ()
    broken: tuple[int, ...] = ()


@dataclass(frozen=True)
class Metrics:
    """The lines of `metrics.jsonl` by step; the later of two lines for a step counts. None is a null value."""

    steps: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    evals: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    unread: int = 0
    """Number of lines that are not an object with a step, such as one truncated by a kill."""

    @property
    def last_step(self) -> int:
        """The last optimizer step; 0 without any."""
        return max(self.steps, default=0)

    def trained(self, name: str) -> Series:
        """A metric of the steps."""
        return _series(self.steps, name)

    def evaluated(self, name: str) -> Series:
        """A metric of the evaluations."""
        return _series(self.evals, name)


@dataclass(frozen=True)
class Environment:
    """Machine, versions and command of the run's start."""

    date: str
    command: tuple[str, ...]
    python: str
    platform: str
    packages: Mapping[str, str | None]
    git: str | None
    device: str


@dataclass(frozen=True)
class PhasePair:
    """Allocated bytes of a phase; `error` is predicted / measured - 1."""

    name: str
    predicted: int | None
    measured: int | None
    error: float | None


@dataclass(frozen=True)
class Memory:
    """`memory.json`. `is_of_card` is false if the process's resident memory was measured instead of an allocator."""

    is_of_card: bool
    device_name: str | None
    phases: tuple[PhasePair, ...]
    peak: PhasePair
    """Peak over all phases, since the last repair if there was one."""
    sentence: str
    repairs: tuple[Repair, ...]
    last_step: int | None
    """The last step of the process that wrote it; None without any."""
    growth_bytes: int | None
    """Growth of the allocated floor per step, if reported."""


@dataclass(frozen=True)
class Sample:
    """The model's completion of a prompt after a step."""

    step: int
    prompt: str
    completion: str


@dataclass(frozen=True)
class Run:
    """Contents of a run folder's files, None for a missing or unreadable one, which `lacks` then names."""

    folder: Path
    config: TrainingConfig | None
    config_text: str
    plan: Plan | None
    environment: Environment | None
    memory: Memory | None
    metrics: Metrics
    samples: tuple[Sample, ...]
    checkpoints: tuple[int, ...]
    is_exported: bool
    lacks: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.absolute().name


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises RequestError if there is none."""
    if not _is_run(folder):
        raise RequestError([_no_run(folder)])
    lacks: list[str] = []
    config, text = _read_config(folder / "config.yaml", lacks)
    return Run(
        folder=folder,
        config=config,
        config_text=text,
        plan=_read(folder / "plan.json", Plan.from_json, lacks),
        environment=_read(folder / "environment.json", _environment, lacks),
        memory=_read(folder / "memory.json", _memory, lacks),
        metrics=_read_metrics(folder / "metrics.jsonl", lacks),
        samples=_read_samples(folder / SAMPLES),
        checkpoints=tuple(step_of(found) for found in checkpoints(folder)),
        is_exported=any((folder / "final").glob("*")),
        lacks=tuple(lacks),
    )


def _no_run(folder: Path) -> Problem:
    """The problem of a folder without a run, with the nearest run around, in or next to it."""
    expected = "the folder that `train` wrote"
    if not folder.is_dir():
        inside = folder.parent if _is_run(folder.parent) else path_like(folder, _is_run)
        what = "is a file" if folder.exists() else "is not a folder"
        return Problem("RUN", f"{folder} {what}", expected=expected, nearest=str(inside) if inside else None)
    around = next((parent for parent in list(folder.absolute().parents)[:2] if _is_run(parent)), None)
    runs = [around] if around else sorted(entry for entry in folder.iterdir() if _is_run(entry))
    message = f"{folder} is no run folder: it has none of {', '.join(_MARKS)}"
    return Problem("RUN", message, expected=expected, nearest=", ".join(map(str, runs[:3])) or None)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _read_config(file: Path, lacks: list[str]) -> tuple[TrainingConfig | None, str]:
    """The resolved config, and its text, which is also available for a config of another version."""
    try:
        text = read_regular(file, "replace")
    except OSError as error:
        lacks.append(f"{file.name}: {error.strerror}")
        return None, ""
    try:
        return load_of_run(file), text
    except RequestError as error:
        lacks.append(f"{file.name}: {' '.join(str(error.problems[0]).split())}")
        return None, text


def _read(file: Path, parse: Callable[[Any], T], lacks: list[str]) -> T | None:
    """Parse a JSON document; None, with a line in `lacks`, if it is missing or malformed."""
    try:
        return parse(json.loads(read_regular(file)))
    except OSError as error:
        lacks.append(f"{file.name}: {error.strerror}")
    except RecursionError:
        lacks.append(f"{file.name} cannot be read: it is nested too deep")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        lacks.append(f"{file.name} cannot be read: {type(error).__name__} {error}")
    return None


def _environment(document: Any) -> Environment:
    environment = Environment(
        date=str(document["date"]),
        command=tuple(map(str, document["command"])),
        python=str(document["python"]),
        platform=str(document["platform"]),
        packages=dict(document["packages"]),
        git=document["git"],
        device=str(document["device"]),
    )
    return declared(environment)


def _memory(document: Any) -> Memory:
    predicted, measured = document["predicted"], document["measured"]
    error, growth = document["error"], document["growth"]
    errors = error["phases"] if error is not None else {}
    memory = Memory(
        is_of_card=not measured["baseline_bytes"],
        device_name=measured.get("device_name"),
        phases=tuple(
            PhasePair(entry["name"], entry["predicted_bytes"], entry["measured_bytes"], errors.get(entry["name"]))
            for entry in document["timeline"]
        ),
        peak=PhasePair(
            "peak of the run",
            predicted["peak"]["allocated_bytes"] if predicted is not None else None,
            measured["allocated_bytes"] - measured["baseline_bytes"],
            error["allocated"] if error is not None else None,
        ),
        sentence=last_line(document),
        repairs=tuple(Repair(**repair) for repair in document["repairs"]),
        last_step=document["floors"]["last_step"],
        growth_bytes=growth["per_step"] if growth is not None else None,
    )
    return declared(memory)


def _read_metrics(file: Path, lacks: list[str]) -> Metrics:
    steps: dict[int, Mapping[str, float | None]] = {}
    evals: dict[int, Mapping[str, float | None]] = {}
    unread = 0
    try:
        with TextIOWrapper(open_regular(file), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                read = _line(line)
                if read is None:
                    unread += bool(line.strip())
                    continue
                step, values = read
                (evals if "eval_loss" in values else steps)[step] = values
    except OSError as error:
        lacks.append(f"{file.name}: {error.strerror}")
    if unread:
        lacks.append(f"{file.name}: {unread} {'line is' if unread == 1 else 'lines are'} incomplete, and skipped")
    return Metrics(steps, evals, unread)


def _read_samples(file: Path) -> tuple[Sample, ...]:
    """Samples of the steps that count, in the order of the file; empty if there is no file."""
    found: dict[tuple[int, str], Sample] = {}
    try:
        with TextIOWrapper(open_regular(file), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    document = json.loads(line)
                    sample = Sample(int(document["step"]), str(document["prompt"]), str(document["completion"]))
                    found[sample.step, sample.prompt] = sample
    except OSError:
        return ()
    return tuple(sorted(found.values(), key=lambda sample: sample.step))


def _line(text: str) -> tuple[int, dict[str, float | None]] | None:
    """Step and metrics of a line; None for an incomplete one."""
    try:
        values = json.loads(text)
        step = values.pop("step")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if type(step) is not int or not 0 <= step < GREATEST:
        return None
    return step, {
        name: _number(value) for name, value in values.items() if value is None or type(value) in (int, float)
    }


def _number(value: Any) -> float | None:
    """A number, unless it is an integer too large for a float."""
    return math.inf if isinstance(value, int) and value.bit_length() > 64 else value


def _series(lines: Mapping[int, Mapping[str, float | None]], name: str) -> Series:
    points, broken = [], []
    for step in sorted(lines):
        value = lines[step].get(name)
        if value is None:
            continue
        if abs(value) < GREATEST:
            points.append((step, value))
        else:
            broken.append(step)
    return Series(tuple(points), tuple(broken))
