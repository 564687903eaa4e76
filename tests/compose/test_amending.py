"""A request with other values as a recipe."""

from framework.compose import load
from framework.compose.amending import amended


def test_rows_a_device_that_follow_from_the_global_batch_do_so_on_the_cards_it_is_for(write):
    """On one card the text alone would be 8 rows a device, which two cannot share."""
    write("training: {global_batch_size: 8}\n")
    words = ["gpu=h100_80gb", "gpu.count=2"]
    text = amended("r.yaml", words, load("r.yaml", words), [])
    assert "per_device_train_batch_size" not in text
    write(text)
    assert load("r.yaml", words).training.per_device_train_batch_size == 4
