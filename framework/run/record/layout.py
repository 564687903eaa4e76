"""Names of what a run folder holds, and its files written so that none is ever half there. Loads no torch."""

import os
import re
import shutil
from pathlib import Path

PARTS = "parts"
"""Folder of a checkpoint of sharded weights, into which every rank has written its part."""
UNFINISHED = "export-step-"
"""Beginning of the name of an export of a run that ended because no checkpoint could be written."""
FINAL = "final"
"""Folder of the export in a run folder."""
MERGED, GGUF = "merged", "gguf"
"""Folders in a run folder of what `merge` and `export` make of the export."""
_GGUF_FILES = ("*-f16.gguf", "*-q8_0.gguf", "Modelfile")
_EXPORTED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("*token*.json", "*token*.model", "*.spm", "spiece.model", "vocab.*", "merges.txt", "*.tiktoken"),
    *("chat_template.*", "additional_chat_templates", "*.py", "base_model*"),
)
"""What an export consists of, as patterns. Other files in its folder are someone else's and stay."""
_SAVED = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "random-[0-9]*.json", "state.json", PARTS)
"""What a checkpoint consists of."""
_NAME = re.compile(r"step-[0-9]{8}")
_LEFT = re.compile(r"\.step-[0-9]{8}\.(incomplete|replaced|retired)|\.parts")
"""What a run that was killed may leave: a checkpoint on its way in or out."""


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was made."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first. Files and folders of other names are nobody's business."""
    return sorted(path for path in _entries(folder) if _NAME.fullmatch(path.name) and path.is_dir())


def leftovers(folder: Path) -> list[Path]:
    """What runs that were killed have left among the checkpoints of a run folder."""
    return sorted(path for path in _entries(folder) if _LEFT.fullmatch(path.name))


def exported(folder: Path) -> list[Path]:
    """What of an export's folder, or of one that was made of it, is ours."""
    patterns = _GGUF_FILES if folder.name == GGUF else _EXPORTED
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def others_files(folder: Path, name: str) -> list[Path]:
    """What no run wrote of the folder of a checkpoint, or else of an export, that has or had this name."""
    patterns = _SAVED if _NAME.fullmatch(name) else _EXPORTED
    found = set(folder.iterdir()) if folder.is_dir() else set()
    return sorted(found.difference(*(folder.glob(pattern) for pattern in patterns)))


def kept_for(path: Path) -> str | None:
    """Why a file or folder of a run folder is not a run's to delete, in words; None where it is."""
    if path.is_symlink():
        return f"it is a link to {os.readlink(path)}, which no run made"
    others = [other.name for other in others_files(path, path.name)] if _NAME.fullmatch(path.name) else []
    seen = [name for name in others if not name.startswith(".")]  # what file systems and browsers put there may go
    return f"no run wrote {', '.join(seen[:3])} in it" if seen else None


def _entries(folder: Path) -> list[Path]:
    try:
        return list((folder / "checkpoints").iterdir())
    except OSError:
        return []


_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def aside_of(target: Path) -> Path:
    """Where a file or folder is written before it takes its name."""
    return target.with_name(f".{target.name}.incomplete")


def replace_file(file: Path, text: str) -> None:
    """Write a file whole or not at all. A link in its place is replaced, not followed. Raises OSError."""
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
    """Append a line whole or not at all, where no link is followed. Raises OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        size, data = os.fstat(descriptor).st_size, f"{line}\n".encode()
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            os.ftruncate(descriptor, size)  # what a full disk has taken of it
            raise
    finally:
        os.close(descriptor)


def discard(path: Path) -> bool:
    """Delete a file, a link or a folder with what is in it, as far as that can be; whether nothing is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
    return not os.path.lexists(path)
