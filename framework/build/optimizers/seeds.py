"""Random numbers that a resumed run draws again: counted, not carried on."""


def mixed(seed: int, step: int, number: int) -> int:
    """A 31-bit seed of its own for each (run, step, parameter): the finalizer of MurmurHash3 over the three."""
    value = (seed * 0x9E3779B1 + step * 0x85EBCA77 + number * 0xC2B2AE3D) & 0xFFFFFFFF
    value = ((value ^ value >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ value >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return (value ^ value >> 16) & 0x7FFFFFFF
