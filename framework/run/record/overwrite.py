"""`--overwrite`: removal of what a run wrote, all of it or nothing, and nothing that the same request reads.

Loads no torch.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from framework.build.sources.find_files import find_files
from framework.errors import Problem, RequestError
from framework.paths import read_regular
from framework.run.record.layout import (
    FINAL,
    GGUF,
    MERGED,
    UNFINISHED,
    checkpoints,
    discard,
    exported,
    kept_for,
    leftovers,
)
from framework.schema.config import TrainingConfig
from framework.schema.data import parse_split

ENVIRONMENT = "environment.json"
"""File that identifies a run folder: written first, removed last."""
_WRITTEN = ("training.output_dir", "training.fallback_dir", "training.optimizer_offload_folder")
"""Keys whose paths are written to, not read."""


def overwrite_problems(config: TrainingConfig, folder: Path, held: Sequence[Path]) -> list[Problem]:
    """Reasons not to remove the `held` files of a run folder and of its related folders, found before anything is
    removed."""
    problems, names = [*_immovable(held)], ", ".join(path.name for path in held if path.parent == folder)
    if names and "packages" not in read_environment(folder):
        message = f"{folder} has {names}, but no {ENVIRONMENT} of a run: --overwrite removes what a run wrote"
        expected = "another training.output_dir, or to delete them yourself"
        problems.insert(0, Problem("--overwrite", message, expected=expected))
    going = [path.resolve() for found in held for path in _of_runs(found)]
    for key, file in inputs(config):
        resolved = file.resolve()
        if under := next((path for path in going if resolved == path or path in resolved.parents), None):
            lies = ", which" if resolved == under else f" lies in {under}, which"
            message = f"{file}{lies} --overwrite would remove before it is read"
            problems.append(Problem(key, message, expected="another training.output_dir"))
            return problems  # one is enough: a model has many files
    return problems


def inputs(config: TrainingConfig) -> Iterator[tuple[str, Path]]:
    """Key and path of each local file and folder that a request reads: models, tokenizers, templates, rows."""
    for key, text in _texts(config.model_dump(mode="json", exclude={"data": {"train", "eval"}}), ""):
        path = Path(text).expanduser()
        if key not in _WRITTEN and _exists(path):
            yield key, path
            yield from ((key, inner) for inner in (path.iterdir() if path.is_dir() else ()))
    for name, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for number, source in enumerate(sources):
            key = f"data.{name}[{number}].path"
            with contextlib.suppress(RequestError, OSError, ValueError):
                yield from ((key, file) for file in find_files(source.path, parse_split(source.split), key))


def remove(held: Sequence[Path]) -> None:
    """Remove files of runs. All of them are renamed first; if that fails, nothing is removed. Raises RequestError."""
    going = sorted((path for found in held for path in _of_runs(found)), key=lambda path: path.name == ENVIRONMENT)
    renamed = list[tuple[Path, Path]]()
    try:
        for path in going:
            aside = path.with_name(f".{path.name}.overwritten")
            discard(aside)
            path.rename(aside)
            renamed.append((path, aside))
    except OSError as error:
        for earlier, aside in reversed(renamed):
            with contextlib.suppress(OSError):
                aside.rename(earlier)
        raise RequestError([_unmoved(path, error.strerror or str(error))]) from None
    for _, aside in renamed:
        discard(aside)
    for found in held:
        with contextlib.suppress(OSError):
            found.rmdir()  # the folder of checkpoints or the export, unless it has files of the user


def _of_runs(found: Path) -> list[Path]:
    """The parts of a file or folder that a run wrote."""
    if found.name == "checkpoints" and found.is_dir():
        return [*checkpoints(found.parent), *leftovers(found.parent)]
    if (found.name in (FINAL, MERGED, GGUF) or found.name.startswith(UNFINISHED)) and found.is_dir():
        return exported(found)
    return [found]


def read_environment(folder: Path) -> dict[str, Any]:
    """Content of a run folder's `environment.json`; empty if it is missing or another program's."""
    try:
        document = json.loads(read_regular(folder / ENVIRONMENT))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _immovable(held: Sequence[Path]) -> Iterator[Problem]:
    for found in held:
        for path in dict.fromkeys((found, *_of_runs(found))):
            if reason := kept_for(path):
                yield _unmoved(path, reason)
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                yield _unmoved(path, "Permission denied")


def _unmoved(path: Path, reason: str) -> Problem:
    message = f"{path} cannot be removed: {reason}. Nothing was removed."
    return Problem("--overwrite", message, expected="another training.output_dir, or to remove it yourself")


def _texts(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Each string value of a config with its dotted key."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _texts(value, f"{key}.{name}".lstrip("."))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _texts(value, f"{key}[{number}]")
    elif isinstance(tree, str) and tree:
        yield key, tree


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False
