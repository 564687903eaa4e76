"""The number of trials and their seed: in the sample of `make test`, and in `make faults`."""

import os
import random
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
LENGTH = os.environ.get("FAULTS", "quick")
SEED = int(os.environ.get("FAULTS_SEED", "0"))

settings.register_profile(
    "faults", deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
)


def count(quick: T, long: T) -> T:
    """The number, or names, of the trials in this run."""
    return {"quick": quick, "long": long}[LENGTH]


def drawn(quick: int, long: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test that many times, each with other `dice`, whose throws hypothesis makes simple once one fails."""
    chosen = settings(settings.get_profile("faults"), max_examples=count(quick, long))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return seed(SEED)(chosen(given(dice=st.randoms(use_true_random=False))(test)))

    return decorate


def throws(quick: int, long: int, what: str) -> list[int]:
    """Seeds of that many single tries of a kind."""
    dice = random.Random(f"{what} {SEED}")
    return [dice.randrange(2**32) for _ in range(count(quick, long))]
