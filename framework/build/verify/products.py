"""Which linear layers multiply in 8-bit floats."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from framework.build.assembly import Assembly
from framework.build.levers.float8 import linear_layers
from framework.build.levers.float8_base import HELD, Float8Base
from framework.build.verify.reading import Reading
from framework.schema.choices import Fp8
from framework.schema.plural import counted


def read_float8_products(assembly: Assembly) -> Iterator[Reading]:
    """The layers that multiply so, with how many scales an operand has; asked of all that could."""
    asked = assembly.config.training.fp8
    linear: list[Any] = [module for module in assembly.model.modules() if isinstance(module, nn.Linear)]
    converted = [module for module in linear if type(module).__name__ == "Float8Linear"]
    found = Counter(str(module.config.cast_config_input.scaling_granularity.value) for module in converted)
    held = [module for module in linear if isinstance(module, Float8Base) and module.weight.dtype is HELD]
    found.update(str(Fp8.ROWWISE if len(module.scales) > 1 else Fp8.TENSORWISE) for module in held)
    words = [f"{kind.replace('axiswise', 'rowwise')} in {counted(count, 'layer')}" for kind, count in found.items()]
    could = len(linear_layers(assembly.model, frozen=assembly.config.training.use_peft))
    wanted = "none" if asked is Fp8.NONE else f"{asked} in {counted(could, 'layer')}"
    source = f"class of {counted(len(linear), 'linear layer')}"
    source += f"; {sum(module.weight.nbytes for module in held) / 2**30:.2f} GiB held in {HELD}" if held else ""
    yield Reading("training.fp8", wanted, ", ".join(words) or "none", source)
