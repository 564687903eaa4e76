"""AdamW whose weights and states are bfloat16, without losing the updates that are smaller than their last bit.

Plain bfloat16 rounds an update away when it is below half the last bit of the weight (2^-9 of it). Two remedies:
stochastic rounding, right on average (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192), and Kahan
summation, which carries what was rounded off in a compensation of two bytes. The second moment moves by less than its
last bit in almost every step (beta2 0.999), so it is rounded stochastically in both.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from framework.build.optimizers.seeds import mixed
from framework.build.ranks import local_part, shard_number
from framework.schema.choices import Rounding

CHUNK = 1 << 24
"""Elements computed at once without a kernel: float32 temporaries stay below 0.5 GiB however large an embedding is."""

PARTS_APART = 1_000_003
"""Between the seeds of two parts of a sharded weight, which must not draw the same bits."""

Kernel = Callable[["Update"], None]
"""One update of one parameter in a single pass over its memory."""


class Update:
    """One parameter with its gradient and states, of each this rank's part, and the numbers of this step, among them a
    seed of its own."""

    def __init__(self, parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], seed: int) -> None:
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        tensors += [state["compensation"]] if "compensation" in state else []
        self.tensors: list[Tensor] = list(map(local_part, tensors))
        self.beta1, self.beta2 = group["betas"]
        self.rate, self.epsilon, self.decay = group["lr"], group["eps"], group["weight_decay"]
        self.correction1 = 1 - self.beta1 ** state["step"]
        self.correction2 = 1 - self.beta2 ** state["step"]
        self.seed = seed


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with bfloat16 states and compensated or stochastic rounding.

    Bytes a bfloat16 parameter: weight 2, gradient 2, moments 2 and 2; `kahan` adds 2. Float32 parameters keep float32
    weights, which need no rounding, and have bfloat16 states. `numbers` gives each parameter its place in the model:
    random bits are drawn from (`seed`, step, place), so that a resumed run draws the same. `kernel` updates a parameter
    in one pass; without it plain torch does, chunk by chunk, drawing from `generator`.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        rounding: Rounding,
        seed: int,
        numbers: Mapping[Tensor, int],
        generator: torch.Generator,
        kernel: Kernel | None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.rounding = rounding
        self._seed, self._numbers, self._generator, self._kernel = seed, numbers, generator, kernel

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            names = ["exp_avg", "exp_avg_sq"]
            if self.rounding is Rounding.KAHAN and parameter.dtype is torch.bfloat16:
                names.append("compensation")
            for name in names:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        part = shard_number(parameter)
        seed = self._seed + part * PARTS_APART
        update = Update(parameter, state, group, mixed(seed, state["step"], self._numbers[parameter]))
        if not update.tensors[0].numel():
            return  # fewer rows than ranks
        if self._kernel is not None and update.tensors[0].is_contiguous() and update.tensors[1].is_contiguous():
            self._kernel(update)
            return
        self._generator.manual_seed(update.seed)
        for pieces in _chunks(update.tensors):
            _update_piece(update, pieces, self._generator)


def _chunks(tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The tensors side by side, at most CHUNK elements of each at a time where their memory is contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(torch.split(tensor.view(-1), CHUNK) for tensor in tensors), strict=True)
    else:
        yield tuple(tensors)


def _update_piece(update: Update, pieces: tuple[Tensor, ...], generator: torch.Generator) -> None:
    weight, gradient, first, second, *compensation = pieces
    gradient32 = gradient.float()
    first32 = first.float().lerp_(gradient32, 1 - update.beta1)
    second32 = second.float().mul_(update.beta2).addcmul_(gradient32, gradient32, value=1 - update.beta2)
    del gradient32
    first.copy_(first32)
    moved = first32.mul_(-update.rate / update.correction1)
    moved.div_((second32 / update.correction2).sqrt_().add_(update.epsilon))
    second.copy_(round_stochastically(second32, generator))
    del second32
    weight32 = weight.float()
    moved.add_(weight32, alpha=-update.rate * update.decay)
    if compensation:
        moved.add_(compensation[0])
        weight.copy_(weight32 + moved)
        compensation[0].copy_(moved.sub_(weight.float().sub_(weight32)))
    elif weight.dtype is torch.bfloat16:
        weight.copy_(round_stochastically(moved.add_(weight32), generator))
    else:
        weight.add_(moved)


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 `value`, changed in place, as float32 numbers that bfloat16 holds exactly: up or down with the
    probability that makes the mean right. The 16 bits that bfloat16 lacks are added to at random, then cut off.
    """
    bits = value.view(torch.int32)
    bits.add_(torch.empty_like(bits).random_(0, 1 << 16, generator=generator)).bitwise_and_(-(1 << 16))
    return value
