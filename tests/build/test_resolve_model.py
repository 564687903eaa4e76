import json
from pathlib import Path

import pytest

from framework.build.resolve_model import settle
from framework.errors import RequestError
from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.config import TrainingConfig

LONG_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


def settled(model: dict[str, object], **sections: object) -> TrainingConfig:
    return settle(TrainingConfig.model_validate({"model": model, **sections}))[0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 512}}, 512),
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 131072}}, 2048),
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 131072}, "model_max_length": 8192}, 8192),
        ({"architecture": {"model_type": "gpt2", "n_positions": 256}}, 256),
        ({"architecture": {"model_type": "gpt2"}}, 1024),
        ({"architecture": {"model_type": "bloom"}}, 2048),
        (
            {
                "architecture": {"model_type": "llama", "max_position_embeddings": 512, "rope_parameters": LONG_ROPE},
                "model_max_length": 2048,
            },
            2048,
        ),
    ],
)
def test_the_limit_is_what_is_set_or_what_the_model_has(model: dict[str, object], expected: int) -> None:
    assert settled(model).model.model_max_length == expected


def test_more_than_the_model_has_positions_for_is_refused() -> None:
    """Also if only the model's own config states the number of positions."""
    with pytest.raises(RequestError, match=r"model\.model_max_length: 1025 tokens .* 1024 positions"):
        settled({"architecture": {"model_type": "gpt2"}, "model_max_length": 1025})


def test_reads_the_config_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 640, "dtype": "bfloat16"})
    )
    frozen = settled({"model_name": str(tmp_path)}, training={"use_peft": True})
    assert frozen.model.model_max_length == 640
    assert frozen.model.torch_dtype_str is TorchDtype.BFLOAT16


def test_broken_model_config_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(RequestError, match=r"^model\.model_name: .*/config\.json cannot be read: .*"):
        settled({"model_name": str(tmp_path)})


@pytest.mark.parametrize(
    ("use_peft", "stored", "capability", "expected"),
    [
        (False, "bfloat16", "8.0", (TorchDtype.FLOAT32, MixedPrecision.BF16)),
        (False, "bfloat16", None, (TorchDtype.FLOAT32, MixedPrecision.NONE)),
        (True, "bfloat16", "8.0", (TorchDtype.BFLOAT16, MixedPrecision.BF16)),
        (True, None, "8.0", (TorchDtype.FLOAT32, MixedPrecision.BF16)),
        (False, "bfloat16", "7.5", (TorchDtype.FLOAT32, MixedPrecision.FP16)),
        (True, "bfloat16", "7.5", (TorchDtype.FLOAT16, MixedPrecision.FP16)),
        (True, "float16", "8.0", (TorchDtype.FLOAT16, MixedPrecision.FP16)),
        (True, "bfloat16", None, (TorchDtype.BFLOAT16, MixedPrecision.NONE)),
    ],
)
def test_the_dtype_is_always_explicit(
    use_peft: bool, stored: str | None, capability: str | None, expected: tuple[TorchDtype, MixedPrecision]
) -> None:
    """A frozen base keeps the checkpoint's dtype, trained weights are float32 masters under the best autocast.

    On a card without bfloat16 that is float16, and a base stored in bfloat16 is held in it.
    """
    architecture = {"model_type": "llama", **({"dtype": stored} if stored else {})}
    card = {"name": "card", "capability": capability, "bf16_flops": None if capability == "7.5" else 1e14}
    card = card if capability else {}
    config = settled({"architecture": architecture}, training={"use_peft": use_peft}, gpu=card)
    assert (config.model.torch_dtype_str, config.training.mixed_precision_dtype) == expected


@pytest.mark.parametrize(
    ("stored", "training", "capability", "key"),
    [
        ("float16", {}, "8.0", "model.torch_dtype_str"),
        ("bfloat16", {"use_peft": True}, "7.5", "model.torch_dtype_str"),
        ("float16", {"use_peft": True, "mixed_precision_dtype": "bf16"}, "8.0", "model.torch_dtype_str"),
    ],
)
def test_a_checkpoints_dtype_that_cannot_be_trained_is_refused_when_it_is_known(
    stored: str, training: dict[str, object], capability: str, key: str
) -> None:
    model = {"architecture": {"model_type": "llama", "dtype": stored}, "torch_dtype_str": "auto"}
    with pytest.raises(RequestError) as caught:
        settled(model, training=training, gpu={"name": "card", "capability": capability})
    assert key in [problem.key for problem in caught.value.problems]


def test_unknown_keys_of_an_architecture_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        settled({"architecture": {"model_type": "llama", "hiden_size": 64, "layers": 2}})
    assert [(p.key, p.nearest) for p in caught.value.problems] == [
        ("model.architecture.hiden_size", "hidden_size"),
        ("model.architecture.layers", None),
    ]


OLDER = {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
PASTED = {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.40.0", "_name_or_path": "x"}


def test_a_config_file_as_transformers_4_wrote_it_is_a_models_config() -> None:
    written = {"model_type": "llama", **OLDER, **PASTED}
    asked = {"model": {"architecture": written, "torch_dtype_str": "auto"}, "training": {"use_peft": True}}
    config, read = settle(TrainingConfig.model_validate(asked))
    assert (read.rope_parameters["rope_theta"], read.rope_parameters["factor"]) == (5e5, 2.0)
    assert config.model.torch_dtype_str == "bfloat16"


def test_a_rotary_key_of_a_model_without_rotary_positions_is_unknown() -> None:
    with pytest.raises(RequestError) as caught:
        settled({"architecture": {"model_type": "gpt2", "rope_theta": 5e5, "torch_dtype": "bfloat16"}})
    assert [p.key for p in caught.value.problems] == ["model.architecture.rope_theta"]


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_models_that_read_both_ways_are_refused(model_type: str) -> None:
    with pytest.raises(RequestError, match=r"is bidirectional here|not a causal language model"):
        settled({"architecture": {"model_type": model_type}})
