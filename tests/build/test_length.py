import json
from pathlib import Path

import pytest

from framework.build.length import DEFAULT_LENGTH, effective_length
from framework.errors import RequestError
from framework.schema.config import TrainingConfig

LONG_ROPE = {"rope_type": "yarn", "factor": 4.0}


def length(**model: object) -> int:
    return effective_length(TrainingConfig.model_validate({"model": model}))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, DEFAULT_LENGTH),
        ({"model_max_length": 8192}, 8192),
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 512}}, 512),
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 131072}}, 2048),
        ({"architecture": {"model_type": "gpt2", "n_positions": 256}}, 256),
        ({"architecture": {"model_type": "gpt2"}}, 1024),
        ({"architecture": {"model_type": "bloom"}}, DEFAULT_LENGTH),
        ({"architecture": {"model_type": "gemma3", "text_config": {"max_position_embeddings": 300}}}, 300),
        ({"architecture": {"model_type": "llama", "max_position_embeddings": 512}, "model_max_length": 512}, 512),
        (
            {
                "architecture": {"model_type": "llama", "max_position_embeddings": 512, "rope_scaling": LONG_ROPE},
                "model_max_length": 2048,
            },
            2048,
        ),
    ],
)
def test_the_limit_is_what_is_set_or_what_the_model_has(model: dict[str, object], expected: int) -> None:
    assert length(**model) == expected


@pytest.mark.parametrize("scaling", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}])
def test_more_than_the_model_has_positions_for_is_refused(scaling: dict[str, object]) -> None:
    architecture = {"model_type": "llama", "max_position_embeddings": 512, **scaling}
    with pytest.raises(RequestError, match=r"model\.model_max_length: 513 .* \(512\)"):
        length(architecture=architecture, model_max_length=513)


def test_reads_the_config_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 640}))
    assert length(model_name=str(tmp_path)) == 640


def test_broken_model_config_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(RequestError, match=r"^model\.model_name: the config\.json of .* could not be read: .*$"):
        length(model_name=str(tmp_path))


def test_auto_is_for_the_search() -> None:
    with pytest.raises(RequestError, match="auto"):
        length(model_max_length="auto")
