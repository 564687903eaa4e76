"""Values that no model can have are found in its config, by name, and by every verb that reads it."""

import pytest
from transformers import AutoConfig

from framework.build.loading.config_values import refuse_impossible_values
from framework.build.resolve_model import settle
from framework.errors import RequestError
from framework.run.planning.model_checks import inspect
from framework.schema.config import TrainingConfig
from tests.folders import change_config, save_model
from tests.tiny import GPT2, LLAMA

NAN, INFINITY = float("nan"), float("inf")
IMPOSSIBLE = [
    ("rms_norm_eps", NAN, "a finite number"),
    ("rms_norm_eps", INFINITY, "a finite number"),
    ("rms_norm_eps", -1.0, "0 or more"),
    ("num_hidden_layers", 0, "1 to 10,000"),
    ("num_hidden_layers", -1, "1 to 10,000"),
    ("num_hidden_layers", 2**70, "1 to 10,000"),
    ("num_attention_heads", 0, "1 to 2,147,483,647"),
    ("num_key_value_heads", 0, "1 to 2,147,483,647"),
    ("hidden_size", 2**40, "1 to 2,147,483,647"),
    ("max_position_embeddings", 0, "1 or more"),
    ("attention_dropout", 2.0, "0 to 1"),
    ("dtype", "float7", "float32, bfloat16 or float16"),
    ("quantization_config", "nothing", "an object with quant_method, or none"),
    ("quantization_config", [], "an object with quant_method, or none"),
]


@pytest.fixture
def base(tmp_path):
    return save_model(tmp_path / "base")


def asked(base, **architecture):
    model = {"model_name": str(base), "architecture": architecture or None}
    return TrainingConfig(model=model, gpu={"name": "cpu"})


@pytest.mark.parametrize(("key", "value", "expected"), IMPOSSIBLE)
def test_of_a_folder(base, key, value, expected):
    change_config(base, **{key: value})
    (problem,) = inspect(asked(base)).problems
    assert (problem.key, problem.expected) == ("model.model_name", expected)
    assert f"the config.json of '{base}' has {key} {value!r}" in problem.message.replace(f" {value} ", f" {value!r} ")


@pytest.mark.parametrize(("key", "value", "expected"), [row for row in IMPOSSIBLE if row[0] != "quantization_config"])
def test_that_are_written(base, key, value, expected):
    for config in (
        asked(base, **{key: value}),
        TrainingConfig(model={"architecture": {**LLAMA, key: value}, "load_pretrained_weights": False}),
    ):
        with pytest.raises(RequestError) as refused:
            settle(config)
        (problem,) = refused.value.problems
        assert problem.key.startswith("model.architecture")
        assert (problem.expected, key in str(problem)) == (expected, True)


def test_all_at_once(base):
    change_config(base, rms_norm_eps=-1.0, rope_parameters={"rope_type": "default", "rope_theta": 0})
    assert [problem.expected for problem in inspect(asked(base)).problems] == ["0 or more", "more than 0"]


def test_a_familys_own_name_is_reported():
    architecture = AutoConfig.for_model(**{**GPT2, "n_layer": 0})
    with pytest.raises(RequestError, match="the config has n_layer 0"):
        refuse_impossible_values(architecture, "the config", {})


@pytest.mark.parametrize(
    "family", ["mamba2", "bamba", "llama", "gpt2", "bert", "gemma3", "mixtral", "xlnet", "t5", "musicgen"]
)
def test_every_familys_own_defaults_are_possible(family):
    refuse_impossible_values(AutoConfig.for_model(family), "it", {})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "nothing", "hidden_act is 'nothing', which it does not know"),
        ("rope_parameters", {"rope_type": "nothing"}, "rope_parameters.rope_type is 'nothing', which it does not know"),
    ],
)
def test_a_name_that_transformers_does_not_know_is_reported_once_with_its_key(base, key, value, message):
    change_config(base, **{key: value})
    (problem,) = inspect(asked(base)).problems
    assert problem.message.endswith(message)
    assert problem.key == "model.model_name"
