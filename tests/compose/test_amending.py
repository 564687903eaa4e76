"""A request with other values as a recipe."""

import yaml

from framework.compose import load
from framework.compose.writing import amended


def test_rows_a_device_that_follow_from_the_global_batch_do_so_on_the_cards_it_is_for(write):
    """On one card the text by itself would give 8 rows per device, which two cannot share."""
    write("training: {global_batch_size: 8}\n")
    overrides = ["gpu=h100_80gb", "gpu.count=2"]
    text = amended("r.yaml", overrides, load("r.yaml", overrides), [])
    assert "per_device_train_batch_size" not in text
    write(text)
    assert load("r.yaml", overrides).training.per_device_train_batch_size == 4


def test_where_the_text_says_something_else_what_is_no_default_is_written(write):
    recipe = write("training: {max_steps: 3}\nmodel: {model_name: a}\n")
    changed = load(recipe, ["training.learning_rate=1e-3", "model.attn_implementation=eager"])
    text = amended(str(recipe), [], changed, [])
    assert yaml.safe_load(text) == {
        "schema_version": 1,
        "training": {"max_steps": 3, "learning_rate": 0.001},
        "model": {"model_name": "a", "attn_implementation": "eager"},
    }
    assert text.startswith("# yaml-language-server: $schema=/"), "a file may be anywhere: the path is whole"
    assert load(write(text)) == changed
