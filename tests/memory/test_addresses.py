"""Addresses of segments against snapshots of an H200 (driver 580, torch 2.11)."""

from framework.memory.addresses import Addresses

MIB = 1 << 20


def test_segments_lie_as_in_a_layer_of_a_snapshot() -> None:
    """In order of their allocation; MiB from the lowest address of the four before."""
    sizes = [40, 40, 40, 40, 2, 2, 16, 32, 32, 40]
    addresses = Addresses()
    found = [addresses.take(size * MIB) for size in sizes]
    lowest = min(found[:4])
    assert [(address - lowest) // MIB for address in found] == [192, 128, 64, 0, 40, 42, 44, -32, -64, -128]
