"""float16 autocast: the loss scaler skips what it must, stops what it cannot help, and comes back from a checkpoint."""

import json

import pytest
import torch

from framework.errors import NonFinite
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.step import train_step
from tests.tiny import split, tiny_assembly, tiny_config, unequal_rows

FP16 = {"mixed_precision_dtype": "fp16", "learning_rate": 1e-2}


def assembly_in_fp16(**training):
    return tiny_assembly(tiny_config(training={**FP16, **training}))


def poison(assembly, steps, value=float("inf")):
    """Overflow the gradient of one weight in the next `steps` backward passes. Returns the remaining ones."""
    left = [steps]

    def hook(gradient):
        left[0] -= 1
        return gradient * value if left[0] >= 0 else gradient

    assembly.trained[3].register_hook(hook)
    return left


def test_scaling_changes_neither_gradients_nor_clipping():
    """Unscaled before the norm is taken: the same as in float32 up to float16's rounding."""
    scaled = train_step(assembly_in_fp16(), split(unequal_rows(), 2), 1)
    plain = train_step(tiny_assembly(tiny_config()), split(unequal_rows(), 2), 1)
    assert scaled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)
    assert scaled.loss == pytest.approx(plain.loss, rel=1e-3)
    sgd = assembly_in_fp16(optimizer="sgd", max_grad_norm=1e-3, learning_rate=1.0)
    before = [p.detach().clone() for p in sgd.trained]
    train_step(sgd, [unequal_rows()], 1)
    moved = torch.stack([(p.detach() - q).norm() for p, q in zip(sgd.trained, before, strict=True)]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_an_overflow_skips_the_step_and_halves_the_scale(optimizer):
    """A normal skip of the scaler is no reason to stop."""
    assembly = assembly_in_fp16(optimizer=optimizer)
    poison(assembly, 2)
    before = [p.detach().clone() for p in assembly.trained]
    for step in (1, 2):
        result = train_step(assembly, [unequal_rows()], step)
        assert result.skipped
        assert all(torch.equal(p, q) for p, q in zip(assembly.trained, before, strict=True))
        assert all(p.grad is None for p in assembly.trained)
    assert assembly.loss_scale.skipped == 2
    assert assembly.loss_scale.scaler.get_scale() == 2**14
    assert not train_step(assembly, [unequal_rows()], 3).skipped
    assert not any(torch.equal(p, q) for p, q in zip(assembly.trained, before, strict=True))


def test_an_overflow_that_no_scale_cures_stops_the_run():
    assembly = assembly_in_fp16()
    poison(assembly, 1000)
    for step in range(1, 17):
        assert train_step(assembly, [unequal_rows()], step).skipped
    with pytest.raises(NonFinite, match=r"step 17.*autocast fp16, loss scale 0\.5, 16 steps skipped"):
        train_step(assembly, [unequal_rows()], 17)


def test_a_norm_that_overflows_over_finite_gradients_stops_the_run():
    assembly = assembly_in_fp16()
    poison(assembly, 1, value=1e33)
    with pytest.raises(NonFinite, match="step 1:"):
        train_step(assembly, [unequal_rows()], 1)


def test_a_loss_that_is_not_finite_stops_at_once():
    """It was computed before any scale."""
    assembly = assembly_in_fp16()
    assembly.trained[3].data[0] = float("nan")
    with pytest.raises(NonFinite, match="step 1:"):
        train_step(assembly, [unequal_rows()], 1)


def test_the_scaler_resumes_bit_for_bit(tmp_path):
    """Scale, growth and skipped steps are in the checkpoint; the scale grows right where it would have."""

    def run(assembly, first, last):
        assembly.loss_scale.scaler.set_growth_interval(4)
        return [
            (train_step(assembly, [unequal_rows()], step).loss, assembly.loss_scale.scaler.get_scale())
            for step in range(first, last + 1)
        ]

    straight = assembly_in_fp16()
    poison(straight, 1)
    run(straight, 1, 3)
    saved = save_checkpoint(tmp_path, contents_of(straight, 3), keep=1)
    expected = run(straight, 4, 6)
    assert [scale for _, scale in expected] == [2**15, 2**16, 2**16]
    resumed = assembly_in_fp16()
    load_checkpoint(saved, resumed)
    assert resumed.loss_scale.skipped == 1
    assert run(resumed, 4, 6) == expected
    assert json.loads((saved / "state.json").read_text())["loss_scale"]["scale"] == 2**15


def test_without_float16_nothing_is_scaled_or_kept():
    assembly = tiny_assembly(tiny_config())
    assert not assembly.loss_scale.enabled
    assert assembly.loss_scale.state() == {}
    assert not assembly.loss_scale.skip()
