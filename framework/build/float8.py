"""`training.fp8`: linear layers of the blocks that multiply in 8-bit floats, through torchao.

Weights stay in their dtype and are cast for each product, so a checkpoint is as without. The head is left out: its
products are the ones that rounding hurts most, and a chunked loss calls it apart.
"""

import importlib
import importlib.util
from typing import Any

from torch import nn

from framework.build.heads import head_layers
from framework.build.model_parts import causal_model
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
    """Put torchao's layers in the place of those that `linear_layers` lists. Raises RequestError if there are none."""
    if training.fp8 is Fp8.NONE:
        return
    require_torchao()
    chosen = set(linear_layers(model))
    if not chosen:
        message = f"{type(model).__name__} has no linear layer in its blocks whose sides are multiples of {EDGE}"
        raise RequestError([Problem("training.fp8", message, expected="none")])
    convert: Any = importlib.import_module("torchao.float8").convert_to_float8_training
    convert(model, config=float8_config(str(training.fp8)), module_filter_fn=lambda _, name: name in chosen)


def float8_config(recipe: str, emulate: bool = False) -> Any:
    """torchao's settings. `emulate` computes the same numbers in float32, on a machine that has no such products."""
    from dataclasses import replace

    settings: Any = importlib.import_module("torchao.float8").Float8LinearConfig
    return replace(settings.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers below the head that torchao can take."""
    head = head_layers(causal_model(model))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module not in head
        and not (module.in_features % EDGE or module.out_features % EDGE)
    ]
