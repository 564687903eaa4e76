"""What can be known about the Hugging Face hub without asking it for a file."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from safetensors import SafetensorError

from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable as hub_is_reachable
from framework.paths import special_files

UNLOADABLE = (ImportError, OSError, ValueError, RuntimeError, SafetensorError)
"""What libraries raise where weights are missing, damaged, or of something else."""


def hub_host() -> str:
    """The host to name in a message."""
    return urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT


def cached_models() -> list[str]:
    """Ids of the models of which this machine has at least one file."""
    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None when nothing is near."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1)), None)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The beginning of a library's message on one line, for use inside a message of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def require_regular_files(folder: Path, key: str) -> None:
    """Raise RequestError for a folder with a FIFO or a device in it, which a library would wait for or act on."""
    if found := special_files(folder):
        message = f"{folder} has in it what is no regular file: {', '.join(found)}"
        raise RequestError([Problem(key, message, expected="regular files, and links to them")])


def leave_to_run_code(error: BaseException) -> str | None:
    """What to write where a library asks for it, because the model comes with Python code; None for other errors."""
    leave = "model.trust_remote_code=true (of predict and merge --trust-remote-code)"
    return f"{leave}, if you trust the code that comes with it" if "trust_remote_code" in str(error) else None
