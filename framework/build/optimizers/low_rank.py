"""GaLore and APOLLO: AdamW with moments in a low-rank projection of each matrix's gradient."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from framework.build.optimizers.row import Groups, Looked, Row, State, Trained, betas_of, in_its_dtype
from framework.build.seeds import mixed
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams

GROWTH_LIMIT = 1.01
"""Largest growth of an update's norm from one step to the next (APOLLO's norm-growth limiter, arXiv 2412.05270)."""


class LowRankAdamW(torch.optim.Optimizer):
    """AdamW over the gradients of `matrices` projected to `rank` rows or columns; the rest as plain AdamW.

    `galore` (Zhao et al., arXiv 2403.03507): the projection is the leading directions of the gradient, renewed every
    `update_steps` steps and stored; the step taken in the low rank is projected back, times `scale`. The directions
    come from two rounds of subspace iteration, where the paper takes a whole singular value decomposition.
    `apollo` (Zhu et al., arXiv 2412.05270): the projection is random, drawn again from (`seed`, renewal, place) in
    every step instead of stored; the low rank only says by how much each row of the full gradient is scaled.

    An m x n matrix, m >= n, has states of 2 m rank elements in its dtype, galore n rank more. Temporaries: a float32
    copy of the largest gradient and two of its size.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        apollo: bool,
        rank: int,
        update_steps: int,
        scale: float,
        seed: int,
        numbers: Mapping[Tensor, int],
        matrices: frozenset[Tensor],
        generator: torch.Generator,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.apollo, self.rank, self._update_steps, self._scale = apollo, rank, update_steps, scale
        self._seed, self._numbers, self._matrices, self._generator = seed, numbers, matrices, generator

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = self._direction(parameter, group)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"])

    def _direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        state["step"] = state.get("step", 0) + 1
        if parameter not in self._matrices:
            return _adam(state, gradient, group)
        upright = gradient.shape[0] >= gradient.shape[1]
        tall = gradient.float() if upright else gradient.float().T
        projection = self._projection(parameter, state, tall)
        low = tall @ projection.float()
        moved = _adam(state, low.to(gradient.dtype), group).float()
        if not self.apollo:
            full = (moved @ projection.float().T).mul_(self._scale)
        else:
            full = tall * (moved.norm(dim=1) / low.norm(dim=1).add_(1e-8)).mul_(self._scale).unsqueeze(1)
            full = _limited(state, full)
        return full if upright else full.T

    def _projection(self, parameter: Tensor, state: dict[str, Any], tall: Tensor) -> Tensor:
        """Columns to project on, [n, rank]."""
        renewal, left = divmod(state["step"] - 1, self._update_steps)
        if left and not self.apollo:
            stored: Tensor = state["projection"]
            return stored
        self._generator.manual_seed(mixed(self._seed, renewal, self._numbers[parameter]))
        shape = (tall.shape[1], self.rank)
        drawn: Tensor = torch.empty(shape, device=tall.device).normal_(generator=self._generator)
        if self.apollo:
            return drawn.div_(self.rank**0.5)
        for _ in range(2):  # subspace iteration: each round sharpens the leading directions
            drawn = tall.T @ torch.linalg.qr(tall @ drawn).Q
        projection: Tensor = torch.linalg.qr(drawn).Q.to(parameter.dtype)
        state["projection"] = projection
        return projection


def _adam(state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The direction of Adam for `gradient`, whose moments are in `state`."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    direction: Tensor = (state["exp_avg"] / (1 - beta1 ** state["step"])).div_(root)
    return direction


def _limited(state: dict[str, Any], update: Tensor) -> Tensor:
    """`update`, its norm at most GROWTH_LIMIT times that of the step before; without reading it on the host."""
    norm = update.norm()
    if "norm" in state:
        limit = state["norm"] * GROWTH_LIMIT
        update = update.mul_(torch.clamp(limit / (norm + 1e-8), max=1.0))
        norm = torch.minimum(norm, limit)
    state["norm"] = norm
    return update


GALORE_SCALE, APOLLO_SCALE = 0.25, 1.0
"""`training.projection_scale` where it is unset: the defaults of both papers' code."""


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> LowRankAdamW:
    apollo, scale = training.optimizer is Optimizer.APOLLO_ADAMW, training.projection_scale
    if scale is None:
        scale = APOLLO_SCALE if apollo else GALORE_SCALE
    return LowRankAdamW(
        groups,
        training.learning_rate,
        betas_of(training),
        training.adam_epsilon,
        apollo=apollo,
        rank=training.projection_rank,
        update_steps=training.projection_update_steps,
        scale=scale,
        seed=training.seed,
        numbers=trained.numbers,
        matrices=trained.matrices,
        generator=torch.Generator("cpu" if trained.place.rehearsed else trained.place.device),
    )


def _galore_states(training: TrainingParams, looked: Looked) -> Iterable[State]:
    names = ["exp_avg", "exp_avg_sq", *(["projection"] if looked.is_matrix else [])]
    return [(name, looked.dtype) for name in names]


ROWS = {
    Optimizer.GALORE_ADAMW: Row(_make, lambda made: isinstance(made, LowRankAdamW) and not made.apollo, _galore_states),
    Optimizer.APOLLO_ADAMW: Row(
        _make, lambda made: isinstance(made, LowRankAdamW) and made.apollo, in_its_dtype("exp_avg", "exp_avg_sq")
    ),
}
