"""Recomputation changes the memory and nothing else: the same losses and weights, and bytes counted by hand."""

from typing import Any

import pytest
import torch

from framework.build.levers.activations import Recompute, recomputing
from framework.build.levers.compiled import CHECKPOINTS_IN_FORWARD
from framework.build.model.parts import transformer_blocks
from framework.build.verify import missing_gradients, verify
from framework.errors import RequestError, VerificationFailed
from framework.memory.trace import Kind, Rehearsal, Space
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from tests.build.adapters.test_adapter import MOE
from tests.grids import slow, thinned
from tests.run.reference import H100
from tests.tiny import GEMMA2, GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows

DEEP: dict[str, Any] = {**LLAMA, "num_hidden_layers": 4}
ON = {"enable_gradient_checkpointing": True}
LEVERS: dict[str, dict[str, Any]] = {
    "full": ON,
    "every": {**ON, "gradient_checkpointing_every": 2},
    "attention": {**ON, "gradient_checkpointing_policy": "save_attention"},
    "matmuls": {**ON, "gradient_checkpointing_policy": "save_matmuls"},
    "reentrant": {**ON, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"model": {"chunked_loss": 16}},
    "autocast": {"training": {"mixed_precision_dtype": "bf16"}},
    "lora": {
        "training": {"use_peft": True, "learning_rate": 1e-2},
        "peft": {"lora_r": 4, "lora_target_modules": ["all-linear"]},
    },
    "frozen": {"model": {"freeze_layers": ["embeddings"], "freeze_first_blocks": 2}},
}


def config(lever: dict[str, Any], architecture: dict[str, Any] = DEEP, **others: Any) -> Any:
    training = {"learning_rate": 1e-3, **others.pop("training", {}), **lever}
    return tiny_config(architecture, training=training, **others)


def trained(assembly: Any, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    losses = [train_step(assembly, split(unequal_rows(), 4), step).loss for step in range(1, steps + 1)]
    return losses, [parameter.detach().clone() for parameter in assembly.trained]


_plain: dict[str, tuple[list[float], list[torch.Tensor]]] = {}


def plainly(others: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Trained without any lever, once for all tests."""
    if (asked := repr(others)) not in _plain:
        _plain[asked] = trained(tiny_assembly(config({}, **others)))
    return _plain[asked]


def same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("lever", "others"), thinned(LEVERS, OTHERS))
def test_three_steps_are_the_same(lever: dict[str, Any], others: dict[str, Any]) -> None:
    """An adapter and checkpointing train in every variant."""
    assembly = tiny_assembly(config(lever, **others))
    verify(assembly)
    same(trained(assembly), plainly(others))


@pytest.mark.parametrize(
    ("architecture", "lever"),
    thinned([GPT2, GEMMA2, MOE], {"matmuls": LEVERS["matmuls"], "reentrant": LEVERS["reentrant"]}),
)
def test_other_families_are_the_same(lever: dict[str, Any], architecture: dict[str, Any]) -> None:
    assembly = tiny_assembly(config(lever, architecture))
    verify(assembly)
    same(trained(assembly, 2), trained(tiny_assembly(config({}, architecture)), 2))


@pytest.mark.parametrize(
    "lever", [LEVERS["every"], slow(LEVERS["matmuls"]), slow(LEVERS["reentrant"])], ids=["2", "mm", "re"]
)
def test_a_resumed_run_resumes_as_if_it_had_not_stopped(lever: dict[str, Any], tmp_path: Any) -> None:
    straight = trained(tiny_assembly(config(lever)), 4)
    first = tiny_assembly(config(lever))
    trained(first, 2)
    again = tiny_assembly(config(lever))
    load_checkpoint(save_checkpoint(tmp_path, contents_of(first, 2), keep=1), again)
    losses = [train_step(again, split(unequal_rows(), 4), step).loss for step in (3, 4)]
    same((losses, [p.detach() for p in again.trained]), (straight[0][2:], straight[1]))


def found(assembly: Any) -> dict[str, str]:
    return {reading.key: reading.found for reading in verify(assembly)}


@pytest.mark.parametrize(("every", "count"), [(1, 5), (2, 3), (3, 2), (9, 1)])
def test_every_nth_block_recomputes(every: int, count: int) -> None:
    lever = {**ON, "gradient_checkpointing_every": every}
    assembly = tiny_assembly(config(lever, {**LLAMA, "num_hidden_layers": 5}))
    assert found(assembly)["training.enable_gradient_checkpointing"] == f"{count}/5"
    places = [index for index, block in enumerate(transformer_blocks(assembly.model)) if block.gradient_checkpointing]
    assert places == list(range(0, 5, every))
    assert len(list(recomputing(assembly.model))) == count


def test_a_class_that_ignores_the_flag_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is set, in train mode, and forward takes no notice of it."""
    assembly = tiny_assembly(config(ON))
    kind = type(transformer_blocks(assembly.model)[0])
    if CHECKPOINTS_IN_FORWARD:
        monkeypatch.setattr(kind, "forward", kind.forward.__wrapped__)
    else:
        monkeypatch.setattr(kind, "__call__", torch.nn.Module.__call__, raising=False)
    with pytest.raises(VerificationFailed, match="enable_gradient_checkpointing: asked 4/4, in effect 0/4"):
        verify(assembly)


def test_a_policy_that_finds_nothing_to_keep_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = tiny_assembly(config(LEVERS["attention"]))
    monkeypatch.setattr("framework.build.verify.activations.keeps", lambda policy, operator: False)
    with pytest.raises(VerificationFailed, match="asked save_attention, in effect nothing to keep"):
        verify(assembly)


def test_a_model_without_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.build.levers.activations.transformer_blocks", lambda model: [])
    with pytest.raises(RequestError, match="LlamaForCausalLM has no known transformer blocks"):
        tiny_assembly(config(ON))


def test_weights_that_get_no_gradient_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-entrant, embeddings frozen, and nothing asks the inputs for gradients."""
    monkeypatch.setattr("framework.build.levers.activations._asking_for_gradients", lambda inputs: inputs)
    adapter = {"lora_target_modules": ["all-linear"], "lora_modules_to_save": ["lm_head"]}
    assembly = tiny_assembly(config(LEVERS["reentrant"], training={"use_peft": True}, peft=adapter))
    absent: list[str] = []

    def observe(phase: str) -> None:
        if phase == "optimizer_step":
            absent.extend(missing_gradients(assembly))

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        train_step(assembly, [unequal_rows()], 1, observe)
    assert sum("lora_" in name for name in absent) > 20


def test_a_frozen_beginning_keeps_nothing() -> None:
    """Its blocks neither keep activations nor recompute, checkpointing on or off, adapter or not."""
    for lever in ({}, ON, LEVERS["reentrant"]):
        assembly = tiny_assembly(config(lever, **OTHERS["frozen"]))
        assert found(assembly)["blocks that keep activations"] == "2/4"
    assembly = tiny_assembly(config(ON, model={"freeze_layers": ["layers.0", "layers.1"]}))
    assert found(assembly)["blocks that keep activations"] == "4/4", "embeddings are trained through them"
    adapted = tiny_assembly(config(ON, **OTHERS["lora"]))
    assert found(adapted)["blocks that keep activations"] == "4/4"
    assert "blocks that keep activations" not in found(tiny_assembly(config(ON)))


# -- bytes counted by hand
WIDE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, LENGTH, WIDTH, HEADS = 4, 128, 256, 4
TOKENS = ROWS * LENGTH
STREAM = 2 * TOKENS * WIDTH
"""Bytes of the hidden states between two blocks, in bfloat16."""
ATTENTION = STREAM + 4 * ROWS * HEADS * LENGTH + 3 * 8
"""The flash kernel's output, its float32 log-sum-exp, and the state of its random numbers."""
PRODUCTS = 2 * TOKENS * (256 + 2 * 128 + 256 + 2 * 768 + 256)
"""Results of q, k and v, o, gate and up, down."""


_known: dict[str, Rehearsal] = {}


def rehearsed(lever: dict[str, Any], **model: Any) -> Rehearsal:
    """Made once for all tests, but where activations are moved: tests change the least size of what is."""
    if lever.get("activation_offload"):
        return _rehearsed(lever, **model)
    asked = repr((lever, model))
    if asked not in _known:
        _known[asked] = _rehearsed(lever, **model)
    return _known[asked]


def _rehearsed(lever: dict[str, Any], **model: Any) -> Rehearsal:
    training = {"per_device_train_batch_size": ROWS, "global_batch_size": ROWS, **lever}
    precision = {"torch_dtype_str": "bfloat16", "model_max_length": LENGTH, "sdpa_backend": "flash"}
    return record(tiny_config(WIDE, gpu=H100, training=training, model={**precision, **model}))


def kept(rehearsal: Rehearsal) -> int:
    """Device bytes of activations when the loss begins."""
    trace, alive = rehearsal.trace, set()
    for event in trace.events[: next(mark.event for mark in trace.marks if mark.phase == "loss")]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    on_device = [block for block in alive if trace.spaces[block] is Space.DEVICE]
    return sum(trace.sizes[block] for block in on_device if trace.kinds[block] is Kind.ACTIVATIONS)


@pytest.mark.slow
def test_kept_bytes_are_those_of_the_policy() -> None:
    full = kept(rehearsed(ON))
    assert full - kept(rehearsed(ON, architecture={**WIDE, "num_hidden_layers": 6})) == 2 * STREAM
    assert kept(rehearsed(LEVERS["attention"])) - full == 8 * ATTENTION
    assert kept(rehearsed(LEVERS["matmuls"])) - full == 8 * (ATTENTION + PRODUCTS)
    assert kept(rehearsed(LEVERS["reentrant"])) == full


def test_kept_bytes_grow_by_each_block_that_is_not_checkpointed() -> None:
    full, none = kept(rehearsed(ON)), kept(rehearsed({}))
    half = kept(rehearsed(LEVERS["every"]))
    assert half == pytest.approx((full + none) / 2, rel=0.01)


@pytest.mark.parametrize(
    "lever", [{}, slow(ON), LEVERS["matmuls"], slow(LEVERS["reentrant"])], ids=["none", "full", "mm", "re"]
)
def test_a_frozen_beginning_costs_no_bytes(lever: dict[str, Any]) -> None:
    """6 of 8 blocks frozen keep what a model of 2 blocks would."""
    short = kept(rehearsed(lever, architecture={**WIDE, "num_hidden_layers": 2}, freeze_layers=("embed_tokens",)))
    assert kept(rehearsed(lever, freeze_layers=("embeddings",), freeze_first_blocks=6)) == short


def test_a_policy_that_keeps_nothing_on_the_card_is_refused_by_the_plan() -> None:
    """Float32 attention over grouped queries runs as many operators on CUDA."""
    with pytest.raises(RequestError, match="save_attention keeps nothing"):
        rehearsed(
            {**LEVERS["attention"], "mixed_precision_dtype": "none"}, torch_dtype_str="float32", sdpa_backend=None
        )


def test_the_runner_is_reported_as_ours() -> None:
    """Attributes set on a block by other code are not taken for a checkpoint."""
    assembly = tiny_assembly(config(ON))
    block = transformer_blocks(assembly.model)[0]
    assert isinstance(block._gradient_checkpointing_func, Recompute)
    block._gradient_checkpointing_func = lambda function, *inputs: function(*inputs)
    with pytest.raises(VerificationFailed, match="in effect 3/4"):
        verify(assembly)
