import pytest

from framework.build.model.freeze import matches
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.run.rehearsal.rehearse import record
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config


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
    assert str(item) == "frozen by layers.1: 9,280 parameters, 0.0 MiB"


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


def frozen_names(assembly):
    return {name for name, parameter in assembly.model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(("architecture", "beginning"), [(LLAMA, "model.layers."), (GPT2, "transformer.h.")])
def test_the_first_blocks_are_those_that_run_first(architecture, beginning):
    depth = {"num_hidden_layers": 12} if architecture is LLAMA else {"n_layer": 12}
    assembly = tiny_assembly(tiny_config({**architecture, **depth}, model={"freeze_first_blocks": 2}))
    assert {name.removeprefix(beginning).split(".")[0] for name in frozen_names(assembly)} == {"0", "1"}
    readings = {reading.key: reading for reading in verify(assembly)}
    (item,) = assembly.frozen
    assert readings["model.freeze_first_blocks"].found == f"first 2 blocks: {item.parameters:,} frozen"


def test_more_blocks_than_there_are_is_an_error():
    with pytest.raises(RequestError, match=r"model\.freeze_first_blocks: the model has 2 blocks"):
        tiny_assembly(tiny_config(model={"freeze_first_blocks": 3}))


@pytest.mark.parametrize(
    ("architecture", "names"),
    [(LLAMA, {"model.embed_tokens.weight"}), (GPT2, {"transformer.wte.weight", "transformer.wpe.weight"})],
)
def test_embeddings_is_a_name_for_all_of_them(architecture, names):
    assembly = tiny_assembly(tiny_config(architecture, model={"freeze_layers": ["embeddings"]}))
    assert frozen_names(assembly) == names
    (item,) = assembly.frozen
    assert item.shares_head == (architecture is GPT2)
    assert ("the head among them" in str(item)) == item.shares_head


def test_something_that_trains_a_frozen_module_again_stops_the_run():
    assembly = tiny_assembly(tiny_config(model={"freeze_first_blocks": 1}))
    assembly.model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(VerificationFailed, match="freeze_first_blocks: asked first 1 block: 9,280 frozen"):
        verify(assembly)


def test_the_plan_says_what_each_pattern_matched():
    rehearsal = record(tiny_config(model={"freeze_layers": ["embeddings"], "freeze_first_blocks": 1}))
    assert [line.partition(":")[0] for line in rehearsal.notes[:2]] == [
        "frozen by first 1 block",
        "frozen by embeddings",
    ]
