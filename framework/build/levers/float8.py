"""`training.fp8`: linear layers of the blocks that multiply in 8-bit floats; of trained weights through torchao.

Trained weights stay in their dtype and are cast for each product, so a checkpoint is as without. The frozen base of an
adapter is stored in 8 bits. The head is left out: its products are the most sensitive to rounding, and a chunked loss
calls it separately.

A weight of the frozen base becomes e4m3 with a float32 scale for each row (`rowwise`) or one in all (`tensorwise`); so
does what it is multiplied by, at each product. Forward and the gradient of the input are such products; frozen weights
have none. The second needs the matrix with its other side first, and makes that copy of one matrix for the time of the
product: so the base is held at one byte a weight. Its rows' scales lie along the side that is summed over there, and
are multiplied into the gradient before that is rounded.
"""

import importlib
import importlib.util
from typing import Any, cast

import torch
from torch import Tensor, nn

from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.choices import Fp8
from framework.schema.training import TrainingParams

HELD = torch.float8_e4m3fn
LARGEST = float(torch.finfo(HELD).max)
TINIEST = 1e-12
"""Lower bound of a row's largest element, so that a row of zeros has a scale too."""
ROWS_AT_ONCE = 1024
"""Rows of a matrix that are converted together, so that the temporaries stay below 0.3 GiB."""


class Float8Base(nn.Linear):
    """A frozen linear layer whose weight, `[out, in]`, is stored in e4m3; `scales` is float32 `[out, 1]` or `[1,
    1]`."""

    scales: Tensor
    computed: torch.dtype
    """The dtype of its input and output: that of the weight before."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, in the dtype that the weight had."""
        rows = input.to(self.computed).reshape(-1, self.in_features)
        result: Tensor = _Product.apply(rows, self.weight, self.scales)  # type: ignore[no-untyped-call]
        result = result if self.bias is None else result + self.bias
        return result.view(*input.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scales)
        held, own = quantized(rows, is_rowwise=len(scales) > 1)
        return multiplied(held, weight.t(), own, scales.t(), rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, scales = ctx.saved_tensors
        is_rowwise = len(scales) > 1
        held, own = quantized(gradient * scales.t().to(gradient.dtype) if is_rowwise else gradient, is_rowwise)
        turned = weight.view(torch.uint8).t().contiguous().view(HELD).t()
        others = scales.new_ones(1, weight.shape[1]) if is_rowwise else scales
        return multiplied(held, turned, own, others, gradient.dtype), None, None


def quantized(values: Tensor, is_rowwise: bool) -> tuple[Tensor, Tensor]:
    """(e4m3, float32 scales) of `[rows, columns]`: scales `[rows, 1]`, or `[1, 1]` for all."""
    largest = values.abs().amax(1, keepdim=True) if is_rowwise else values.abs().amax().view(1, 1)
    scales = largest.float().clamp(min=TINIEST) / LARGEST
    return (values.float() / scales).clamp(-LARGEST, LARGEST).to(HELD), scales


def multiplied(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right` of e4m3 `[m, k]` and `[k, n]`, the second with its columns first in memory, times both scales.

    On the CPU the product is computed in float32, as in a card's accumulators.
    """
    if left.device.type == "cpu":
        return ((left.float() @ right.float()) * left_scales * right_scales).to(dtype)
    if left_scales.numel() == 1:
        left_scales, right_scales = left_scales.view(()), right_scales.view(())
    return torch._scaled_mm(
        left, right, scale_a=left_scales, scale_b=right_scales, out_dtype=dtype, use_fast_accum=True
    )


def hold_in_float8(layer: nn.Linear, kind: Fp8) -> None:
    """Turn a frozen layer into a Float8Base, replacing its weight."""
    weight, is_rowwise = layer.weight.data, kind is Fp8.ROWWISE
    largest = torch.linalg.vector_norm(weight, float("inf"), dim=1 if is_rowwise else None, dtype=torch.float32)
    scales = largest.view(-1, 1).clamp(min=TINIEST) / LARGEST
    held = torch.empty_like(weight, dtype=HELD)
    for begin in range(0, len(weight), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        own = scales[part] if is_rowwise else scales
        held[part] = (weight[part].float() / own).clamp(-LARGEST, LARGEST).to(HELD)
    layer.__class__ = Float8Base
    layer.weight = nn.Parameter(held, requires_grad=False)
    layer.register_buffer("scales", scales, persistent=False)
    layer.computed = weight.dtype  # type: ignore[assignment]


EDGE = 16
"""Both sides of a matrix must be multiples of it (cuBLAS). Rows of a batch need not: torchao pads them."""


def require_torchao() -> None:
    """Raise RequestError if the package is not installed; a plan needs its layers too."""
    if importlib.util.find_spec("torchao") is None:
        message = "fp8 products need the package torchao, which is not installed"
        raise RequestError([Problem("training.fp8", message, expected="pip install torchao, or training.fp8: none")])


def convert_products(training: TrainingParams, model: nn.Module) -> None:
    """Convert the layers that `linear_layers` lists. Raises RequestError if there are none."""
    if training.fp8 is Fp8.NONE:
        return
    chosen = set(linear_layers(model, frozen=training.use_peft))
    if not training.use_peft:
        require_torchao()
    if not chosen:
        message = f"{type(model).__name__} has no linear layer in its blocks whose sides are multiples of {EDGE}"
        raise RequestError([Problem("training.fp8", message, expected="none")])
    if training.use_peft:
        for name in chosen:
            hold_in_float8(cast(nn.Linear, model.get_submodule(name)), Fp8(training.fp8))
        return
    convert: Any = importlib.import_module("torchao.float8").convert_to_float8_training
    convert(model, config=float8_config(str(training.fp8)), module_filter_fn=lambda _, name: name in chosen)


def float8_config(recipe: str, emulate: bool = False) -> Any:
    """torchao's settings. `emulate` computes the same numbers in float32, on a machine that has no such products."""
    from dataclasses import replace

    settings: Any = importlib.import_module("torchao.float8").Float8LinearConfig
    return replace(settings.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)


def linear_layers(model: nn.Module, frozen: bool) -> list[str]:
    """Names of the linear layers below the head with suitable sizes: all, or those of an adapter's frozen base."""
    head = head_layers(causal_model(model))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not (frozen and any(parameter.requires_grad for parameter in module.parameters()))
        and module not in head
        and not (module.in_features % EDGE or module.out_features % EDGE)
    ]
