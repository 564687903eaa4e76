"""Compiled blocks train the same, are counted, and leave no trace in names. Graphs are captured and cut as always;
most tests run them operator by operator instead of through a C++ compiler, which takes a minute."""

import contextlib
import shutil

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from framework.build.levers import compiled
from framework.build.levers.compiled import compiled_regions, newly_plain
from framework.build.verify import FirstStep, verify, verify_first_step
from framework.errors import RequestError, VerificationFailed
from framework.run.step import eval_step, train_step
from tests.grids import slow
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

LORA = {"use_peft": True}
ONE = FirstStep(((8, 24),))


@pytest.fixture
def uncompiled(monkeypatch):
    """Dynamo and the cut into forward and backward are real; the code is not lowered to C++."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compiled, "lower", aot_eager)


def build(architecture=LLAMA, *, scope="block", model=None, peft=None, **training):
    training = {"compile": True, "compile_scope": scope, "learning_rate": 1e-2, **training}
    if not training["compile"]:
        del training["compile_scope"]
    return tiny_assembly(tiny_config(architecture, training=training, model=model or {}, peft=peft or {}))


def losses(assembly, steps=2):
    return [train_step(assembly, [unequal_rows()], step).loss for step in range(1, steps + 1)]


@pytest.mark.slow
def test_checkpoints_inside_a_compiled_model_break_graphs_which_is_reported(uncompiled):
    options = {**LORA, "peft": {"lora_dropout": 0.0}, "enable_gradient_checkpointing": True}
    expected = losses(build(compile=False, **options))
    assembly = build(scope="model", **options)
    assert losses(assembly) == pytest.approx(expected, rel=1e-5)
    reading = after_step(assembly)["training.compile"]
    assert reading.found == "1/1"
    assert "graph breaks" in reading.source


def after_step(assembly):
    return {reading.key: reading for reading in verify_first_step(assembly, ONE)}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        slow(LLAMA, {}),
        slow(GPT2, {}),
        slow(LLAMA, {"enable_gradient_checkpointing": True}),
        slow(LLAMA, {"mixed_precision_dtype": "bf16", "model": {"chunked_loss": 8}}),
        slow(LLAMA, {**LORA, "peft": {"lora_target_modules": ["all-linear"], "lora_dropout": 0.0}}),
        (LLAMA, {"model": {"freeze_layers": ["embed_tokens", "layers.0"]}, "activation_memory_budget": 0.5}),
        slow(LLAMA, {"scope": "model", "model": {"chunked_loss": 8}}),
    ],
)
def test_compiled_training_follows_the_plain_losses_and_no_name_shows_it(uncompiled, architecture, options):
    settings = {**options, "compile": False, "scope": "block"}
    settings.pop("activation_memory_budget", None)
    plain = build(architecture, **settings)
    expected = losses(plain)
    assembly = build(architecture, **options)
    verify(assembly)
    assert losses(assembly) == pytest.approx(expected, rel=2e-3 if "mixed_precision_dtype" in options else 1e-5)
    readings = after_step(assembly)
    assert "0 graph breaks" in readings["training.compile"].source
    assert list(assembly.model.state_dict()) == list(plain.model.state_dict())
    assert [name for name, _ in assembly.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
    if "activation_memory_budget" in options:
        assert readings["training.activation_memory_budget"].found == "0.5"


@pytest.mark.slow
def test_equal_blocks_share_one_graph(uncompiled):
    assembly = build({**LLAMA, "num_hidden_layers": 3})
    losses(assembly)
    reading = after_step(assembly)["training.compile"]
    assert reading.found == "3/3"
    assert reading.source.startswith("1 graph from 1 of 1 frame in")


@pytest.mark.slow
def test_equal_blocks_with_adapters_share_two_graphs(uncompiled):
    """The first block's input has no gradient, that of the others has."""
    adapted = build({**LLAMA, "num_hidden_layers": 4}, **LORA, peft={"lora_target_modules": ["all-linear"]})
    losses(adapted, 1)
    regions = compiled_regions(adapted.model)
    assert [region.compiled_calls for region in regions] == [1] * 4
    assert regions[0].compiler.graphs == 2


@pytest.mark.parametrize("records", [False, True])
def test_graphs_are_lowered_to_be_recorded_where_that_was_asked_for(monkeypatch, records):
    """And torch is notified of each step, whose gradients the next may overwrite, not of each micro-batch."""
    torch._dynamo.reset()
    asked, marks = [], []
    monkeypatch.setattr(compiled, "lower", lambda graph, inputs, *options: asked.append(options) or graph)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    assembly = build(cuda_graphs=records)
    rows = unequal_rows()
    for step in (1, 2):
        train_step(assembly, [rows, rows], step)
    assert asked
    assert set(map(str, asked)) == {"({'triton.cudagraphs': True},)" if records else "()"}
    assert len(marks) == (2 if records else 0)


@pytest.mark.slow
def test_the_ninth_run_of_a_process_is_compiled_too(uncompiled):
    """torch keeps the code of eight compilers for a function, and runs plain code for the next."""
    for _ in range(9):
        assembly = build()
        losses(assembly, steps=1)
    assert {region.compiled_calls for region in compiled_regions(assembly.model)} == {1}


def test_a_block_that_lost_its_compiled_call_stops_the_run():
    assembly = build()
    assembly.model.model.layers[1]._compiled_call_impl = None
    with pytest.raises(VerificationFailed, match=r"training.compile: asked 2/2, in effect 1/2"):
        verify(assembly)


def test_plain_code_behind_a_compiled_call_stops_the_run():
    """A silent fallback: here all compilation is switched off from outside."""
    assembly = build()
    torch.compiler.set_stance("force_eager")
    try:
        losses(assembly, 1)
    finally:
        torch.compiler.set_stance("default")
    with pytest.raises(VerificationFailed, match=r"training.compile: asked 2/2, in effect 0/2"):
        after_step(assembly)
    assert len(newly_plain(assembly.model)) == 2
    assert not newly_plain(assembly.model)


def test_a_block_that_does_not_compile_is_named(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such kernel")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "lower", broken)
    with pytest.raises(VerificationFailed, match=r"model.layers.0 does not compile: .*no such kernel"):
        losses(build(), 1)


def test_evaluation_and_probes_compile_nothing(uncompiled):
    assembly = build(model={"attn_implementation": "sdpa", "chunked_loss": 8})
    verify(assembly)
    eval_step(assembly, unequal_rows())
    [first, *_] = regions = compiled_regions(assembly.model)
    assert first.compiler.graphs == 0
    assert all(region.is_on for region in regions)


@pytest.mark.slow
def test_rows_of_other_lengths_share_one_more_graph(uncompiled):
    assembly = build()
    for step, length in enumerate((24, 20, 18, 22), 1):
        batch = {name: tensor[:, :length] for name, tensor in unequal_rows().items()}
        train_step(assembly, [batch], step)
    assert compiled_regions(assembly.model)[0].compiler.graphs == 2
    assert not newly_plain(assembly.model)


@pytest.mark.slow
def test_few_lengths_get_code_of_their_own(uncompiled):
    """Multiples of 8 up to 24: three lengths, so shapes are static; a fourth shape is one more row count."""
    training = {"compile": True, "per_device_train_batch_size": 8}
    sections = {"model": {"model_max_length": 24}, "data": {"pad_to_multiple_of": 8}}
    config = tiny_config(training=training, **sections)
    assert config.possible_lengths == 3
    assert tiny_config(training=training).possible_lengths == 0
    assembly = tiny_assembly(config)
    for step, length in enumerate((24, 16, 8, 16), 1):
        batch = {name: tensor[:, -length:] for name, tensor in unequal_rows().items()}
        train_step(assembly, [batch], step)
    assert compiled_regions(assembly.model)[0].compiler.graphs == 3


def test_a_model_without_known_blocks_can_only_be_compiled_whole(monkeypatch):
    class Unknown(torch.nn.Module):
        pass

    monkeypatch.setattr(compiled, "GradientCheckpointingLayer", Unknown)
    with pytest.raises(RequestError, match=r"training\.compile_scope: .* has no known transformer blocks"):
        build()


@pytest.mark.parametrize(("dtype", "autocast"), [("float32", "bf16"), ("bfloat16", "none")])
def test_float32_experts_under_autocast_are_not_compiled(dtype, autocast):
    """Their product knows no autocast, so that compiled code would end there."""
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    mixture = {**LLAMA, "model_type": "qwen3_moe", **experts}
    refused = pytest.raises(RequestError, match=r"training\.compile: float32 experts") if dtype == "float32" else None
    with refused or contextlib.nullcontext():
        assert compiled_regions(build(mixture, model={"torch_dtype_str": dtype}, mixed_precision_dtype=autocast).model)


@pytest.mark.parametrize(("architecture", "autocast"), [(GPT2, "bf16"), (GPT2, "none"), (LLAMA, "bf16")])
def test_8_bit_layers_with_a_bias_are_not_compiled_under_autocast(architecture, autocast):
    pytest.importorskip("bitsandbytes")
    settings = {"use_peft": True, "mixed_precision_dtype": autocast}
    peft = {"q_lora": True, "q_lora_bits": 8, "lora_r": 4}
    is_refused = architecture is GPT2 and autocast == "bf16"
    refused = pytest.raises(RequestError, match=r"training\.compile: 8-bit layers with a bias") if is_refused else None
    with refused or contextlib.nullcontext():
        assert compiled_regions(build(architecture, peft=peft, model={"torch_dtype_str": "bfloat16"}, **settings).model)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++, which is not here")
def test_inductor_itself_trains_the_same():
    torch._dynamo.reset()
    expected = losses(build(compile=False))
    assembly = build(activation_memory_budget=0.5)
    assert losses(assembly) == pytest.approx(expected, rel=1e-4)
    assert after_step(assembly)["training.activation_memory_budget"].found == "0.5"
