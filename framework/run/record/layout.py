"""Names of files and folders in a run folder, and atomic writing of files. Loads no torch."""

import os
import re
import shutil
from pathlib import Path

PARTS = "parts"
"""Folder within a checkpoint of sharded weights, into which every rank writes its shards."""
UNFINISHED = "export-step-"
"""Name prefix of an export written because no checkpoint could be."""
FINAL = "final"
"""Folder of the export."""
MERGED, GGUF = "merged", "gguf"
"""Folders that `merge` and `export` create from the export."""
MERGED_FROM = "merged_from.json"
"""File in a merged model: the digest of the adapter in it."""
_GGUF_FILES = ("*-f16.gguf", "*-q8_0.gguf", "Modelfile")
_EXPORTED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("*token*.json", "*token*.model", "*.spm", "spiece.model", "vocab.*", "merges.txt", "*.tiktoken"),
    *("chat_template.*", "additional_chat_templates", "*.py", "base_model*", MERGED_FROM),
)
"""Patterns of an export's files. Other files in its folder belong to the user and are kept."""
_SAVED = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "random-[0-9]*.json", "state.json", PARTS)
"""Patterns of a checkpoint's files."""
_NAME = re.compile(r"step-[0-9]{8}")
_LEFT = re.compile(r"\.step-[0-9]{8}\.(incomplete|replaced|retired)|\.parts")
"""Patterns of a killed run's remains: a checkpoint that was being written or deleted."""


def checkpoint_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first. Other files and folders are ignored."""
    return sorted(path for path in _entries(folder) if _NAME.fullmatch(path.name) and path.is_dir())


def leftovers(folder: Path) -> list[Path]:
    """Remains of killed runs among the checkpoints of a run folder."""
    return sorted(path for path in _entries(folder) if _LEFT.fullmatch(path.name))


def exported(folder: Path) -> list[Path]:
    """Files in the folder of an export, or of one created from it, that tunesmith wrote."""
    patterns = _GGUF_FILES if folder.name == GGUF else _EXPORTED
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def others_files(folder: Path, name: str) -> list[Path]:
    """Files that no run wrote in a folder which has or had the `name` of a checkpoint or an export."""
    patterns = _SAVED if _NAME.fullmatch(name) else _EXPORTED
    found = set(folder.iterdir()) if folder.is_dir() else set()
    return sorted(found.difference(*(folder.glob(pattern) for pattern in patterns)))


def kept_for(path: Path) -> str | None:
    """Reason why a file or folder in a run folder must not be deleted; None if a run wrote it."""
    if path.is_symlink():
        return f"it is a link to {os.readlink(path)}, which no run made"
    others = [other.name for other in others_files(path, path.name)] if _NAME.fullmatch(path.name) else []
    seen = [
        name for name in others if not name.startswith(".")
    ]  # hidden files of file systems and browsers may be deleted
    return f"no run wrote {', '.join(seen[:3])} in it" if seen else None


def _entries(folder: Path) -> list[Path]:
    try:
        return list((folder / "checkpoints").iterdir())
    except OSError:
        return []


_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def aside_of(target: Path) -> Path:
    """Temporary path at which a file or folder is written before it is renamed to `target`."""
    return target.with_name(f".{target.name}.incomplete")


def replace_file(file: Path, text: str) -> None:
    """Write a file atomically. A link in its place is replaced, not followed. Raises OSError."""
    aside = aside_of(file)
    discard(aside)
    try:
        descriptor = os.open(aside, os.O_WRONLY | _NEW, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as opened:
            opened.write(text)
        os.replace(aside, file)
    except OSError:
        discard(aside)
        raise


def append_line(file: Path, line: str) -> None:
    """Append a line completely or not at all, without following links. Raises OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        size, data = os.fstat(descriptor).st_size, f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)  # removes the part that a full disk accepted
            raise
    finally:
        os.close(descriptor)


def discard(path: Path) -> bool:
    """Delete a file, a link or a folder with its content, as far as possible. Returns whether nothing is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
    return not os.path.lexists(path)
