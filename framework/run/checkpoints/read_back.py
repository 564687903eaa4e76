"""Verification of written tensors by reading the file back: names, shapes, dtypes, and a checksum over every byte.

Checkpoint files keep the checksums in their headers, so that a resumed run detects damage by a disk or a copy.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from framework.errors import SaveFailed
from framework.schema.plural import counted

_THREADS = min(8, os.cpu_count() or 1)
"""Checksums and reading release the GIL; a core checks about 1 GB/s."""
_PIECE = 1 << 24
"""Bytes read at once; a mapped file would count as memory of the process."""
_CHECKSUMS = "crc32"
"""Key in a header's metadata: the checksum of each tensor, as JSON."""


def save_verified(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` (on the host) with their checksums and read them back. Raises SaveFailed if they differ."""
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))
    save_file(dict(tensors), file, metadata={**(metadata or {}), _CHECKSUMS: json.dumps(checksums)})
    verify_tensors(file, tensors, checksums)


def damage(file: Path) -> str | None:
    """Describe the damage of a file written by `save_verified`; None if it is intact."""
    if not file.exists():
        return "is missing"
    try:
        with safe_open(file, framework="pt") as stored:
            checksums: dict[str, int] = json.loads((stored.metadata() or {}).get(_CHECKSUMS, "{}"))
        places = _places(file)
        with file.open("rb") as raw:
            wrong = [name for name, value in checksums.items() if _checksum_at(raw, *places[name]) != value]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return f"has changed since it was written: {count_differing(wrong)}" if wrong else None


def verify_tensors(file: Path, expected: Mapping[str, Tensor], checksums: Mapping[str, int] | None = None) -> None:
    """Read `file` (safetensors) back. Raises SaveFailed unless it holds `expected`, bit for bit, and nothing else.

    `checksums` are those of `expected`, if already known."""
    with safe_open(file, framework="pt") as stored:
        wrong = sorted(set(stored.keys()) ^ set(expected))
    if wrong := wrong or differing(file, expected, checksums or {}):
        raise SaveFailed(f"{file} does not read back as it was written: {count_differing(wrong)}")


def count_differing(wrong: Sequence[str]) -> str:
    """Number of differing tensors and the first name, as text."""
    return f"{counted(len(wrong), 'tensor differs', 'tensors differ')}, first {wrong[0]}"


def differing(
    file: Path, expected: Mapping[str, Tensor], checksums: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Names in both `file` and `expected` whose tensors differ in shape, dtype or checksum."""
    places = _places(file)
    names = sorted(places.keys() & expected.keys(), key=places.__getitem__)
    with safe_open(file, framework="pt") as stored:
        kept = {name: stored.get_tensor(name) for name in names}  # mapped, not read

    def differs(name: str) -> bool:
        tensor, own = kept[name], expected[name]
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            return True
        with file.open("rb") as raw:
            return _checksum_at(raw, *places[name]) != (checksums.get(name) or checksum(own))

    with ThreadPoolExecutor(_THREADS) as pool:
        return [name for name, is_other in zip(names, pool.map(differs, names), strict=True) if is_other]


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _places(file: Path) -> dict[str, tuple[int, int]]:
    """Begin and end of each tensor's bytes in the file."""
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(length))
    start = 8 + length
    entries = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (start + begin, start + end) for name, (begin, end) in entries.items()}


def _checksum_at(raw: BufferedReader, begin: int, end: int) -> int:
    found, piece = 0, memoryview(bytearray(min(_PIECE, end - begin)))
    raw.seek(begin)
    while begin < end:
        count = raw.readinto(piece[: end - begin])
        if not count:
            return -1  # the file has ended
        found, begin = zlib.crc32(piece[:count], found), begin + count
    return found
