"""The config next to the weights replaces a preset's architecture; values written in the recipe stay."""

import json

import pytest

from framework.compose import compose
from framework.compose.request import draft

PRESET = """
model:
  model_name: org/preset
  architecture:
    model_type: llama
    hidden_size: 32
    rms_norm_eps: 1.0e-3
    rope_parameters: {rope_type: default, rope_theta: 500000.0}
"""
OWN = {"model_type": "llama", "hidden_size": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}


@pytest.fixture
def recipe(write, tmp_path):
    write(PRESET, "preset.yaml")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(OWN))
    return write("defaults: [{model: preset.yaml}]\ntraining: {max_steps: 1}\n")


def architecture(config):
    return config.model.architecture.thaw() if config.model.architecture is not None else None


def test_the_presets_own_model_keeps_the_presets_architecture(recipe):
    made = compose(recipe)
    assert architecture(made.config)["rms_norm_eps"] == 1e-3
    assert made.warnings == ()


def test_a_folders_config_decides_and_the_preset_is_listed_once(recipe):
    made = compose(recipe, ["model.model_name=./folder"])
    assert architecture(made.config) is None
    [warning] = made.warnings
    assert "rms_norm_eps 1e-06 (preset 0.001)" in warning
    assert "rope_parameters.rope_theta 10000.0 (preset 500000.0)" in warning
    assert "hidden_size" not in warning


def test_what_is_written_on_purpose_stays_and_is_listed(recipe):
    made = compose(recipe, ["model.model_name=./folder", "model.architecture.rope_theta=20000"])
    assert architecture(made.config) == {"rope_theta": 20000}
    dropped, kept = made.warnings
    assert "rms_norm_eps" in dropped
    assert "rope_parameters.rope_theta 20000 for 10000.0" in kept


def test_random_weights_keep_the_presets_architecture(recipe):
    made = compose(recipe, ["model.model_name=./folder", "model.load_pretrained_weights=false"])
    assert architecture(made.config)["rms_norm_eps"] == 1e-3


def test_a_preset_of_the_language_part_alone_names_it(recipe, tmp_path):
    text = {"model_type": "llama", "hidden_size": 32, "rms_norm_eps": 1e-5}
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    made = compose(recipe, ["model.model_name=./folder"])
    assert architecture(made.config) == {"model_type": "llama"}
    assert "rms_norm_eps 1e-05" in made.warnings[0]


@pytest.mark.parametrize("text", ["null", "[]", "{", "\xff"])
def test_a_damaged_config_is_reported_by_what_reads_the_model(recipe, tmp_path, text):
    (tmp_path / "folder" / "config.json").write_text(text, encoding="latin-1")
    assert draft(recipe, ["model.model_name=./folder"]).problems == ()


def test_a_relative_on_the_hub_that_cannot_be_read_is_reported(recipe, monkeypatch):
    monkeypatch.setattr("framework.compose.own_config.hub_is_reachable", lambda: False)
    made = compose(recipe, ["model.model_name=org/relative"])
    assert architecture(made.config)["rms_norm_eps"] == 1e-3
    assert "org/relative" in made.warnings[0]


def test_a_relative_that_was_downloaded_decides(recipe, monkeypatch, tmp_path):
    file = tmp_path / "folder" / "config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(file))
    made = compose(recipe, ["model.model_name=org/relative"])
    assert architecture(made.config) is None
    assert "overrides the preset" in made.warnings[0]


def test_a_teachers_architecture_is_listed_too(recipe):
    overrides = ["training.teacher.model_name=./folder", "training.teacher.architecture={rms_norm_eps: 1e-2}"]
    made = compose(recipe, overrides)
    assert made.config.training.teacher.architecture.thaw() == {"rms_norm_eps": 1e-2}
    assert "training.teacher.architecture" in made.warnings[0]
