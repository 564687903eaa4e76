"""Cards of this machine for one run among several that a sweep makes at a time. Loads no torch."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from framework.memory.installed import installed_cards

_PAUSE = 1.0


@contextlib.contextmanager
def own_cards(count: int, waits: Callable[[], None]) -> Iterator[dict[str, str]]:
    """Environment of a process that sees `count` cards which no other run of a sweep of this user has meanwhile.

    Waits until so many are free, and calls `waits` once if it has to. Empty where the machine has fewer (the run
    itself says so) or cards in partitions. A lock goes when its process does, however that ends.
    """
    cards = installed_cards() if count else []
    if not count or len(cards) < count or any(card.is_partitioned for card in cards):
        yield {}
        return
    told = False
    while True:
        with contextlib.ExitStack() as locks:
            held: list[str] = []
            for card in cards:
                if len(held) < count and _lock(card.uuid, locks):
                    held.append(card.uuid)
            if len(held) == count:
                yield {"CUDA_VISIBLE_DEVICES": ",".join(held)}
                return
        if not told:
            waits()
            told = True
        time.sleep(_PAUSE)


def _lock(uuid: str, locks: contextlib.ExitStack) -> bool:
    """Whether the card was free; it is then held until `locks` are left."""
    path = Path(tempfile.gettempdir()) / f"tunesmith-{os.getuid()}-{uuid}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    locks.callback(os.close, descriptor)
    return True
