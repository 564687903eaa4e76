"""The global gradient norm, and clipping to it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from framework.build.optimizers.any_precision import AnyPrecisionAdamW
from framework.build.optimizers.parameter_wise import ParameterWise
from framework.build.ranks import whole

NEVER_ZERO = 1e-6
"""Added to the norm before the limit is divided by it, as torch.nn.utils.clip_grads_with_norm_ does."""


def gradient_norms(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """The 2-norm of all gradients, a float32 scalar on their device, and of each in the order of `parameters` (none if
    gradients are sharded).

    Each gradient is read once. Squares are summed in float32: torch's own norm of bfloat16 gradients is rounded to 8
    bits, twice. With sharded gradients every rank must call this.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(hasattr(gradient, "full_tensor") for gradient in gradients):
        return whole(torch.nn.utils.get_total_norm(gradients)), []
    norms: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [place for place, gradient in enumerate(gradients) if gradient.dtype is dtype]
        found = torch._foreach_norm([gradients[place] for place in same], 2, dtype=torch.float32)
        norms.update(zip(same, found, strict=True))
    each = [norms[place] for place in range(len(gradients))]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return norm, each


def clip_gradients(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], limit: float, norm: Tensor
) -> None:
    """Scale gradients with this norm down to `limit` for the next update, if they exceed it.

    An optimizer that applies a scale when it reads gradients is given the scale; for others the gradients are
    multiplied in a separate pass.
    """
    parts = list(optimizer.parts.values()) if isinstance(optimizer, ParameterWise) else [optimizer]
    if not all(isinstance(part, AnyPrecisionAdamW) for part in parts):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return
    scale = ((norm + NEVER_ZERO) / limit).clamp(min=1)
    for part in parts:
        assert isinstance(part, AnyPrecisionAdamW)
        part.grad_scale = scale
