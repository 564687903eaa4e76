"""Resolution of relative paths in values against the working directory."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.schema.urls import is_url

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".md")
"""Endings of data paths that are files, not hub ids."""

WRITTEN = ("output_dir", "fallback_dir")
"""Keys of `training` for folders that a run creates."""
NAMING: Mapping[str, tuple[str, ...]] = {
    "training": WRITTEN,
    "model": ("model_name", "tokenizer_name", "chat_template"),
    "peft": ("adapter_path",),
}
"""Keys of sections that may name a local file or folder."""
EMBEDDED = ("python_stdlib", "python_docstrings")
"""Data paths that are names of built-in sources."""


def looks_local(text: str) -> bool:
    """Whether a text must be a path: hub ids do not start with a dot, tilde or slash, and have no glob characters."""
    return text.startswith((".", "~", "/")) or text.endswith(DATA_SUFFIXES) or glob.has_magic(text)


def exists(text: str) -> bool:
    """Whether a file or folder of that name exists; False for impossible names."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def leads_somewhere(text: str) -> bool:
    """Whether a file or folder of that name, or a match of the glob, exists."""
    found = glob.iglob(os.path.expanduser(text), recursive=True) if glob.has_magic(text) else ()
    return exists(text) or any(True for _ in found)


def made_absolute(written: Mapping[str, Any]) -> dict[str, Any]:
    """The written values with absolute paths, for existing files and texts that must be paths."""
    changed = dict(written)
    for section, keys in NAMING.items():
        if isinstance(written.get(section), Mapping):
            changed[section] = {
                key: _absolute(value, key) if key in keys else value for key, value in written[section].items()
            }
    if isinstance(written.get("data"), Mapping):
        changed["data"] = {key: _sources(value) for key, value in written["data"].items()}
    return changed


def _sources(value: Any) -> Any:
    sources = value if isinstance(value, list) else ()
    absolute = [{**item, "path": _absolute(item["path"], "path")} if _has_path(item) else item for item in sources]
    return absolute if isinstance(value, list) else value


def _has_path(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("path", EMBEDDED[0]) not in EMBEDDED


def _absolute(value: Any, key: str) -> Any:
    if not isinstance(value, str) or not value or "\n" in value or "\0" in value or is_url(value):
        return value
    if key in WRITTEN or exists(value) or (key != "chat_template" and looks_local(value)):
        return os.path.abspath(os.path.expanduser(value))
    return value
