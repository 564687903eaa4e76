"""Schedule-free AdamW: an average of the weights instead of a decaying rate, used by evaluation and export."""

from typing import Any

import torch

from framework.build.optimizers.row import Groups, Row, Trained, betas_of, in_its_dtype
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """Defazio et al., "The Road Less Scheduled", arXiv 2405.15682; the arithmetic of facebookresearch/schedule_free.

    The model holds y, where gradients are taken; the states are z, where steps are made, and the second moment, both in
    the parameter's dtype. The average x, the result of training, is y moved away from z by 1 / beta1. Two temporaries
    of the largest parameter.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "largest_rate": 0.0, "weight_sum": 0.0}
                    state["z"], state["exp_avg_sq"] = parameter.clone(), torch.zeros_like(parameter)
                state["step"] += 1
                state["largest_rate"] = max(state["largest_rate"], rate)
                weight = state["largest_rate"] ** 2  # steps of warm-up count for less
                state["weight_sum"] += weight
                share = weight / state["weight_sum"] if state["weight_sum"] else 0.0
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                direction = parameter.grad.div(root).add_(parameter, alpha=group["weight_decay"])
                parameter.lerp_(state["z"], share).add_(direction, alpha=rate * (beta1 * (1 - share) - 1))
                state["z"].sub_(direction, alpha=rate)


@torch.no_grad()
def take_schedule_free_average(optimizer: torch.optim.Optimizer) -> None:
    """Replace the model's weights by the averaged ones for good; for other optimizers do nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            z = optimizer.state.get(parameter, {}).get("z")
            if z is not None:
                parameter.lerp_(z.to(parameter.device), 1 - 1 / group["betas"][0])


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW(groups, training.learning_rate, betas_of(training), training.adam_epsilon)


ROWS = {
    Optimizer.SCHEDULE_FREE_ADAMW: Row(
        _make, lambda made: type(made) is ScheduleFreeAdamW, in_its_dtype("z", "exp_avg_sq")
    )
}
