"""Files as bytes, decompressed where their names say that they are compressed."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from framework.regular_files import open_regular


def _open_zstd(path: Path) -> BinaryIO:
    """By Arrow's codec, which is always there; Python has one of its own from 3.14 on."""
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))


_OPENERS: Mapping[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast(BinaryIO, gzip.GzipFile(path)),
    ".bz2": lambda path: cast(BinaryIO, bz2.BZ2File(path)),
    ".xz": lambda path: cast(BinaryIO, lzma.LZMAFile(path)),  # noqa: SIM115 - the caller closes it
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPENERS)
"""Last endings of the names of compressed files, in lower case."""

BROKEN = (EOFError, zlib.error, lzma.LZMAError)
"""What reading raises where compressed data is cut short or damaged, next to OSError."""


def open_bytes(path: Path) -> BinaryIO:
    """The file from its beginning, decompressed as it is read. Raises OSError; reading also one of BROKEN."""
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        return open_regular(path)
    open_regular(path).close()
    return opener(path)


def ending(path: Path) -> str:
    """The ending that says what is in the file, in lower case: `.jsonl` of `a.jsonl` and of `a.jsonl.gz`."""
    last = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if last in COMPRESSED else last
