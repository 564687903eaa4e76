"""Optimizers of torch and transformers as they are."""

from collections.abc import Iterable
from functools import partial

import torch

from framework.build.optimizers.row import Groups, Looked, Row, State, Trained, betas_of, in_its_dtype
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


def _adamw(fused: bool, training: TrainingParams, groups: Groups, trained: Trained) -> torch.optim.Optimizer:
    """The fused implementation; or foreach on CUDA (fast; temporaries as large as the parameters), the plain loop on
    CPU."""
    how = {"fused": True} if fused else {"foreach": trained.foreach}
    rate, betas = training.learning_rate, betas_of(training)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=training.adam_epsilon, **how)


def _sgd(training: TrainingParams, groups: Groups, trained: Trained) -> torch.optim.Optimizer:
    momentum = training.sgd_momentum
    return torch.optim.SGD(groups, lr=training.learning_rate, momentum=momentum, foreach=trained.foreach)


def _adafactor(training: TrainingParams, groups: Groups, trained: Trained) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor  # behind it, peft: seconds to import

    rate = training.learning_rate
    made: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
    return made


def _adafactor_states(training: TrainingParams, looked: Looked) -> Iterable[State]:
    names = ["exp_avg_sq_row", "exp_avg_sq_col"] if looked.tensor.dim() > 1 else ["exp_avg_sq"]
    return [(name, "float32") for name in names]


def _is_adamw(optimizer: torch.optim.Optimizer, fused: bool) -> bool:
    return type(optimizer) is torch.optim.AdamW and bool(optimizer.defaults.get("fused")) is fused


_MOMENTS = in_its_dtype("exp_avg", "exp_avg_sq")
ROWS = {
    Optimizer.ADAMW_TORCH: Row(partial(_adamw, False), lambda made: _is_adamw(made, fused=False), _MOMENTS),
    Optimizer.ADAMW_TORCH_FUSED: Row(partial(_adamw, True), lambda made: _is_adamw(made, fused=True), _MOMENTS),
    Optimizer.SGD: Row(
        _sgd,
        lambda made: type(made) is torch.optim.SGD,
        lambda training, looked: [("momentum_buffer", looked.dtype)] if training.sgd_momentum else [],
    ),
    Optimizer.ADAFACTOR: Row(_adafactor, lambda made: type(made).__name__ == "Adafactor", _adafactor_states),
}
