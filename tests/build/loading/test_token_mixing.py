"""Context parallelism is allowed only if nothing but attention mixes the tokens of a row."""

from typing import Any

import pytest

from framework.build.resolve_model import settle
from framework.errors import RequestError
from tests.tiny import GPT2, LLAMA, tiny_config

SHARED = {"model": {"attn_implementation": "ring_attention"}, "gpu": {"name": "cpu", "count": 2}}
LONG = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MIXES = {
    "convolutions": {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "state spaces": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128},
    "a bias by distance": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128},
}
OTHERS = {
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "experts": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "absolute positions": GPT2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_attention_alone_mixes_tokens_may_share_rows(name: str) -> None:
    settle(tiny_config(OTHERS[name], **SHARED))


@pytest.mark.parametrize("name", MIXES)
def test_other_layers_that_mix_tokens_are_refused(name: str) -> None:
    made: dict[str, Any] = MIXES[name]
    with pytest.raises(RequestError, match=f"other layers than attention mix the tokens of {made['model_type']}"):
        settle(tiny_config(made, **SHARED))


@pytest.mark.parametrize("name", ["falcon", "mpt"])
def test_attention_that_cannot_be_replaced_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} does not use transformers' attention interface"):
        settle(tiny_config({"model_type": name, "vocab_size": 128}, **SHARED))


def test_positions_that_change_with_the_last_one_are_refused() -> None:
    with pytest.raises(RequestError, match="llama has dynamic positions"):
        settle(tiny_config({**LLAMA, "rope_parameters": LONG}, **SHARED))
    settle(tiny_config({**LLAMA, "rope_parameters": LONG}))
