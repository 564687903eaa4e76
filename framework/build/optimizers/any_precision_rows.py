"""Table rows of AnyPrecisionAdamW, in both widths."""

from collections.abc import Iterator
from functools import partial

import torch

from framework.build.optimizers import codes
from framework.build.optimizers.any_precision import AnyPrecisionAdamW, Kernel, note_only
from framework.build.optimizers.row import Groups, Looked, Row, State, Trained, betas_of
from framework.build.place import Place
from framework.schema.choices import Rounding
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> AnyPrecisionAdamW:
    return AnyPrecisionAdamW(
        groups,
        training.learning_rate,
        betas_of(training),
        training.adam_epsilon,
        rounding=training.rounding or Rounding.STOCHASTIC,
        state_bits=8 if training.optimizer is Optimizer.ANYPRECISION_ADAMW_8BIT else 16,
        seed=training.seed,
        numbers=trained.numbers,
        kernel=_kernel(trained.place),
    )


def _kernel(place: Place) -> Kernel | None:
    """The launch over many parameters on a CUDA card, by triton, which torch for CUDA includes on Linux; else None."""
    if place.kind != "cuda":
        return None
    if place.rehearsed:
        return Kernel(note_only)
    try:
        from framework.build.optimizers.any_precision_kernel import launch
    except ImportError:
        return None
    return Kernel(launch)


def _states(bits: int, training: TrainingParams, looked: Looked) -> Iterator[State]:
    is_coded = bits == 8 and looked.tensor.numel() >= codes.SMALLEST
    for name in ("exp_avg", "exp_avg_sq"):
        yield name, "uint8" if is_coded else "bfloat16"
        if is_coded:
            yield f"{name}_scales", "float32"
    if training.rounding is Rounding.KAHAN and looked.tensor.dtype is torch.bfloat16:
        yield "compensation", "bfloat16"


def _is_of(bits: int, made: torch.optim.Optimizer) -> bool:
    return isinstance(made, AnyPrecisionAdamW) and made.state_bits == bits


ROWS = {
    choice: Row(_make, partial(_is_of, bits), partial(_states, bits))
    for choice, bits in ((Optimizer.ANYPRECISION_ADAMW, 16), (Optimizer.ANYPRECISION_ADAMW_8BIT, 8))
}
