"""The micro-batch follows from the global batch if it is not written; written values stay."""

import pytest

from framework.checks import check_request
from framework.compose import compose

KEY = "training.per_device_train_batch_size"


def rows(*overrides):
    """Rows a device of the quickstart's like without its own batch, and what `show --origin` says of them."""
    found = compose("finetune_local", ["~" + KEY, "~training.global_batch_size", *overrides])
    return found.config.training.per_device_train_batch_size, str(found.origins[KEY])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.global_batch_size=4"], 4),
        (["training.global_batch_size=12"], 6),
        (["training.global_batch_size=7"], 7),
        (["training.global_batch_size=26"], 2),
        (["training.global_batch_size=16", "gpu=h100_80gb", "gpu.count=8"], 2),
        (["training.global_batch_size=12", "training.gradient_accumulation_steps=3"], 4),
        (["training.global_batch_size=48", "training.gradient_accumulation_steps=3"], 16),
    ],
)
def test_a_global_batch_says_how_many_rows_a_device_takes(overrides, expected):
    assert rows(*overrides) == (expected, "default: of the global batch")


@pytest.mark.parametrize("written", [None, "training.global_batch_size=64", "training.gradient_accumulation_steps=2"])
def test_where_the_default_works_it_stays(written):
    assert rows(*filter(None, [written])) == (8, "default")


def test_what_is_written_stays_and_is_refused_where_it_does_not_divide():
    assert rows(f"{KEY}=8", "training.global_batch_size=4") == (8, f"command line: {KEY}=8")
    overrides = ["training.global_batch_size=12", "gpu=h100_80gb", "gpu.count=8"]
    for written, message in (([f"{KEY}=2"], "2 per device x 8 devices"), ([], "8 per device x 8 devices")):
        problems = check_request("quickstart", ["~" + KEY, *overrides, *written]).problems
        found = [item for item in problems if "batch" in item.key]
        assert [message in str(item) for item in found] == [True]
        assert "or of 8 with fewer rows per device" in str(found[0])


def test_rows_that_another_value_is_taken_from_stay_so_that_both_are_the_same():
    refers = "training.per_device_eval_batch_size=${training.per_device_train_batch_size}"
    assert rows("training.global_batch_size=12", refers) == (8, "default")
