"""Files of a source's `path`: a file, a folder, a folder of `datasets.save_to_disk`, a glob, or a URL, which is
fetched."""

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from framework.activity import doing
from framework.build.hub import nearest, one_line
from framework.build.sources.files import endings, is_read
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.installation import cache_folder
from framework.paths import read_regular
from framework.schema.data import Split
from framework.schema.urls import data_url_problem, is_url, scheme_of

STANDARD_LIBRARY = "python_stdlib"
"""Path of the built-in source of Python files."""

STANDARD_DOCSTRINGS = "python_docstrings"
"""Path of the built-in source of docstrings, labelled with their package."""

PYTHON_ROWS = "python_rows"
"""Path of rows passed by a Python program."""

_SPLIT_WORD = re.compile(r"(?:^|[-_./])(train|validation|valid|val|dev|test|eval)(?=[-_./]|\d|$)", re.IGNORECASE)
_SPLIT_SYNONYMS = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}


def is_local(path: str) -> bool:
    """Whether the path refers to local files: it exists, or cannot be a hub id."""
    spelled = path.startswith((".", "/", "~")) or path.count("/") > 1 or glob.has_magic(path)
    return spelled or is_read(Path(path)) or Path(path).exists()


def find_files(written: str, split: Split, key: str) -> list[Path]:
    """The sorted files of a path, a folder (all data files in it), a glob or a URL, which is fetched. Raises
    RequestError if there are none.

    In a folder with files named after splits (`train.jsonl`, `data/test-00000.parquet`) only those of the split count;
    in a folder written by `save_to_disk`, the files that it lists.
    """
    if is_url(written):
        if problem := data_url_problem(written):
            raise RequestError([Problem(key, problem[0], expected=problem[1])])
        return _regular(fetch(written, key, lambda inside: _of_split(inside, Path(), split)), key)
    path = Path(written).expanduser()
    if path.is_dir():
        saved = _saved(path, split, key)
        files = saved or _of_split([file for file in sorted(path.rglob("*")) if _is_data(file, path)], path, split)
        if not files:
            raise RequestError([_nothing_in(path, split, key)])
        return _regular(files, key)
    if not path.exists() and glob.has_magic(written):
        found = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    else:
        found = [path] if path.exists() else []
    if not found:
        what = "no file matches" if glob.has_magic(written) else "there is no file or folder"
        looked = "" if Path(written).is_absolute() else f" (looked at {path.absolute()})"
        raise RequestError([Problem(key, f"{what} {written}{looked}", nearest=nearest_path(path.absolute(), written))])
    unread = [file for file in found if not is_read(file)]
    if unread:
        ending = "".join(unread[0].suffixes)
        message = f"{unread[0]} has an unsupported format ({f'it ends in {ending!r}' if ending else 'no ending'})"
        raise RequestError([Problem(key, message, expected=endings())])
    return _regular(found, key)


def _regular(files: list[Path], key: str) -> list[Path]:
    """The files. Raises RequestError for pipes, sockets and devices, since rows are read more than once and opening a
    pipe without a writer blocks forever."""
    odd = [file for file in files if file.exists() and not file.is_file()]
    if odd:
        message = f"{odd[0]} is not a regular file, and rows are read more than once"
        raise RequestError([Problem(key, message, expected="a file on disk: write the rows to one first")])
    return files


def nearest_path(path: Path, written: str) -> str | None:
    """The path as written, with its last part replaced by the most similar existing name."""
    close = nearest(
        path.name, [*(sibling.name for sibling in path.parent.glob("*")), STANDARD_LIBRARY, STANDARD_DOCSTRINGS]
    )
    return os.path.join(os.path.dirname(written), close) if close else None


def _saved(folder: Path, split: Split, key: str) -> list[Path]:
    """Files of a folder written by `datasets.save_to_disk`, in order; empty for other folders."""
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
        message = f"the folder {folder.absolute()} is damaged, compared with what `save_to_disk` writes: {error!r}"
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


FOLDER = "files"
"""Subfolder of the cache: `<url>/<version>/<path>`, the first two as digests. It is never cleared."""
PACKAGES: Mapping[str, str] = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    "hf": "huggingface_hub",
    "oci": "ocifs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
}
"""URL scheme -> package that fsspec needs for it."""
_VERSION = ("size", "etag", "ETag", "mtime", "LastModified", "last_modified", "updated", "md5Hash", "blob_id", "sha256")
"""Attributes in drivers' file info that change with the file."""
_NOTES: dict[str, str] = {}
Choose: TypeAlias = Callable[[list[Path]], list[Path]]


def note_of(url: str) -> str:
    """Where the files of a URL are cached, and whether an earlier version is used because it cannot be reached."""
    return _NOTES.get(url, "")


def fetch(url: str, key: str, choose: Choose) -> list[Path]:
    """Local copies of a URL's files: the file itself, the matches of a glob, or the files of a folder that `choose`
    selects by relative path. Unchanged files are not fetched again.

    Raises RequestError if the driver is not installed, nothing is found, or it cannot be read. For a single file that
    cannot be reached, the last fetched version is used.
    """
    try:
        system, path = _connected(url, key)
        found = _listed_remotely(system, path, url, choose)
        with doing(f"fetching {url}"):
            files = [_kept(system, name, url, inside) for name, inside in found]
    except RequestError:
        raise
    except Exception as error:  # drivers raise many types, including their services' own
        before = [file for file in _home(url).glob(f"*/{_name(url)}") if file.is_file()]  # for a URL of one file
        if before:
            newest = max(before, key=lambda file: file.stat().st_mtime)
            _NOTES[url] = f"could not be reached; using the copy fetched before to {newest.parent}"
            return [newest]
        raise RequestError([_unreadable(url, key, error)]) from None
    if not files:
        raise RequestError([Problem(key, f"there are no data files at {url}", expected=endings())])
    _NOTES[url] = f"kept in {cache_folder(FOLDER)}"
    return files


def _connected(url: str, key: str) -> tuple[Any, str]:
    scheme = scheme_of(url)
    if scheme == "hf" and not hub_is_reachable():
        raise ConnectionError("the hub cannot be reached from here")
    import fsspec  # takes a tenth of a second
    from fsspec.core import url_to_fs

    package = PACKAGES.get(scheme)
    try:
        found: tuple[Any, str] = url_to_fs(url)
        return found
    except ImportError:
        expected = f"the package that reads it: pip install {package or 'its driver for fsspec'}"
        raise RequestError([Problem(key, f"{scheme}:// cannot be read without {package}", expected=expected)]) from None
    except ValueError as error:
        if "not known" not in str(error):
            raise
        known = fsspec.available_protocols()
        message = f"there is no storage protocol {scheme}://"
        raise RequestError(
            [Problem(key, message, nearest=nearest(scheme, known), expected=", ".join(PACKAGES))]
        ) from None


def _listed_remotely(system: Any, path: str, url: str, choose: Choose) -> list[tuple[str, Path]]:
    """The driver's name and the relative path of each file of the URL, sorted."""
    is_web = scheme_of(url) in ("http", "https")
    if "*" in path or (not is_web and any(sign in path for sign in "?[")):
        names = sorted(name for name in system.glob(path) if is_read(Path(_name(name))))
        return [(name, Path(_digest(name), _name(name))) for name in names]
    if is_web or not system.isdir(path):
        if not is_read(Path(_name(path))):
            raise ValueError(f"it has an unsupported format; expected {endings()}")
        return [(path, Path(_name(path)))]
    root = path.rstrip("/")
    inside = {Path(name.removeprefix(root).lstrip("/")): name for name in sorted(system.find(root))}
    return [(inside[each], each) for each in choose([each for each in inside if is_read(Path(each.name))])]


def _kept(system: Any, name: str, url: str, inside: Path) -> Path:
    """The local copy of a file, fetched unless this version is cached."""
    info = system.info(name)
    version = {key: str(info[key]) for key in _VERSION if info.get(key) is not None}
    target = _home(url) / _digest(json.dumps([name, version], sort_keys=True)) / inside
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        system.get_file(name, str(aside))
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return target


def _home(url: str) -> Path:
    return cache_folder(FOLDER) / _digest(url)


def _name(path: str) -> str:
    """The file's name, without the query of a URL."""
    return Path(urlsplit(path).path if "://" in path else path).name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unreadable(url: str, key: str, error: Exception) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(key, f"there is nothing at {url}", expected="a file, a folder or a glob of them")
    package = PACKAGES.get(scheme_of(url), "its driver")
    credentials = (
        f"credentials in the places where {package} looks for them" if isinstance(error, PermissionError) else None
    )
    return Problem(key, f"{url} cannot be read: {one_line(error) or type(error).__name__}", expected=credentials)
