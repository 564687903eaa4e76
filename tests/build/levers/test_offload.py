"""Activations that wait on the host: the trained weights are the same, and the device holds what two blocks keep."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from framework.build.levers import offload as module
from framework.build.levers.activations import offloading
from framework.build.levers.offload import Handle, Offload
from framework.build.model.parts import transformer_blocks
from framework.build.place import real_place
from framework.build.verify import FirstStep, verify, verify_first_step
from framework.errors import VerificationFailed
from framework.memory.allocator import pinned_size
from framework.memory.planning import make_plan
from framework.memory.step_time import steady_step
from framework.memory.trace import HOLD, TRANSFER, Kind, Space
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.evaluate import evaluate
from framework.run.state import release
from framework.run.step import train_step
from tests.build.adapters.test_adapter import MOE
from tests.build.levers.test_activations import (
    LEVERS,
    ON,
    OTHERS,
    STREAM,
    WIDE,
    config,
    kept,
    plainly,
    rehearsed,
    same,
    trained,
)
from tests.grids import slow, thinned
from tests.tiny import GEMMA2, GPT2, split, tiny_assembly, unequal_rows

OFF = {"activation_offload": True}


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tiny tensors are moved too, but where bytes are counted."""
    if "plan" not in request.node.name:
        monkeypatch.setattr(module, "LEAST_BYTES", 0)


@pytest.mark.parametrize(("lever", "others"), thinned({"none": {}, **LEVERS}, OTHERS))
def test_three_steps_are_the_same(lever: dict[str, Any], others: dict[str, Any]) -> None:
    assembly = tiny_assembly(config({**lever, **OFF}, **others))
    verify(assembly)
    same(trained(assembly), plainly(others))
    assert offloading(assembly.model)[0].moved_bytes > 0


@pytest.mark.parametrize("architecture", [MOE, slow(GPT2), slow(GEMMA2)], ids=lambda a: a["model_type"])
def test_other_families_are_the_same(architecture: dict[str, Any]) -> None:
    same(
        trained(tiny_assembly(config(OFF, architecture)), 2),
        trained(tiny_assembly(config({}, architecture)), 2),
    )


def test_a_resumed_run_resumes_as_if_it_had_not_stopped(tmp_path: Any) -> None:
    straight = trained(tiny_assembly(config(OFF)), 4)
    first = tiny_assembly(config(OFF))
    trained(first, 2)
    again = tiny_assembly(config(OFF))
    load_checkpoint(save_checkpoint(tmp_path, contents_of(first, 2), keep=1), again)
    losses = [train_step(again, split(unequal_rows(), 4), step).loss for step in (3, 4)]
    same((losses, [p.detach() for p in again.trained]), (straight[0][2:], straight[1]))


def test_evaluation_moves_nothing() -> None:
    assembly = tiny_assembly(config(OFF))
    evaluate(assembly, [unequal_rows()], lambda phase: None)
    assert offloading(assembly.model)[0].moved_bytes == 0


@pytest.mark.parametrize(("lever", "least"), [({}, 15), (ON, 1)], ids=["all", "inputs"])
def test_weights_stay_and_each_storage_goes_once(lever: dict[str, Any], least: int, monkeypatch: Any) -> None:
    """Under autocast the weights in its dtype stay too. Of a checkpointed block only the input is offloaded."""
    sent: list[tuple[int, torch.Size]] = []
    send = Offload._send

    def noted(self: Offload, tensor: torch.Tensor, elements: int) -> Any:
        if tensor.numel():  # a checkpoint of torch 2.11 keeps an empty one next to its input
            sent.append((tensor.untyped_storage()._cdata, tensor.size()))
        return send(self, tensor, elements)

    monkeypatch.setattr(Offload, "_send", noted)
    for others in (OTHERS["plain"], OTHERS["autocast"], OTHERS["lora"]):
        sent.clear()
        assembly = tiny_assembly(config({**lever, **OFF}, **others))
        held = {t.untyped_storage()._cdata for t in (*assembly.model.parameters(), *assembly.model.buffers())}
        train_step(assembly, [unequal_rows()], 1)
        assert not {address for address, _ in sent} & held
        shapes = {tuple(sorted(parameter.shape)) for parameter in assembly.model.parameters() if parameter.dim() == 2}
        assert not [size for _, size in sent if tuple(sorted(size)) in shapes]
        assert len(sent) >= 4 * least
        assert lever is not ON or len(sent) == 4


def test_what_is_kept_dies_with_backward() -> None:
    assembly = tiny_assembly(config(OFF))
    mover = offloading(assembly.model)[0]
    train_step(assembly, [unequal_rows()], 1)
    gc.collect()
    assert not [visit for reference in mover._visits if (visit := reference()) is not None and visit.alive]


def test_the_device_lets_go_of_all_but_the_block_that_is_leaving() -> None:
    mover = Offload(real_place(torch.device("cpu")))
    rows = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    results, seen = [], []
    for index, row in enumerate(rows):
        with mover.block(lambda: None, is_last=index == 2):
            inner = row * 2
            seen.append(weakref.ref(inner.untyped_storage()))
            results.append((inner * inner).sum())
        del inner
        assert [reference() is not None for reference in seen] == [False] * index + [index < 2]
    torch.stack(results).sum().backward()  # backward of the test's own graph
    for row in rows:
        torch.testing.assert_close(row.grad, 8 * row.detach())


def test_a_handle_is_a_view_of_what_came_back() -> None:
    mover = Offload(real_place(torch.device("cpu")))
    whole = torch.arange(24.0).view(4, 6)
    with mover.block(lambda: None, is_last=True):
        handles = [mover._pack(view) for view in (whole[:, 1:3], whole.t(), whole)]
    assert all(isinstance(handle, Handle) for handle in handles)
    assert mover.moved_bytes == 24 * 4
    for handle, view in zip(handles, (whole[:, 1:3], whole.t(), whole), strict=True):
        assert torch.equal(mover._unpack(handle), view)


def test_it_is_read_back_after_the_first_step() -> None:
    assembly = tiny_assembly(config(OFF))
    train_step(assembly, [unequal_rows()], 1)
    step = FirstStep(((8, 24),))
    reading = next(item for item in verify_first_step(assembly, step) if item.key == "training.activation_offload")
    assert reading.found == "4/4 blocks"
    assert "MiB moved" in reading.source
    assembly.model.model.layers[0].gradient_checkpointing = False
    with pytest.raises(VerificationFailed, match="asked 4/4 blocks, in effect 3/4 blocks"):
        verify_first_step(assembly, step)


# -- the plan: bytes counted by hand (STREAM is 256 KiB, so the limit is lowered to it)
def host_peak(rehearsal: Any) -> int:
    trace, now, most = rehearsal.trace, 0, 0
    for event in trace.events:
        block = event if event >= 0 else ~event
        if trace.spaces[block] is Space.PINNED:
            now += pinned_size(trace.sizes[block]) * (1 if event >= 0 else -1)
            most = max(most, now)
    return most


def test_plan_of_inputs_of_checkpointed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", STREAM)
    plain, moved = rehearsed(ON), rehearsed({**ON, **OFF})
    assert kept(plain) - kept(moved) == 8 * STREAM
    assert host_peak(moved) == 8 * STREAM
    made = make_plan(moved)
    assert made.peak.terms.unattributed == 0
    assert make_plan(plain).host_bytes <= made.host_bytes


def test_plan_without_checkpointing_keeps_no_block_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", STREAM // 2)
    plain, moved = rehearsed({}), rehearsed(OFF)
    per_block = (kept(plain) - kept(rehearsed({}, architecture={**WIDE, "num_hidden_layers": 6}))) // 2
    small = kept(moved) - (kept(plain) - 8 * per_block)
    assert 0 <= small < 0.05 * 8 * per_block, "below the limit: norms' roots and log-sum-exps"
    assert host_peak(moved) >= 8 * (per_block - small // 8)


@pytest.mark.slow
def test_plan_holds_two_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the blocks, no more of the device: the most that is alive in forward or backward."""
    monkeypatch.setattr(module, "LEAST_BYTES", STREAM // 2)

    def most(layers: int, phase: str) -> int:
        trace = rehearsed(OFF, architecture={**WIDE, "num_hidden_layers": layers}).trace
        marks = [(mark.event, mark.phase) for mark in trace.marks] + [(len(trace.events), "")]
        alive, peak = 0, 0
        for (start, name), (end, _) in itertools.pairwise(marks):
            for event in trace.events[start:end]:
                block = event if event >= 0 else ~event
                if trace.spaces[block] is Space.DEVICE and trace.kinds[block] in (Kind.ACTIVATIONS, Kind.TEMPORARIES):
                    alive += trace.sizes[block] * (1 if event >= 0 else -1)
                    peak = max(peak, alive) if name == phase else peak
        return peak

    for phase in ("forward", "backward"):
        few, many = most(6, phase), most(12, phase)
        assert many - few < 6 * 0.15 * STREAM * 20, phase


def test_plan_counts_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", STREAM // 2)
    trace = rehearsed(OFF).trace
    sizes = [operation.bytes for operation in trace.operations if operation.name == "transfer"]
    outward = [size for size, space in zip(trace.sizes, trace.spaces, strict=True) if space is Space.PINNED]
    assert sum(sizes) == 2 * sum(outward) > 0


def test_plan_waits_for_the_block_that_leaves_and_for_the_one_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One input a block: kernels wait for the copy of the block before, and after the last block for its own; in
    backward for each block's own, before the copy of the next one begins."""
    monkeypatch.setattr(module, "LEAST_BYTES", STREAM)
    links = [call for call in steady_step(rehearsed({**ON, **OFF}).trace) if call.name in (TRANSFER, HOLD)]
    forward, backward = ([c for c in links if (c.phase == "forward") is first] for first in (True, False))
    lags = [[call.tensors for call in part if call.name == HOLD] for part in (forward, backward)]
    assert lags == [[1] * 7 + [0], [0] * 8]
    assert [call.name for call in forward[:5]] == [TRANSFER, TRANSFER, HOLD, TRANSFER, HOLD]
    assert [call.name for call in backward] == [TRANSFER, HOLD] * 8


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_nothing_is_kept_of_a_pass_that_ends_early(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's graph must not hold itself by what a block saves, such as a small result that its node needs."""
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 12)
    assembly = tiny_assembly(config(OFF))
    made: list[weakref.ref[module.Kept]] = []
    send = Offload._send

    def noted(self: Offload, tensor: torch.Tensor, elements: int) -> module.Kept:
        found = send(self, tensor, elements)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Offload, "_send", noted)
    mlp = transformer_blocks(assembly.model)[1].mlp

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    _ = mlp.register_forward_hook(fail) if part == "forward" else mlp.register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as failure:
        train_step(assembly, [unequal_rows()], 1)
    release(failure.value)
    del failure
    gc.collect()
    assert made
    assert not any(found() for found in made)
