"""Cache of tokenized rows in the user's cache folder.

The name of an entry is a hash of everything that determines the rows: the files and their modification times, how they
are read, the tokenizer with its template, the limits and the task, the libraries and our own code. So an entry is never
out of date. It is written to a temporary folder and renamed; its arrays are memory-mapped, so rows cost host memory
only as they are used.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from framework.build.data.report import SplitReport
from framework.build.data.rows import Rows
from framework.build.sources.find_files import PYTHON_ROWS, STANDARD_DOCSTRINGS, STANDARD_LIBRARY, find_files, is_local
from framework.build.sources.python_library import docstring_files, library_files
from framework.build.text.classes import Targets
from framework.errors import RequestError
from framework.installation import cache_folder, our_files, versions
from framework.memory.units import size
from framework.schema.config import TrainingConfig
from framework.schema.data import DatasetParams, parse_split

LIMIT = 20 << 30
"""Maximum bytes of all entries; the least recently used are evicted first. A guess: some runs of a billion tokens."""

LEAST_SECONDS = 1.0
"""Minimum preparation time of a cached entry: reading one takes about as long."""

_LIBRARIES = ("transformers", "tokenizers", "datasets", "pyarrow", "numpy", "jinja2")
_NO_MATTER = (
    *("workers", "packing", "padding_free", "group_by_length", "pad_to_multiple_of", "mixing", "shuffle_buffer"),
    *("streaming", "cache"),
)
"""Keys of `data` that do not affect the tokenized rows. `weight` of a source too."""


@dataclass(frozen=True)
class Fitted:
    """Truncated rows, before mixing and packing, with their reports and messages."""

    train: Rows
    train_report: SplitReport
    kept: tuple[int, ...]
    """Training rows of each source."""
    eval: Rows | None
    eval_report: SplitReport | None
    eval_kept: tuple[int, ...]
    """Evaluation rows of each source; empty if they were held out of the training rows."""
    row_format: str
    """Row format of the first training source."""
    sources: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    targets: Targets | None


class RowCache:
    """The entry of one config and tokenizer; `folder` is None if rows are not cached, with the reason in `why`."""

    def __init__(self, config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> None:
        self.folder: Path | None = None
        self._started = time.perf_counter()
        self.why = _why_not(config, tokenizer)
        if self.why is None:
            with suppress(OSError, RequestError):  # reported when the rows are read
                key = json.dumps(_key(config, tokenizer, vocab_size), sort_keys=True, default=str)
                self.folder = cache_folder("rows") / hashlib.sha256(key.encode()).hexdigest()[:32]

    def read(self) -> Fitted | None:
        """The cached rows, or None."""
        if self.folder is None or not self.folder.exists():
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads((self.folder / "rows.json").read_text(encoding="utf-8"))
            found = Fitted(
                train=_load(self.folder, "train"),
                train_report=_report(document["train_report"]),
                kept=tuple(document["kept"]),
                eval=_load(self.folder, "eval") if document["eval_report"] else None,
                eval_report=_report(document["eval_report"]) if document["eval_report"] else None,
                eval_kept=tuple(document["eval_kept"]),
                row_format=document["row_format"],
                sources=tuple(document["sources"]),
                warnings=tuple(document["warnings"]),
                notes=(*document["notes"], f"rows read from the cache: {self.folder}"),
                targets=_targets(document["targets"]),
            )
            os.utime(self.folder)
            return found
        shutil.rmtree(self.folder, ignore_errors=True)  # damaged
        return None

    def write(self, fitted: Fitted) -> str | None:
        """Cache the rows if they took long to make. Returns a note for the report, if any.

        A folder that cannot be written, or is nearly full, only costs time on the next run.
        """
        if self.why is not None:
            return self.why
        if self.folder is None or time.perf_counter() - self._started < LEAST_SECONDS:
            return None
        splits = {"train": fitted.train} | ({"eval": fitted.eval} if fitted.eval is not None else {})
        arrays = {name: array for split, rows in splits.items() for name, array in _arrays(rows, split)}
        needed = sum(array.nbytes for array in arrays.values())
        aside = self.folder.with_name(f".{self.folder.name}.{os.getpid()}")
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if needed > LIMIT or shutil.disk_usage(self.folder.parent).free < 4 * needed:
                return f"rows ({size(needed)}) are not cached: not enough space in {self.folder.parent}"
            aside.mkdir()
            for name, array in arrays.items():
                np.save(aside / f"{name}.npy", array)
            document = asdict(replace(fitted, train=cast(Rows, None), eval=None))  # stored as arrays
            (aside / "rows.json").write_text(json.dumps(document), encoding="utf-8")
            if self.folder.exists():  # another process was faster
                shutil.rmtree(aside)
            else:
                aside.rename(self.folder)
            _forget_oldest(self.folder.parent)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            return f"rows are not cached: {self.folder.parent}: {error.strerror}"
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return f"rows cached for the next run: {self.folder} ({size(needed)})"


def _why_not(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why rows of this config are not cached; empty if the user disabled the cache."""
    if not config.data.cache:
        return ""
    if config.data.streaming:
        return "streamed rows are not cached"
    if not getattr(tokenizer, "is_fast", False):
        return "rows are not cached: a slow tokenizer has no digest"
    for source in (*config.data.train, *config.data.eval):
        if source.path not in (STANDARD_LIBRARY, STANDARD_DOCSTRINGS, PYTHON_ROWS) and not is_local(source.path):
            return f"rows are not cached: {source.path} is a dataset of the hub"
    return None


def _key(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> dict[str, Any]:
    data, training = config.data, config.training
    return {
        "data": {name: value for name, value in data.model_dump(mode="json").items() if name not in _NO_MATTER}
        | {"train": [_source(source, "data.train") for source in data.train]}
        | {"eval": [_source(source, "data.eval") for source in data.eval]},
        "task": [training.task, training.preference.model_dump(mode="json")],
        "seed": training.seed if data.eval_fraction and not data.eval else None,
        "limit": [config.model.model_max_length, vocab_size],
        "tokenizer": [
            hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
            type(tokenizer).__name__,
            tokenizer.chat_template,
            tokenizer.padding_side,
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        ],
        "made with": [versions(_LIBRARIES), our_files()],
    }


def _source(source: DatasetParams, key: str) -> list[Any]:
    """A source, with the paths, sizes and modification times of its files."""
    if source.path == PYTHON_ROWS:
        files = []
    elif source.path == STANDARD_LIBRARY:
        files = library_files()
    elif source.path == STANDARD_DOCSTRINGS:
        files = docstring_files()
    else:
        files = find_files(source.path, parse_split(source.split), key)
    facts = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [source.model_dump(mode="json", exclude={"weight"}), facts]


def _arrays(rows: Rows, name: str) -> Iterator[tuple[str, np.ndarray]]:
    for field in fields(rows):
        value = getattr(rows, field.name)
        if isinstance(value, Rows):
            yield from _arrays(value, f"{name}.{field.name}")
        elif value is not None:
            yield f"{name}.{field.name}", value


def _load(folder: Path, name: str) -> Rows:
    """Load rows from memory-mapped arrays. Raises ValueError if they are incomplete."""
    found: dict[str, Any] = {}
    for field in fields(Rows):
        file = folder / f"{name}.{field.name}.npy"
        if file.exists():
            found[field.name] = np.load(file, mmap_mode="r" if file.stat().st_size > 4096 else None)
        elif (folder / f"{name}.{field.name}.offsets.npy").exists():
            found[field.name] = _load(folder, f"{name}.{field.name}")
    rows = Rows(**found)
    if len(rows.tokens) != rows.offsets[-1] or len(rows.labels) != len(rows.tokens):
        raise ValueError(f"{folder} does not hold whole rows")
    return rows


def _report(document: dict[str, Any]) -> SplitReport:
    return SplitReport(**{**document, "mixture": ()})


def _targets(document: dict[str, Any] | None) -> Targets | None:
    if document is None:
        return None
    facts: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in document.items()}
    return Targets(**facts)


def _forget_oldest(folder: Path) -> None:
    """Evict the least recently used entries until the total is within the limit."""
    entries = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.stat().st_mtime)
    sizes = [sum(file.stat().st_size for file in entry.iterdir()) for entry in entries]
    for entry, own in zip(entries[:-1], sizes, strict=False):
        if sum(sizes) <= LIMIT:
            return
        sizes.remove(own)
        shutil.rmtree(entry, ignore_errors=True)
