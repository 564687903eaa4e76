"""The origin of each value, the resolved YAML, differences, and use inside another Hydra application."""

import copy
from pathlib import Path

import pytest

from framework.compose import compose, to_yaml
from framework.compose.shipped import recipes
from framework.compose.writing import differences, to_annotated_yaml
from framework.schema.config import TrainingConfig
from framework.schema.keys import dotted, values
from framework.schema.model import ModelParams
from framework.schema.training import TrainingParams


def test_every_key_has_an_origin(write):
    recipe = write(
        "defaults:\n  - training: low_memory\ntraining:\n  seed: 1\nmodel:\n  architecture: {model_type: llama, n: 1}\n"
    )
    composition = compose(recipe, ["training.max_steps=5", "gpu=24gb", "model.architecture.n=2"])
    assert {dotted(path) for path, _ in values(composition.config)} == set(composition.origins)
    shown = {
        key: str(composition.origins[key])
        for key in (
            "training.seed",
            "training.max_steps",
            "training.learning_rate",
            "training.per_device_train_batch_size",
            "model.architecture.model_type",
            "model.architecture.n",
            "gpu.capability",
        )
    }
    assert shown == {
        "training.seed": "r.yaml:4",
        "training.max_steps": "command line: training.max_steps=5",
        "training.learning_rate": "default",
        "training.per_device_train_batch_size": "preset training/low_memory.yaml:3",
        "model.architecture.model_type": "r.yaml:6",
        "model.architecture.n": "command line: model.architecture.n=2",
        "gpu.capability": "preset gpu=24gb",
    }


HOSTILE = TrainingConfig(
    training=TrainingParams(run_name="1e-5", trackers=["wandb"], learning_rate=1e-7),
    model=ModelParams(
        model_name="yes",
        freeze_layers=[
            "null",
            "~",
            "2024-01-01",
            "a: b",
            "#x",
            "",
            " ",
            "010",
            "0x1F",
            "1_000",
            ".5",
            "true",
            "'",
            '"',
        ],
        chat_template="line\n  ${training.seed} \\${x} \\\\${y} \t{% if a %}\u00e9\u2028{% endif %}\n",
        architecture={"model_type": "llama", "rope": {"a": [1, 2.5, None, {"b": "1e3"}]}, "no": "off", "12": 1e300},
    ),
)


@pytest.mark.parametrize("recipe", [*recipes(), "hostile"])
def test_the_resolved_yaml_gives_an_equal_config(write, recipe):
    config = HOSTILE if recipe == "hostile" else compose(recipe, ["gpu=h100_80gb"]).config
    again = compose(write(to_yaml(config), "config.yaml"))
    assert again.config == config
    assert to_yaml(again.config) == to_yaml(config)
    assert not again.warnings


def test_the_annotated_yaml_reads_the_same(write):
    composition = compose("quickstart", ["gpu=h100_80gb"])
    text = to_annotated_yaml(composition.config, composition.origins)
    assert compose(write(text, "shown.yaml")).config == composition.config
    assert "  max_steps: " in text
    assert "# recipes/quickstart.yaml:" in text
    again = to_annotated_yaml(HOSTILE, {})
    assert compose(write(again, "hostile.yaml")).config == HOSTILE


def test_differences_name_both_values_and_origins(write):
    write("training: {seed: 1}\nmodel: {freeze_layers: [a, b]}\n", "a.yaml")
    write("defaults: [{training: low_memory}]\nmodel: {freeze_layers: [a]}\ndata: {packing: true}\n", "b.yaml")
    overrides = ["training.max_steps=3"]
    found = differences(compose("a.yaml", overrides), compose("b.yaml", overrides))
    assert [(each.key, each.a, each.b, str(each.origin_a), str(each.origin_b)) for each in found] == [
        ("training.per_device_train_batch_size", 8, 1, "default", "preset training/low_memory.yaml:3"),
        ("training.enable_gradient_checkpointing", False, True, "default", "preset training/low_memory.yaml:4"),
        ("training.seed", 1, 42, "a.yaml:1", "default"),
        ("model.chunked_loss", None, True, "default", "preset training/low_memory.yaml:6"),
        ("model.freeze_layers[1]", "b", "(absent)", "a.yaml:2", "default"),
        ("data.packing", False, True, "default", "b.yaml:3"),
    ]


def test_composing_inside_another_hydra_application_leaves_no_trace(write):
    from hydra import compose as hydra_compose
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import getbase

    recipe = write("training: {seed: 1}\n")
    ConfigStore.instance().store("tunesmith", {"theirs": 1})
    with initialize(config_path=None, version_base="1.2"):
        app, base = GlobalHydra.instance().hydra, getbase()
        stored = copy.copy(ConfigStore.instance().repo)
        assert compose(recipe).config.training.seed == 1
        assert GlobalHydra.instance().hydra is app
        assert getbase() == base
        assert ConfigStore.instance().repo == stored
        assert hydra_compose("tunesmith").theirs == 1
    del ConfigStore.instance().repo["tunesmith.yaml"]


def test_nothing_moves_the_working_directory(write):
    here = Path.cwd()
    compose(write("training: {output_dir: x}\n"))
    assert Path.cwd() == here
    assert sorted(path.name for path in here.iterdir()) == ["r.yaml"]
