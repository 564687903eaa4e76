"""Faster computation of LoRA layers: products in the base's dtype, shared by layers with the same input; DoRA's norms.

peft casts the input of a layer up to the adapter's dtype. Without autocast its products are then float32 ones, on an
8B with rank 16 a sixth of the step; with autocast every input is cast up and down again. Here a factor is cast down to
its input instead, inside the graph, so that its gradient and the weight that the optimizer changes stay float32.

The first factors of queries, keys and values (of gate and up) are multiplied with their input together: three of rank
16 over 8,192 x 4,096 take 0.10 ms together and 0.26 ms separately (one H200), and backward adds one gradient to the
input's instead of three. Parameters, files and merges stay as they are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from framework.build.adapters.quantize import Packing

SAME_INPUT = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of layers in transformers' models that have the same input within a module."""


class InInputDtype(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input, whatever its weight's.

    `together`: the layers with the same input, of which this is number `place`.
    """

    together: "Together | None" = None
    place = 0

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        if self.together is not None:
            return self.together.product(self.place, input)
        product: Tensor = nn.functional.linear(input, self.weight.to(input.dtype))
        return product


class Together:
    """Layers with the same input: the first call computes the product with all of them, and the others use their part.

    A layer that is called with another tensor, or a second time, computes a new product.
    """

    def __init__(self, layers: Sequence[InInputDtype]) -> None:
        self.layers = list(layers)
        self.input: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}
        for place, layer in enumerate(layers):
            layer.together, layer.place = self, place

    def product(self, place: int, input: Tensor) -> Tensor:
        """The product of layer `place`: a view of the shared product."""
        if input is not self.input or place not in self.waiting:
            weight = torch.cat([layer.weight for layer in self.layers]).to(input.dtype)
            together = nn.functional.linear(input, weight)
            parts = torch.split(together, [layer.out_features for layer in self.layers], -1)
            self.input, self.waiting = input, dict(enumerate(parts))
        product = self.waiting.pop(place)
        if not self.waiting:
            self.input = None
        return product


class DoraByRows(DoraLinearLayer):  # type: ignore[misc]
    """DoRA (arXiv 2402.09353) with norms computed without the adapted matrix.

    peft multiplies an identity of the input's width by the factors, and adds the product to a copy of the weight, in
    every forward pass. The squared norm of a row of W + s B A is that of W, plus 2 s times the sum of (W A^T) B over
    the rank, plus s^2 times b G b^T with the r x r matrix G = A A^T: the weight is read twice, and nothing as large is
    made. As in the paper the norm is a constant in backward.
    """

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: nn.Module,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """DoRA's addition to the base layer's result: `[..., in]` to `[..., out]`. `base_result` is that result if
        there was no dropout of `x`."""
        bias: Tensor | None = getattr(base_layer, "bias", None)
        base = base_layer(x) if base_result is None else base_result
        base = base if bias is None else base - bias
        with torch.no_grad():
            weight = base_weight(base_layer)
            weight = weight.T if self.fan_in_fan_out else weight
            norms = row_norms(weight, lora_A.weight, lora_B.weight, scaling)
        share = self.weight / norms
        added: Tensor = (share - 1).to(base.dtype) * base + (share * scaling).to(base.dtype) * lora_B(lora_A(x))
        return added


def base_weight(layer: Any) -> Tensor:
    """The dequantized weight of an adapted layer. peft asks for the class of a 4-bit weight, which splits a compiled
    block's graph in two."""
    state = getattr(layer.weight, "quant_state", None)
    if state is None or isinstance(state, Packing):
        return dequantize_module_weight(layer)  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight, state)  # type: ignore[no-any-return]


def row_norms(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Norms of the rows of `weight + scaling * up @ down`: `[out, in]`, `[rank, in]`, `[out, rank]` to float32 `[out]`,
    without that matrix."""
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    crossed = nn.functional.linear(weight, down.to(weight.dtype)).float()
    down, up = down.float(), up.float()
    own = nn.functional.linear(up, down @ down.T).float()
    added = ((2 * scaling) * crossed + scaling**2 * own) * up
    norms: Tensor = (squares + added.sum(1)).clamp(min=0).sqrt()
    return norms


def compute_in_input_dtype(model: PeftModel) -> None:
    """Replace the factors of LoRA's layers by these, with shared products for layers with the same input."""
    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        factors = [*layer.lora_A.values(), *layer.lora_B.values()]
        if factors and all(type(factor) is nn.Linear and factor.bias is None for factor in factors):
            layer.cast_input_dtype_enabled = False
            for factor in factors:
                factor.__class__ = InInputDtype
    for parent in model.modules():
        for names in SAME_INPUT:
            layers = [factor for name in names for factor in _first_factors(parent._modules.get(name))]
            if len(layers) > 1 and len({layer.in_features for layer in layers}) == 1:
                Together(layers)


def _first_factors(layer: object) -> Iterator[InInputDtype]:
    """The factor on the layer's input, unless dropout makes the input differ between layers."""
    if isinstance(layer, LoraLayer) and all(isinstance(drop, nn.Identity) for drop in layer.lora_dropout.values()):
        yield from (factor for factor in layer.lora_A.values() if isinstance(factor, InInputDtype))


def norm_by_rows(model: PeftModel) -> None:
    """Make DoRA's linear layers compute their norms without the adapted matrix."""
    for module in model.modules():
        if type(module) is DoraLinearLayer:
            module.__class__ = DoraByRows
