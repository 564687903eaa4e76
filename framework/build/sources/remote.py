"""Data files of object stores and web servers: fetched through fsspec, once for each version of a file."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from framework.activity import doing
from framework.build.hub import hub_is_reachable, nearest, one_line
from framework.build.sources.files import endings, is_read
from framework.caches import cache_folder
from framework.errors import Problem, RequestError
from framework.schema.urls import scheme_of

FOLDER = "files"
"""Of the cache: `<url>/<version>/<path>`, the first two as digests. It is never emptied."""
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
"""Packages that fsspec reads a kind of URL with."""
_VERSION = ("size", "etag", "ETag", "mtime", "LastModified", "last_modified", "updated", "md5Hash", "blob_id", "sha256")
"""What drivers tell of a file that changes with it."""
_NOTES: dict[str, str] = {}
Choose: TypeAlias = Callable[[list[Path]], list[Path]]


def note_of(url: str) -> str:
    """Where the files of a URL are kept, and whether they were fetched before because it could not be reached now."""
    return _NOTES.get(url, "")


def fetch(url: str, key: str, choose: Choose) -> list[Path]:
    """The files of a URL, as files here: the one that it names, those that a glob means, or of a folder those that
    `choose` leaves of their paths within it. What was fetched before and has not changed is not fetched again.

    Raises RequestError where the driver is not installed, nothing is there, or it cannot be read. One file that cannot
    be reached now is taken as it was fetched before.
    """
    try:
        system, path = _connected(url, key)
        found = _listed(system, path, url, choose)
        with doing(f"fetching {url}"):
            files = [_kept(system, name, url, inside) for name, inside in found]
    except RequestError:
        raise
    except Exception as error:  # drivers raise many kinds, some of them their services' own
        if (before := _fetched_before(url)) is not None:
            _NOTES[url] = f"could not be reached, as it was fetched before to {before.parent}"
            return [before]
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
        message = f"there is no kind of storage called {scheme}://"
        raise RequestError(
            [Problem(key, message, nearest=nearest(scheme, known), expected=", ".join(PACKAGES))]
        ) from None


def _listed(system: Any, path: str, url: str, choose: Choose) -> list[tuple[str, Path]]:
    """Name for the driver, and path within the folder or without one, of each file that is meant; sorted."""
    is_web = scheme_of(url) in ("http", "https")
    if "*" in path or (not is_web and any(sign in path for sign in "?[")):
        names = sorted(name for name in system.glob(path) if is_read(Path(_name(name))))
        return [(name, Path(_digest(name), _name(name))) for name in names]
    if is_web or not system.isdir(path):
        if not is_read(Path(_name(path))):
            raise ValueError(f"it is of a kind that is not read; expected {endings()}")
        return [(path, Path(_name(path)))]
    root = path.rstrip("/")
    inside = {Path(name.removeprefix(root).lstrip("/")): name for name in sorted(system.find(root))}
    return [(inside[each], each) for each in choose([each for each in inside if is_read(Path(each.name))])]


def _kept(system: Any, name: str, url: str, inside: Path) -> Path:
    """The file here, fetched unless this version of it is."""
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


def _fetched_before(url: str) -> Path | None:
    """The newest file that was fetched from a URL of one file."""
    found = [file for file in _home(url).glob(f"*/{_name(url)}") if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def _home(url: str) -> Path:
    return cache_folder(FOLDER) / _digest(url)


def _name(path: str) -> str:
    """The file's own name, without what a web address asks for behind it."""
    return Path(urlsplit(path).path if "://" in path else path).name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unreadable(url: str, key: str, error: Exception) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(key, f"there is nothing at {url}", expected="a file, a folder or a glob of them")
    package = PACKAGES.get(scheme_of(url), "its driver")
    credentials = f"credentials where {package} looks for them" if isinstance(error, PermissionError) else None
    return Problem(key, f"{url} cannot be read: {one_line(error) or type(error).__name__}", expected=credentials)
