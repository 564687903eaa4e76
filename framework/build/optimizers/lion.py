"""Lion: the sign of an interpolated momentum. One state."""

from typing import Any

import torch

from framework.build.optimizers.row import Groups, Row, Trained, betas_of, in_its_dtype
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, with decoupled decay.

    One momentum in the parameter's dtype. Every weight moves by the learning rate, so it wants a 3 to 10 times smaller
    one than AdamW; the paper's beta2 is 0.99. Temporaries: two of the largest parameter.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> Lion:
    return Lion(groups, training.learning_rate, betas_of(training))


ROWS = {Optimizer.LION: Row(_make, lambda made: type(made) is Lion, in_its_dtype("exp_avg"))}
