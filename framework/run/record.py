"""The run folder: where it is, what is already in it, and the files that say what happened."""

import contextlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.explain.causes import Circumstances
from framework.memory.explain.evidence import EARLIER, REPORT, STOPPED, read_circumstances, write_circumstances
from framework.run.revision import describe_revision
from framework.schema.config import TrainingConfig
from framework.text import to_yaml

SNAPSHOT = "oom_snapshot.pickle"
"""Opens in PyTorch's viewer (pytorch.org/memory_viz)."""
_STOPS = {REPORT: (REPORT, SNAPSHOT), STOPPED: (STOPPED,)}
"""The report of a stop -> the files that tell of it."""
PAGE = "report.html"
"""What `tunesmith report` writes there."""
_OURS = (
    "config.yaml",
    "config-until-step-*.yaml",
    "reference.safetensors",
    "plan.json",
    "environment.json",
    "metrics.jsonl",
    "memory.json",
    *(name for files in _STOPS.values() for name in files),
    *(f"{Path(name).stem}{EARLIER}{Path(name).suffix}" for files in _STOPS.values() for name in files),
    "checkpoints",
    "final",
    PAGE,
)
"""Everything that is written of a run, as patterns. `--overwrite` removes these and nothing else."""

_PACKAGES = ("tunesmith", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    is_written: bool = True
    """Whether this process writes there: of several ranks the main one alone."""

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write one document whole or not at all."""
        if self.is_written:
            _replace(self.path / name, json.dumps(document, indent=2) + "\n")

    def write_config(self, config: TrainingConfig) -> None:
        """The resolved config, which trains again as it is."""
        if self.is_written:
            _replace(self.path / "config.yaml", to_yaml(config))

    def keep_config(self, config: TrainingConfig, step: int) -> None:
        """Have the config that trained until `step`, where another trains from there on, say so in its name.

        Raises SaveFailed.
        """
        file = self.path / "config.yaml"
        earlier = file.read_text(errors="replace") if file.exists() else ""
        if not self.is_written or earlier in ("", to_yaml(config)):
            return
        (kept,) = _free(self.path, ("config.yaml",), f"-until-step-{step:08d}").values()
        _replace(kept, earlier)

    def write_stop(self, step: int, reason: str) -> None:
        """Why a run stopped by itself, for `explain`; a full disk leaves it out, since the reason is told anyway."""
        if self.is_written:
            with contextlib.suppress(SaveFailed):
                _replace(self.path / STOPPED, f"{write_circumstances(Circumstances(step=step))}\n{reason}\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`. Raises SaveFailed."""
        if not self.is_written:
            return
        file = self.path / "metrics.jsonl"
        try:
            with file.open("a") as lines:
                lines.write(json.dumps(values) + "\n")
        except OSError as error:
            raise SaveFailed(f"{file} could not be written: {error.strerror}. Earlier saves are untouched.") from error

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that will be made again after resuming at `step`, and one cut short by a kill."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        _replace(file, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))

    def set_stops_aside(self, step: int) -> None:
        """Have the reports of stops say in their names at which step that was: the run goes on from `step`.

        Raises SaveFailed.
        """
        for report, files in _STOPS.items():
            if (self.path / report).exists():
                stopped = read_circumstances((self.path / report).read_text(errors="replace")).step or step
                _rename(self.path, files, f"-step-{stopped:08d}")


def _step_of(line: str) -> float:
    """The step of a line of `metrics.jsonl`; infinite for a line that is not whole."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _rename(folder: Path, names: Sequence[str], said: str) -> None:
    """Add `said` to the stems of those files that exist."""
    for file, target in _free(folder, names, said).items():
        try:
            file.rename(target)
        except FileNotFoundError:  # a snapshot is of a card
            continue
        except OSError as error:
            raise SaveFailed(f"{file} could not be renamed to {target.name}: {error.strerror}") from error


def _free(folder: Path, names: Sequence[str], said: str) -> dict[Path, Path]:
    """Those files, and what they are called with `said` behind their stems, and a number where that name is taken."""
    endings = (said, *(f"{said}-{number}" for number in range(2, 10_000)))
    renamed = (
        {folder / name: folder / f"{Path(name).stem}{end}{Path(name).suffix}" for name in names} for end in endings
    )
    return next(pairs for pairs in renamed if not any(target.exists() for target in pairs.values()))


def _replace(file: Path, text: str) -> None:
    aside = file.with_name(f".{file.name}.incomplete")
    try:
        aside.write_text(text)
        os.replace(aside, file)
    except OSError as error:
        raise SaveFailed(f"{file} could not be written: {error.strerror}. Earlier saves are untouched.") from error


def open_folder(config: TrainingConfig, name: str, resume: bool, overwrite: bool) -> RunFolder:
    """The folder of this run: `training.output_dir`, else `runs/<name>`, numbered when taken. Makes nothing.

    Raises RequestError when the folder is taken and neither `resume` nor `overwrite` says what to do with it, or
    when there is nothing to resume.
    """
    written = config.training.output_dir
    path = Path(written) if written else default_path(name, resume, overwrite)
    taken = held(path)
    if taken and not (resume or overwrite):
        message = f"{path} already holds a run ({', '.join(found.name for found in taken)})"
        raise RequestError(
            [Problem("training.output_dir", message, expected="--resume, --overwrite or another folder")]
        )
    if resume and not any((path / "checkpoints").glob("step-????????")):
        raise RequestError([_nothing_to_resume(path.absolute())])
    return RunFolder(path)


def _nothing_to_resume(path: Path) -> Problem:
    """Told with the runs beside it that have what it lacks."""
    message = f"there is no checkpoint in {path / 'checkpoints'}"
    begun = sorted({found.parent.parent.name for found in path.parent.glob("*/checkpoints/step-????????")})
    close = get_close_matches(path.name, begun, 1)
    others = f"; of {path.parent} {', '.join(begun[:8])} have one" if begun else ""
    expected = f"training.output_dir of a run that has one, or no --resume to begin anew{others}"
    nearest = f"training.output_dir={path.parent / close[0]}" if close else None
    return Problem("--resume", message, expected=expected, nearest=nearest)


def make(folder: RunFolder) -> None:
    """Make the folder on disk. Raises RequestError when it cannot be made or written to."""
    make_writable(folder.path, "training.output_dir", folder.path.absolute())


def make_writable(folder: Path, key: str, meant: Path) -> None:
    """Make a folder that files can be written to. Raises RequestError, under the key that asked for what is `meant`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{meant} cannot be made or written to: {error.strerror}"
        raise RequestError([Problem(key, message, expected="a folder where files can be written")]) from None


def default_path(name: str, resume: bool, overwrite: bool) -> Path:
    """`runs/<name>` or the first of its numbered siblings that is free; the last that is taken to go on there."""
    numbered = [Path("runs") / name, *(Path("runs") / f"{name}-{number}" for number in range(2, 10_000))]
    free = next(index for index, path in enumerate(numbered) if not path.exists())
    return numbered[max(free - 1, 0)] if resume or overwrite else numbered[free]


def clear(folder: RunFolder) -> None:
    """Remove what an earlier run wrote, and nothing that it did not write."""
    for path in held(folder.path):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def held(folder: Path) -> list[Path]:
    """What runs have written in a folder, of what they write there at all."""
    return [path for pattern in _OURS for path in sorted(folder.glob(pattern))]


def environment() -> dict[str, Any]:
    """Versions, machine and commit: what is needed to run the same thing again."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": describe_revision(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
