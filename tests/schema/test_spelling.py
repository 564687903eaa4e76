"""Suggestions for misspelled choices."""

import pytest

from framework.schema.optimizers import Optimizer
from framework.schema.spelling import alike

NAMES = [str(name) for name in Optimizer]


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("adamww", "adamw_torch"),  # as near as the others of its family, of which it is the default
        ("adam_8bit", "adamw_8bit"),
        ("adamw_fused", "adamw_torch_fused"),
        ("paged_adam", "paged_adamw_32bit"),
        ("shedule_free", "schedule_free_adamw"),
        ("muonn", "muon"),
    ],
)
def test_the_nearest_name_comes_first(word: str, first: str) -> None:
    assert alike(word, NAMES)[0] == first


def test_nothing_alike_is_suggested_for_another_word() -> None:
    assert alike("xyzzy", NAMES) == []
    assert len(alike("adamww", NAMES)) == 3
    assert len(alike("adamww", NAMES, most=1)) == 1
