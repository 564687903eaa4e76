"""Which files a `path` means: one file, a folder of them, a folder of `datasets.save_to_disk`, or a glob."""

import glob
import json
import os
import re
from pathlib import Path

from framework.build.hub import nearest
from framework.build.sources.files import endings, is_read
from framework.build.sources.remote import fetch
from framework.errors import Problem, RequestError
from framework.regular_files import read_regular
from framework.schema.split import Split
from framework.schema.urls import data_url_problem, is_url

STANDARD_LIBRARY = "python_stdlib"
"""The path that means the embedded source."""

STANDARD_DOCSTRINGS = "python_docstrings"
"""The path that means the docstrings of some of its packages, labelled with the package."""

PYTHON_ROWS = "python_rows"
"""The path that means rows which a program hands over."""

_SPLIT_WORD = re.compile(r"(?:^|[-_./])(train|validation|valid|val|dev|test|eval)(?=[-_./]|\d|$)", re.IGNORECASE)
_SPLIT_SYNONYMS = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}


def is_local(path: str) -> bool:
    """Whether the path means files: it exists here, or is spelled as no hub id is."""
    spelled = path.startswith((".", "/", "~")) or path.count("/") > 1 or glob.has_magic(path)
    return spelled or is_read(Path(path)) or Path(path).exists()


def find_files(written: str, split: Split, key: str) -> list[Path]:
    """The files of a path, a folder (all data files in it), a glob or a URL, fetched here; sorted. Raises RequestError
    when there are none.

    In a folder whose files are named for splits (`train.jsonl`, `data/test-00000.parquet`), only those of the split
    are meant; in one that `save_to_disk` wrote, the files that it lists.
    """
    if is_url(written):
        return _regular(_remote(written, split, key), key)
    path = Path(written).expanduser()
    if path.is_dir():
        return _regular(_files_of(path, split, key), key)
    if not path.exists() and glob.has_magic(written):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    else:
        found = [path] if path.exists() else []
    if not found:
        raise RequestError([_missing(path, written, key)])
    unread = [file for file in found if not is_read(file)]
    if unread:
        message = f"{unread[0]} is of a kind that is not read (it ends in {''.join(unread[0].suffixes) or 'nothing'!r})"
        raise RequestError([Problem(key, message, expected=endings())])
    return _regular(found, key)


def _remote(url: str, split: Split, key: str) -> list[Path]:
    if problem := data_url_problem(url):
        raise RequestError([Problem(key, problem[0], expected=problem[1])])
    return fetch(url, key, lambda inside: _of_split(inside, Path(), split))


def _regular(files: list[Path], key: str) -> list[Path]:
    """The files. Raises RequestError where one is a pipe, a socket or a device: rows are read more than once, and
    opening a pipe that nobody writes to waits for ever."""
    odd = [file for file in files if file.exists() and not file.is_file()]
    if odd:
        message = f"{odd[0]} is not a regular file, and rows are read more than once"
        raise RequestError([Problem(key, message, expected="a file on disk: write the rows to one first")])
    return files


def nearest_path(path: Path, written: str) -> str | None:
    """The path as written, with its last part replaced by the nearest name that exists there."""
    close = nearest(
        path.name, [*(sibling.name for sibling in path.parent.glob("*")), STANDARD_LIBRARY, STANDARD_DOCSTRINGS]
    )
    return os.path.join(os.path.dirname(written), close) if close else None


def _files_of(folder: Path, split: Split, key: str) -> list[Path]:
    saved = _saved(folder, split, key)
    found = saved or _of_split([file for file in sorted(folder.rglob("*")) if _is_data(file, folder)], folder, split)
    if not found:
        raise RequestError([_nothing_in(folder, split, key)])
    return found


def _saved(folder: Path, split: Split, key: str) -> list[Path]:
    """The files of a folder that `datasets.save_to_disk` wrote, in order; none where something else wrote it."""
    try:
        if (folder / "dataset_dict.json").exists():
            names = json.loads(read_regular(folder / "dataset_dict.json"))["splits"]
            if split.name not in names:
                message = f"{folder.absolute()} has no split {split.name!r}; it has {', '.join(names)}"
                raise RequestError([Problem(f"{key}.split", message, nearest=nearest(split.name, names))])
            return _listed(folder / split.name)
        if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
            return _listed(folder) if split.name == "train" else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"the folder {folder.absolute()} is not as `save_to_disk` writes one: {error!r}"
        raise RequestError([Problem(key, message)]) from error
    return []


def _listed(folder: Path) -> list[Path]:
    return [folder / file["filename"] for file in json.loads(read_regular(folder / "state.json"))["_data_files"]]


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    described = path.name in ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
    return is_read(path) and path.is_file() and not hidden and not described


def _of_split(files: list[Path], folder: Path, split: Split) -> list[Path]:
    named = {file: _split_named(str(file.relative_to(folder))) for file in files}
    if not any(named.values()):
        return files if split.name == "train" else []
    return [file for file in files if named[file] == _SPLIT_SYNONYMS.get(split.name, split.name)]


def _split_named(path: str) -> str | None:
    words = [word.lower() for word in _SPLIT_WORD.findall(path)]
    return _SPLIT_SYNONYMS.get(words[-1], words[-1]) if words else None


def _nothing_in(folder: Path, split: Split, key: str) -> Problem:
    data = [file for file in sorted(folder.rglob("*")) if _is_data(file, folder)]
    if data:
        names = ", ".join(str(file.relative_to(folder)) for file in data[:8])
        message = f"the folder {folder.absolute()} has no file for the split {split.name!r}; it has {names}"
        return Problem(f"{key}.split", message)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    message = f"the folder {folder.absolute()} has no data files; it has {found}"
    return Problem(key, message, expected=endings())


def _missing(path: Path, written: str, key: str) -> Problem:
    what = "no file matches" if glob.has_magic(written) else "there is no file or folder"
    looked = "" if Path(written).is_absolute() else f" (looked at {path.absolute()})"
    return Problem(key, f"{what} {written}{looked}", nearest=nearest_path(path.absolute(), written))
