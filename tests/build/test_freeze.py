import pytest

from framework.build.freeze import matches
from framework.errors import RequestError
from tests.tiny import LLAMA, tiny_assembly, tiny_config


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("layers.1", "model.layers.11.mlp.up_proj.weight", False),
        ("layer.0", "bert.encoder.layer.0.output.dense.weight", True),
        ("layers.[0-3]", "model.layers.3.mlp.up_proj.weight", True),
        ("layers.*.mlp", "model.layers.7.mlp.up_proj.weight", True),
        ("layers.*.mlp", "model.layers.7.self_attn.q_proj.weight", False),
        ("embed_tokens", "model.embed_tokens.weight", True),
        ("embed", "model.embed_tokens.weight", False),
    ],
)
def test_patterns_match_whole_segments(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_layers_1_freezes_exactly_one_block():
    config = tiny_config({**LLAMA, "num_hidden_layers": 12}, model={"freeze_layers": ["layers.1"]})
    assembly = tiny_assembly(config)
    frozen = [name for name, parameter in assembly.model.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(name.startswith("model.layers.1.") for name in frozen)
    (item,) = assembly.frozen
    assert item.parameters == sum(p.numel() for n, p in assembly.model.named_parameters() if ".1." in n)
    assert item.bytes == 4 * item.parameters


def test_all_patterns_that_match_nothing_are_named_with_the_nearest_names():
    config = tiny_config(model={"freeze_layers": ["layer.0", "layers.0", "embed_token"]})
    with pytest.raises(RequestError) as caught:
        tiny_assembly(config)
    first, second = caught.value.problems
    assert (first.key, second.key) == ("model.freeze_layers[0]", "model.freeze_layers[2]")
    assert "layers.0" in (first.nearest or "")
    assert "embed_tokens" in (second.nearest or "")


def test_freezing_everything_is_an_error():
    with pytest.raises(RequestError, match="nothing is left to train"):
        tiny_assembly(tiny_config(model={"freeze_layers": ["model", "lm_head"]}))
