"""The shipped models are what their publishers say: built without storage, they have exactly the published weights."""

import logging
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from framework.installation import shipped
from framework.schema.model import ModelParams
from tests.grids import first

# Published parameter counts (tied embeddings once; encoders with their pooler, without a head). Gemma 3 4B and 12B are
# published with their vision part, which is taken off: a SigLIP tower, and a projector of 1152 x hidden + 1152.
VISION_TOWER = 416_866_032
PUBLISHED = {
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.3_70b": 70_553_706_496,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 4_300_079_472 - VISION_TOWER - (1152 * 2560 + 1152),
    "gemma3_12b": 12_187_325_040 - VISION_TOWER - (1152 * 3840 + 1152),
    "mistral_7b": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mixtral_8x7b": 46_702_792_704,
    "phi4_14b": 14_659_507_200,
    "phi4_mini_4b": 3_836_021_760,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "gpt_oss_20b": 20_914_757_184,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "bert_base": 109_482_240,
    "minilm_l6": 22_713_216,
    "modernbert_base": 149_014_272,
}
ENCODERS = {"bert", "modernbert"}
CONVOLUTIONAL = {"textcnn", "tcn"}
"""Models of ours: nobody has published weights of them (tests/build/model/test_convolutions.py counts them)."""

# Keys of the hub's config.json that the model reads although its config class does not declare them.
READ_BY_THE_MODEL = {("qwen3_moe", "head_dim")}


def read(name: str) -> dict[str, Any]:
    """The whole content of a model's file."""
    content: dict[str, Any] = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def architecture(name: str) -> dict[str, Any]:
    """The architecture as it leaves the schema, which is how a recipe hands it on."""
    params = ModelParams(**read(name)["model"])
    assert params.architecture is not None
    return params.architecture.thaw()


def configure(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(**architecture(name))


def test_the_table_and_the_files_are_the_same_models() -> None:
    files = {path.stem for path in (shipped("conf") / "model").glob("*.yaml")}
    assert files == {*PUBLISHED, *CONVOLUTIONAL}
    assert len(files) >= 30


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_sets_name_and_architecture_and_nothing_else(name: str) -> None:
    content = read(name)
    assert set(content) == {"model"}
    assert set(content["model"]) == {"model_name", "architecture"}
    assert content["model"]["model_name"].count("/") == 1
    assert next(iter(content["model"]["architecture"])) == "model_type"


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_is_known_to_the_config_class(name: str) -> None:
    written = architecture(name)
    kind = written["model_type"]
    declared = AutoConfig.for_model(kind)
    known = set(declared.to_dict()) | set(declared.attribute_map)
    assert {key for key in written if key not in known and (kind, key) not in READ_BY_THE_MODEL} == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_written_value_arrives_in_the_config(name: str) -> None:
    config = configure(name)
    for key, value in architecture(name).items():
        if key == "dtype":
            assert config.dtype in (getattr(torch, value), value)
        elif key == "rope_parameters":
            arrived = config.rope_parameters
            assert {part: arrived[part] for part in value} == value
        else:
            assert getattr(config, key) == value, key


@pytest.fixture
def transformers_says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages that transformers logs in this test, including once-only warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    transformers_logging.warning_once.cache_clear()
    return messages


@pytest.mark.parametrize("name", first(9, PUBLISHED))
def test_the_built_model_has_the_published_parameters(name: str, transformers_says: list[str]) -> None:
    config = configure(name)
    kind = AutoModel if config.model_type in ENCODERS else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{architecture(name)['dtype']}"}
    assert transformers_says == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_special_tokens_lie_inside_the_vocabulary(name: str) -> None:
    config = configure(name)
    tokens = [getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")]
    flat = [token for entry in tokens for token in (entry if isinstance(entry, list) else [entry]) if token is not None]
    assert all(0 <= token < config.vocab_size for token in flat)


@pytest.mark.parametrize("name", PUBLISHED)
def test_positions_are_written_down(name: str) -> None:
    written = architecture(name)
    assert (written.get("max_position_embeddings") or written["n_positions"]) >= 512


def test_layers_that_differ_from_their_neighbours_are_where_they_belong() -> None:
    gemma3 = configure("gemma3_1b").layer_types
    assert [index for index, kind in enumerate(gemma3) if kind == "full_attention"] == [5, 11, 17, 23]
    assert configure("gemma2_2b").layer_types[:2] == ["sliding_attention", "full_attention"]
    assert configure("gpt_oss_20b").layer_types[:2] == ["sliding_attention", "full_attention"]
    assert configure("smollm3_3b").no_rope_layers == [1, 1, 1, 0] * 9
    assert set(configure("qwen2.5_7b").layer_types) == {"full_attention"}
