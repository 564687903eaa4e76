"""Readable sizes in bytes."""

from framework.schema.plural import counted

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: int) -> str:
    """Format bytes with a unit: `12.41 GiB`, `512.0 MiB`, `3.9 KiB`, `512 bytes`."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:,.1f} MiB"
    return f"{count / KIB:,.1f} KiB" if abs(count) >= KIB else counted(count, "byte")
