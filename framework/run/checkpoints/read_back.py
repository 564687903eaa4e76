"""What was written is read back from its file: names, shapes, dtypes, and a checksum over every byte.

Files of checkpoints keep the checksums in their headers, so that a run which goes on finds what a disk or a copy has
changed since.
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
"""Checksums and reading do not hold Python's lock; a core sums about 1 GB/s."""
_PIECE = 1 << 24
"""Bytes read at once: a file that is mapped instead would count as memory of the process."""
_CHECKSUMS = "crc32"
"""Entry of a header's metadata: the checksum of each tensor, as JSON."""


def save_verified(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` (on the host) with their checksums, and read them back. Raises SaveFailed when they differ."""
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = dict(zip(tensors, pool.map(checksum, tensors.values()), strict=True))
    save_file(dict(tensors), file, metadata={**(metadata or {}), _CHECKSUMS: json.dumps(checksums)})
    verify_tensors(file, tensors, checksums)


def damage(file: Path) -> str | None:
    """What is wrong with a file that `save_verified` wrote, in words; None when nothing is."""
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
    return f"has changed since it was written: {told(wrong)}" if wrong else None


def verify_tensors(file: Path, expected: Mapping[str, Tensor], checksums: Mapping[str, int] | None = None) -> None:
    """Read `file` (safetensors) back. Raises SaveFailed unless it holds `expected`, bit for bit, and nothing else.

    `checksums` of `expected`, where they are known."""
    with safe_open(file, framework="pt") as stored:
        wrong = sorted(set(stored.keys()) ^ set(expected))
    if wrong := wrong or differing(file, expected, checksums or {}):
        raise SaveFailed(f"{file} does not read back as it was written: {told(wrong)}")


def told(wrong: Sequence[str]) -> str:
    """Tensors that differ, in words."""
    return f"{counted(len(wrong), 'tensor differs', 'tensors differ')}, first {wrong[0]}"


def differing(
    file: Path, expected: Mapping[str, Tensor], checksums: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Names that `file` and `expected` share, whose tensors have another shape, dtype or checksum."""
    places = _places(file)
    names = sorted(places.keys() & expected.keys(), key=places.__getitem__)
    with safe_open(file, framework="pt") as stored:
        kept = {name: stored.get_tensor(name) for name in names}  # mapped: no byte of them is read

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
    """Where each tensor's bytes begin and end."""
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
