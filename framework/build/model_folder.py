"""Checks of a model's folder before a library reads it, with messages that name the missing or damaged file."""

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from framework.build.hub import one_line, require_regular_files
from framework.compose.trained_folders import describe_trained
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.paths import open_regular, path_like, read_regular
from framework.schema.model import ModelParams

KEY = "model.model_name"
ADAPTER_FILE, CONFIG_FILE = "adapter_config.json", "config.json"
OBJECTS = (
    CONFIG_FILE,
    ADAPTER_FILE,
    SAFE_WEIGHTS_INDEX_NAME,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "vocab.json",
)
"""Files with one JSON object each. transformers ignores some of them if they are damaged."""
_NAMES = (lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of names")
_NUMBER = (lambda value: type(value) in (int, float), "a number")
_COUNT = (lambda value: type(value) is int and value >= 0, "a whole number, 0 or more")
_ONE_OR_MORE = (lambda value: type(value) is int and value >= 1, "a whole number, 1 or more")
_TOKENS = (
    lambda value: all(type(token) is int for token in (value if isinstance(value, list) else [value])),
    "a token id, or a list of them",
)
_VALUES: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    CONFIG_FILE: {"architectures": _NAMES},
    "generation_config.json": {
        **dict.fromkeys(
            ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"), _NUMBER
        ),
        **dict.fromkeys(("top_k", "min_length", "max_length", "min_new_tokens", "no_repeat_ngram_size"), _COUNT),
        **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "max_new_tokens"), _ONE_OR_MORE),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    },
}
"""File -> setting -> check of its value, and a description of valid ones."""
TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")


def local_folder(name: str) -> Path | None:
    """The folder that a model's name refers to, existing or not; None for a hub id."""
    folder = Path(os.path.expanduser(name))
    is_path = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return folder if is_path or os.path.isdir(folder) else None  # False also for names that no file can have


def reads_own_config(model: ModelParams) -> bool:
    """Whether the config next to the weights is read, and `model.architecture` only modifies it: for a folder that
    weights are loaded from, and for a hub model unless `model.architecture` is complete, which needs no network."""
    if model.model_name is None or (model.architecture is not None and not model.load_pretrained_weights):
        return False
    folder = local_folder(model.model_name)
    return "model_type" not in (model.architecture or {}) or (folder is not None and (folder / CONFIG_FILE).exists())


def require_model(folder: Path, key: str) -> None:
    """Raise RequestError, under `key`, if a folder holds no model: it is missing, holds an adapter, or a file is
    damaged."""
    if not folder.is_dir():
        raise RequestError([missing_folder(folder, key)])
    require_readable(folder, key)
    if (folder / CONFIG_FILE).exists():
        return
    if (described := describe_trained(folder)) is not None:
        raise RequestError([Problem(key, described[0], expected=described[1])])
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise RequestError([Problem(key, f"{folder} has no {CONFIG_FILE}; it has {found}", expected="a model's folder")])


def missing_folder(name: str | Path, key: str) -> Problem:
    """Problem for a path without a folder, with the most similar one."""
    folder = Path(name).expanduser()
    looked_at = "" if Path(name).is_absolute() else f" (looked at {folder.absolute()})"
    message = f"{name} is a file, not a folder" if folder.is_file() else f"there is no folder {name}{looked_at}"
    return Problem(key, message, nearest=path_like(name, Path.is_dir))


def require_readable(folder: Path, key: str) -> None:
    """Raise RequestError, under `key`, with every small file of a folder that cannot be read or has a wrong value."""
    require_regular_files(folder, key)
    problems = list[Problem]()
    for file in (folder / name for name in (*OBJECTS, *TEXTS) if (folder / name).exists()):
        try:
            _ = read_object(file, key) if file.name in OBJECTS else read_regular(file)
        except RequestError as error:
            problems += error.problems
        except (OSError, ValueError) as error:
            problems.append(_damaged(file, key, one_line(error)))
    if problems := problems or [*_wrong_values(folder, key)]:
        raise RequestError(problems)


def _wrong_values(folder: Path, key: str) -> Iterator[Problem]:
    """Config values that transformers does not check when reading, and that fail on first use."""
    for name, checks in _VALUES.items():
        settings = read_object(folder / name, key) if (folder / name).exists() else {}
        for setting, (is_right, expected) in checks.items():
            if settings.get(setting) is not None and not is_right(settings[setting]):
                shown = textwrap.shorten(repr(settings[setting]), 60)
                yield Problem(key, f"{folder / name} has {setting} {shown}", expected=expected)


def read_object(file: Path, key: str) -> dict[str, Any]:
    """The JSON object in a file. Raises RequestError, under `key`, if there is none."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError([_damaged(file, key, one_line(error))]) from None
    if not isinstance(found, dict):
        kind = "null" if found is None else f"a {type(found).__name__}"
        raise RequestError([_damaged(file, key, f"it holds {kind} instead of an object")])
    return found


def _damaged(file: Path, key: str, reason: str) -> Problem:
    return Problem(key, f"{file} cannot be read: {reason}", expected="the file as it was published or saved")


def weight_files(folder: Path, key: str) -> list[Path]:
    """The safetensors files of a model's folder, each with a header that agrees with its size.

    Raises RequestError, under `key`, with every file that is missing or damaged.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        listed = read_object(index, key).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
            raise RequestError([_damaged(index, key, "its weight_map does not map weights to files")])
        files = [index.parent / name for name in sorted(set(listed.values()))]
    elif (folder / SAFE_WEIGHTS_NAME).exists():
        files = [folder / SAFE_WEIGHTS_NAME]
    else:
        raise RequestError([_no_weights(folder, key)])
    problems = [problem for file in files if (problem := _unreadable(file, key)) is not None]
    if problems:
        raise RequestError(problems)
    return files


def checkpoint_files(model: ModelParams) -> list[Path]:
    """The safetensors files of `model.model_name`, downloaded if they are on the hub; empty if the hub has none. Raises
    RequestError as `weight_files` does."""
    name = str(model.model_name)
    if (folder := local_folder(name)) is not None:
        return weight_files(folder, KEY)
    revision, is_alone = model.model_revision or "main", not hub_is_reachable()
    settings: dict[str, Any] = {"revision": revision, "local_files_only": is_alone}
    try:
        index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **settings)
        if index is not None:
            return [Path(file) for file in get_checkpoint_shard_files(name, index, **settings)[0]]
        whole = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **settings)
    except Exception as error:  # the hub client and its cache raise many types
        raise RequestError([Problem(KEY, f"the weights of {name!r} do not load: {one_line(error)}")]) from None
    return [Path(whole)] if whole is not None else []


def _no_weights(folder: Path, key: str) -> Problem:
    pickled = next((name for name in PICKLES if (folder / name).exists()), None)
    if pickled is not None:
        message = f"the weights in {folder} are pickled ({pickled}), and reading a pickle can run arbitrary code"
        return Problem(key, message, expected="safetensors: load them where you trust them and save_pretrained again")
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    return Problem(key, f"{folder} has no weights; it has {found}", expected=SAFE_WEIGHTS_NAME)


def _unreadable(file: Path, key: str) -> Problem | None:
    """Problem with a file of weights, judged by its header and size."""
    try:
        if not file.exists():
            message = f"{file} is missing, and the index of its folder names it"
            return Problem(key, message, expected="the whole folder")
        open_regular(file).close()  # an index may name one anywhere
        with safe_open(file, framework="pt"):
            return None
    except (OSError, SafetensorError) as error:
        return _damaged(file, key, one_line(error))
