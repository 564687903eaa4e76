"""`training.fp8`: linear layers of the blocks that multiply in 8-bit floats; of trained weights through torchao.

Trained weights stay in their dtype and are cast for each product, so a checkpoint is as without. The frozen base of an
adapter is held in 8 bits (float8_base.py). The head is left out: its products are the ones that rounding hurts most,
and a chunked loss calls it separately.
"""

import importlib
import importlib.util
from typing import Any, cast

from torch import nn

from framework.build.levers.float8_base import hold_in_float8
from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.choices import Fp8
from framework.schema.training import TrainingParams

EDGE = 16
"""Both sides of a matrix must be multiples of it (cuBLAS). Rows of a batch need not be: torchao pads them."""


def require_torchao() -> None:
    """Raises RequestError when the package is not installed: a plan too runs its layers."""
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
    """Names of the linear layers below the head whose sides fit: all, or those of an adapter's frozen base."""
    head = head_layers(causal_model(model))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not (frozen and any(parameter.requires_grad for parameter in module.parameters()))
        and module not in head
        and not (module.in_features % EDGE or module.out_features % EDGE)
    ]
