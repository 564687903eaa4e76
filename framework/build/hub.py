"""Facts about the Hugging Face hub and its cache that need no download, and helpers for its errors."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from safetensors import SafetensorError

from framework.errors import Problem, RequestError
from framework.paths import special_files

UNLOADABLE = (ImportError, OSError, ValueError, RuntimeError, SafetensorError)
"""Exceptions of libraries for weights that are missing, damaged, or of another model."""


def hub_host() -> str:
    """The hub's host name, for messages."""
    return urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT


def cached_models() -> list[str]:
    """Ids of the models with at least one file in the cache."""
    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `word`, or None if none is close."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1)), None)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The beginning of an exception's message on one line, for use in our messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def require_regular_files(folder: Path, key: str) -> None:
    """Raise RequestError for a folder that contains a FIFO or a device, which a library would block on or act on."""
    if found := special_files(folder):
        message = f"{folder} contains files that are not regular: {', '.join(found)}"
        raise RequestError([Problem(key, message, expected="regular files, and links to them")])


def leave_to_run_code(error: BaseException) -> str | None:
    """The setting to propose if a library refuses to run the model's own Python code; None for other errors."""
    leave = "model.trust_remote_code=true (of predict and merge --trust-remote-code)"
    return f"{leave}, if you trust the code that comes with it" if "trust_remote_code" in str(error) else None
