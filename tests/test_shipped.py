"""Shipped files: each recipe and preset composes, is short, and says what it is for."""

import pytest

from framework.checks import TRAIN, check_request
from framework.compose import compose
from framework.compose.shipped import GROUPS, presets, purpose, recipes

PRESETS = [(group, name) for group in GROUPS for name in presets(group)]


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_presets_compose(write, group, name):
    origins = compose(write("training: {seed: 1}\n"), [f"{group}={name}", "gpu.count=1"]).origins
    sections = {key.partition(".")[0] for key, origin in origins.items() if f"{group}/{name}.yaml" in origin.where}
    assert sections
    assert group != "gpu" or sections == {"gpu"}


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("gpu", "model")])
def test_presets_are_short_and_say_what_they_are_for(group):
    for preset in presets(group).values():
        assert len(preset.file.read_text().splitlines()) <= 15
        assert purpose(preset.file)


@pytest.mark.parametrize("name", recipes())
def test_recipes_check_are_short_and_name_no_machine(write, name):
    composition = compose(name)
    assert not composition.warnings
    assert not [
        key for key, origin in composition.origins.items() if key.startswith("gpu.") and origin.kind == "recipe"
    ]
    assert len(recipes()[name].read_text().splitlines()) <= 20
    assert purpose(recipes()[name])
    missing = {"model.model_name", "data.train[0].path"} if name == "finetune_local" else set()
    assert {problem.key for problem in check_request(name, needs=TRAIN).problems} == missing


def test_the_quickstart_uses_a_global_batch_and_a_small_micro_batch():
    config = compose("quickstart").config
    assert config.training.global_batch_size
    assert config.training.per_device_train_batch_size <= 4
    assert config.data.train[0].path == "python_stdlib"
