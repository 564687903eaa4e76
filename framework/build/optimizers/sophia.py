"""Sophia with a cheap curvature: momentum over a diagonal, clipped element by element."""

from typing import Any

import torch

from framework.build.optimizers.row import Groups, Row, Trained, betas_of, in_its_dtype
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


class SophiaG(torch.optim.Optimizer):
    """Liu et al., "Sophia", arXiv 2305.14342, with the empirical Fisher as curvature.

    The paper's Gauss-Newton-Bartlett estimate squares the gradient of a loss on labels that the model itself draws,
    which needs one more backward pass every `hessian_steps` steps. This variant squares the gradient of the batch at
    hand in those steps: no extra pass, a rougher curvature. `rho` is the paper's gamma (0.04) times the tokens of a
    batch, because gradients here are means. Two states in the parameter's dtype; two temporaries of the largest
    parameter. A weight moves by at most the learning rate.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], *, rho: float, hessian_steps: int) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": 0.0, "rho": rho, "hessian_steps": hessian_steps}
        super().__init__(params, defaults)

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
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["hessian"] = torch.zeros_like(parameter)
                if state["step"] % group["hessian_steps"] == 0:
                    state["hessian"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                state["step"] += 1
                momentum = state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                ratio = momentum / (state["hessian"] * group["rho"]).add_(1e-15)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(ratio.clamp_(-1, 1), alpha=-group["lr"])


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> SophiaG:
    rho, steps = training.sophia_rho, training.sophia_hessian_steps
    return SophiaG(groups, training.learning_rate, betas_of(training), rho=rho, hessian_steps=steps)


ROWS = {Optimizer.SOPHIA: Row(_make, lambda made: type(made) is SophiaG, in_its_dtype("exp_avg", "hessian"))}
