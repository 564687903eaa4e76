"""Muon for the hidden matrices and AdamW for everything else, behind one optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from framework.build.optimizers.row import Groups, Looked, Row, State, Trained, betas_of
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon (Jordan et al. 2024; rate scaled to AdamW's as in arXiv 2502.16982) combined with
    torch.optim.AdamW.

    `matrices` are the parameters for Muon: one momentum in their dtype. The others have AdamW's two. Both share
    `param_groups` and `state`, so that schedules and checkpoints see one optimizer.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        momentum: float,
        matrices: frozenset[Tensor],
        foreach: bool,
    ) -> None:
        groups = list(params)
        super().__init__([dict(group) for group in groups], {"lr": lr})
        hidden = [_part(group, True, matrices) for group in groups]
        others = [_part(group, False, matrices) for group in groups]
        self._parts: list[torch.optim.Optimizer] = []
        if hidden := [group for group in hidden if group["params"]]:
            self._parts.append(torch.optim.Muon(hidden, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if others := [group for group in others if group["params"]]:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, foreach=foreach))
        self.state = defaultdict(dict)
        for part in self._parts:
            for group in part.param_groups:
                self.state |= {parameter: part.state[parameter] for parameter in group["params"]}
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for part in self._parts:
            part.step()


def _part(group: dict[str, Any], hidden: bool, matrices: frozenset[Tensor]) -> dict[str, Any]:
    chosen = [parameter for parameter in group["params"] if (parameter in matrices) == hidden]
    return {**group, "params": chosen}


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> MuonWithAdamW:
    return MuonWithAdamW(
        groups,
        training.learning_rate,
        betas_of(training),
        training.adam_epsilon,
        momentum=training.muon_momentum,
        matrices=trained.matrices,
        foreach=trained.foreach,
    )


def _states(training: TrainingParams, looked: Looked) -> Iterable[State]:
    names = ["momentum_buffer"] if looked.is_matrix else ["exp_avg", "exp_avg_sq"]
    return [(name, looked.dtype) for name in names]


ROWS = {Optimizer.MUON: Row(_make, lambda made: type(made) is MuonWithAdamW, _states)}
