"""The run folder: its location, its present content, and the files that record a run."""

import contextlib
import errno
import fnmatch
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.explain.causes import Circumstances
from framework.memory.explain.evidence import EARLIER, REPORT, STOPPED, read_circumstances, write_circumstances
from framework.paths import special_files
from framework.run.best import FILE as BEST
from framework.run.record.layout import FINAL, GGUF, MERGED, PARTS, UNFINISHED, checkpoints, replace_file
from framework.run.record.lock import refuse_taken
from framework.run.record.metrics_log import FILE as METRICS
from framework.run.record.metrics_log import SAMPLES
from framework.run.record.overwrite import ENVIRONMENT, overwrite_problems, read_environment
from framework.run.record.revision import describe_revision
from framework.schema.choices import OptimizerOffload
from framework.schema.config import TrainingConfig
from framework.text import to_yaml

SNAPSHOT = "oom_snapshot.pickle"
"""Opens in PyTorch's viewer (pytorch.org/memory_viz)."""
_STOPS = {REPORT: (REPORT, SNAPSHOT), STOPPED: (STOPPED,)}
"""Report of a stop -> its files."""
PAGE = "report.html"
"""Page written by `tunesmith report`."""
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's events."""
_OURS = (
    "config.yaml",
    "config-until-step-*.yaml",
    "reference.safetensors",
    "plan.json",
    ENVIRONMENT,
    "environment-until-step-*.json",
    METRICS,
    SAMPLES,
    "memory.json",
    BEST,
    *(name for files in _STOPS.values() for name in files),
    *(f"{Path(name).stem}{EARLIER}{Path(name).suffix}" for files in _STOPS.values() for name in files),
    "checkpoints",
    FINAL,
    f"{UNFINISHED}*",
    TENSORBOARD,
    PAGE,
)
"""Patterns of everything that a run writes. `--overwrite` removes these and nothing else."""

_PACKAGES = (
    *("tunesmith", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "safetensors"),
    *("numpy", "triton", "bitsandbytes", "torchao", "liger-kernel"),
)
_LONGEST = 4096 - 300
"""Most bytes of a folder's path: Linux allows 4096, and names within run folders, also of trackers, need up to a third
of the rest."""
_OF_A_START = ("date", "command")
"""Entries of `environment.json` that differ at each start."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    is_written: bool = True
    """Whether this process writes there: with several ranks only the main one."""
    fallback: Path | None = None
    """Folder for checkpoints and export if they cannot be written here."""

    def held(self) -> list[Path]:
        """Files of runs here and in the fallback. Raises OSError for an impossible path."""
        return [*held(self.path), *(held(self.fallback) if self.fallback is not None else ())]

    def newest(self) -> Path | None:
        """The newest complete checkpoint, here or in the fallback."""
        found = [*checkpoints(self.path), *(checkpoints(self.fallback) if self.fallback is not None else ())]
        return max(found, key=lambda checkpoint: checkpoint.name, default=None)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write one document atomically."""
        if self.is_written:
            _replace(self.path / name, json.dumps(document, indent=2) + "\n")

    def write_config(self, config: TrainingConfig) -> None:
        """Write the resolved config, which can be trained again unchanged."""
        if self.is_written:
            _replace(self.path / "config.yaml", to_yaml(config))

    def keep_config(self, config: TrainingConfig, step: int) -> None:
        """Rename the config that was used until `step` if another one is used from there on, adding the step.

        Raises SaveFailed.
        """
        file = self.path / "config.yaml"
        earlier = file.read_text(errors="replace") if file.is_file() else ""
        if not self.is_written or earlier in ("", to_yaml(config)):
            return
        (kept,) = _free(self.path, ("config.yaml",), f"-until-step-{step:08d}").values()
        _replace(kept, earlier)

    def write_environment(self, device: Mapping[str, Any], step: int) -> None:
        """Write versions, machine and commit. If they differ from those until `step`, the previous file is kept under a
        name with the step. Raises SaveFailed."""
        if not self.is_written:
            return
        earlier, now = read_environment(self.path), {**environment(), **device}
        if step and earlier and any(earlier.get(name) != now[name] for name in now if name not in _OF_A_START):
            (kept,) = _free(self.path, (ENVIRONMENT,), f"-until-step-{step:08d}").values()
            self.write_json(kept.name, earlier)
        self.write_json(ENVIRONMENT, now)

    def moved_versions(self) -> list[str]:
        """One line for each version that changed since the run's last start."""
        earlier, now = read_environment(self.path), environment()
        before, after = (
            {"python": known.get("python"), **dict(known.get("packages") or {})} for known in (earlier, now)
        )
        known = [name for name in after if name in before and before[name] != after[name]]
        return [f"{name} {after[name] or 'missing'}, was {before[name] or 'missing'}" for name in known]

    def write_stop(self, step: int, reason: str) -> None:
        """Write why a run stopped by itself, for `explain`. Omitted on a full disk, since the reason is also
        printed."""
        if self.is_written:
            with contextlib.suppress(SaveFailed):
                _replace(self.path / STOPPED, f"{write_circumstances(Circumstances(step=step))}\n{reason}\n")

    def forget_metrics_after(self, step: int, is_last: bool = False) -> None:
        """Drop the lines of steps that will be repeated after resuming at `step`, and a line truncated by a kill.

        With `is_last` only the last evaluation is repeated, so its line is dropped too.
        """
        for file in (self.path / METRICS, self.path / SAMPLES):
            lines = file.read_bytes().splitlines() if file.exists() else []
            kept = [line.decode() for line in lines if _is_kept(line, step, is_last)]
            if lines or file.name == METRICS:
                _replace(file, "".join(f"{line}\n" for line in kept))

    def set_stops_aside(self, step: int) -> None:
        """Rename the reports of earlier stops to include their step, because the run resumes from `step`.

        Raises SaveFailed.
        """
        for report, files in _STOPS.items():
            if (self.path / report).exists():
                stopped = read_circumstances((self.path / report).read_text(errors="replace")).step or step
                _rename(self.path, files, f"-step-{stopped:08d}")


def _is_kept(line: bytes, step: int, is_last: bool) -> bool:
    """Whether a line of `metrics.jsonl` is complete and belongs to a step that is not repeated."""
    try:
        values = json.loads(line.decode())
        comes_again = is_last and ("eval_loss" in values or "completion" in values) and values["step"] == step
        return float(values["step"]) <= step and not comes_again
    except (ValueError, TypeError, KeyError):
        return False


def _rename(folder: Path, names: Sequence[str], suffix: str) -> None:
    """Add `suffix` to the stems of those files that exist."""
    for file, target in _free(folder, names, suffix).items():
        try:
            file.rename(target)
        except FileNotFoundError:  # a snapshot is of a card
            continue
        except OSError as error:
            raise SaveFailed(f"{file} could not be renamed to {target.name}: {error.strerror}") from error


def _free(folder: Path, names: Sequence[str], suffix: str) -> dict[Path, Path]:
    """Files and their new paths with `suffix` after the stem, and a number if that name is taken."""
    endings = (suffix, *(f"{suffix}-{number}" for number in range(2, 10_000)))
    renamed = (
        {folder / name: folder / f"{Path(name).stem}{end}{Path(name).suffix}" for name in names} for end in endings
    )
    return next(pairs for pairs in renamed if not any(target.exists() for target in pairs.values()))


def _replace(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as error:
        raise SaveFailed(f"{file} could not be written: {error.strerror}. Earlier saves are untouched.") from error


def open_folder(config: TrainingConfig, name: str, resume: bool, overwrite: bool) -> RunFolder:
    """Choose the folder of this run: `training.output_dir`, else `runs/<name>`, numbered if taken. Creates nothing.

    Raises RequestError if the folder is impossible, is taken without `resume` or `overwrite`, is in use by another run,
    has nothing to resume, or if `overwrite` would remove files that this run reads or no run wrote.
    """
    written = config.training.output_dir
    folder = RunFolder(Path(written) if written else default_path(name, resume, overwrite))
    folder = replace(folder, fallback=fallback_of(config, folder.path))
    if unusable := unusable_folders(config, folder.path):
        raise RequestError(unusable)
    refuse_taken(folder.path)
    if problems := [*folder_problems(config, folder.path, folder.held(), resume, overwrite)]:
        raise RequestError(problems)
    if resume and folder.newest() is None:
        raise RequestError([_nothing_to_resume(folder.path.absolute())])
    return folder


def unusable_folders(config: TrainingConfig, path: Path | None = None) -> tuple[Problem, ...]:
    """Reasons why a run cannot write to its folders, whatever they contain: `path` or the config's folder, and the
    fallback. Creates nothing."""
    training = config.training
    path = path or Path(training.output_dir or "runs")
    found = [_unusable("training.output_dir", path, path)]
    if (fallback := fallback_of(config, path)) is not None:
        found.append(_unusable("training.fallback_dir", fallback, fallback.parent))
    if training.optimizer_offload is OptimizerOffload.NVME:
        offload = Path(training.optimizer_offload_folder or ".")
        found.append(_unusable("training.optimizer_offload_folder", offload, offload))
    return tuple(problem for problem in found if problem is not None)


def _unusable(key: str, folder: Path, named: Path) -> Problem | None:
    there = folder.absolute()
    try:
        held(folder)
        if len(os.fsencode(there)) > _LONGEST:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        nearest = next(place for place in (there, *there.parents) if os.path.lexists(place))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a link on the path is broken")
    except (OSError, ValueError) as error:  # too long, a file in its way, a link to itself, a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        return Problem(key, f"{str(named)[:200]} cannot be a folder: {reason}", expected="a folder")
    # Reading a FIFO or device could block, or have an effect.
    saves = [*checkpoints(folder), *(each / PARTS for each in checkpoints(folder)), folder / FINAL]
    found = [f"{at / name}" for at in (folder, *saves) for name in special_files(at)]
    if found:
        message = f"{folder} contains special files, which no run writes: {', '.join(found)}"
        return Problem(key, message, expected="another folder, or to remove it")
    is_ours = os.access(nearest, os.W_OK | os.X_OK)
    return None if is_ours else _unwritable(key, named.absolute(), os.strerror(errno.EACCES))


def fallback_of(config: TrainingConfig, folder: Path) -> Path | None:
    """The fallback of a run folder: a separate folder in `training.fallback_dir`."""
    if config.training.fallback_dir is None:
        return None
    absolute = os.path.abspath(folder)
    return Path(config.training.fallback_dir) / f"{folder.name[:200]}-{crc32(absolute.encode()):08x}"


BOTH = Problem("--overwrite", "removes the run that --resume would continue", expected="one of the two")


def folder_problems(
    config: TrainingConfig, path: Path, taken: Sequence[Path], resume: bool, overwrite: bool
) -> Sequence[Problem]:
    """Problems of using a folder with the `taken` files of another run."""
    if overwrite and resume:
        return (BOTH,)
    if overwrite:
        return overwrite_problems(config, path, taken)
    if not taken or resume:
        return ()
    message = f"{path} already holds a run ({', '.join(found.name for found in taken)})"
    return (Problem("training.output_dir", message, expected="--resume, --overwrite or another folder"),)


def _nothing_to_resume(path: Path) -> Problem:
    """The problem of a missing checkpoint, with neighboring runs that have one."""
    message = f"there is no checkpoint in {path / 'checkpoints'}"
    siblings = {found.parent.parent for found in path.parent.glob("*/checkpoints/step-*")}
    begun = sorted(sibling.name for sibling in siblings if checkpoints(sibling))
    close = get_close_matches(path.name, begun, 1)
    others = f"; of {path.parent} {', '.join(begun[:8])} have one" if begun else ""
    expected = f"training.output_dir of a run that has one, or no --resume to start from the beginning{others}"
    nearest = f"training.output_dir={path.parent / close[0]}" if close else None
    return Problem("--resume", message, expected=expected, nearest=nearest)


def make(folder: RunFolder) -> None:
    """Create the folder on disk. Raises RequestError if it cannot be created or written to."""
    make_writable(folder.path, "training.output_dir", folder.path.absolute())
    if folder.fallback is not None:
        make_writable(folder.fallback, "training.fallback_dir", folder.fallback.absolute())


def make_writable(folder: Path, key: str, target: Path) -> None:
    """Create a writable folder. Raises RequestError under `key`, which asked for `target`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RequestError([_unwritable(key, target, str(error.strerror))]) from None


def _unwritable(key: str, folder: Path, reason: str) -> Problem:
    message = f"{folder} cannot be created or written to: {reason}"
    return Problem(key, message, expected="a folder where files can be written")


def default_path(name: str, resume: bool, overwrite: bool) -> Path:
    """`runs/<name>` or its first free numbered sibling; to resume or overwrite, the last one taken."""
    numbered = [Path("runs") / name, *(Path("runs") / f"{name}-{number}" for number in range(2, 10_000))]
    free = next(index for index, path in enumerate(numbered) if not path.exists())
    return numbered[max(free - 1, 0)] if resume or overwrite else numbered[free]


def held(folder: Path) -> list[Path]:
    """Files and folders that runs have written in a folder, which may be a link. Raises OSError for an impossible
    path."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    made_of_it = (MERGED, GGUF) if is_run_folder(folder) else ()  # otherwise they are not a run's
    return [folder / name for pattern in (*_OURS, *made_of_it) for name in fnmatch.filter(names, pattern)]


def is_run_folder(folder: Path) -> bool:
    """Whether a run wrote to the folder."""
    return "packages" in read_environment(folder)


def environment() -> dict[str, Any]:
    """Versions, machine and commit, needed to reproduce a run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": describe_revision(),
    }


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
