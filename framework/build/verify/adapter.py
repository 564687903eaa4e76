"""The adapter as peft attached it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from framework.build.adapter import ALL_LINEAR
from framework.build.assembly import Assembly
from framework.build.verify.reading import Reading


def _adapted(assembly: Assembly) -> list[tuple[str, Any]]:
    """(name, layer) of every adapted module; empty without an adapter."""
    if not assembly.config.training.use_peft:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in assembly.model.named_modules() if isinstance(module, BaseTunerLayer)]


def read_adapter(assembly: Assembly) -> Iterator[Reading]:
    """Modules that peft adapted."""
    if assembly.config.training.use_peft:
        layers = _adapted(assembly)
        asked = str(assembly.config.peft.peft_method)
        yield Reading("training.use_peft", asked, asked if layers else "no adapter", f"{len(layers)} adapted modules")


def read_adapter_rank(assembly: Assembly) -> Iterator[Reading]:
    """The rank of the matrices themselves."""
    ranks = Counter(matrix.weight.shape[0] for _, layer in _adapted(assembly) for matrix in layer.lora_A.values())
    if ranks:
        found = ", ".join(str(rank) for rank, _ in ranks.most_common())
        yield Reading("peft.lora_r", str(assembly.config.peft.lora_r), found, "rows of lora_A")


def read_adapter_targets(assembly: Assembly) -> Iterator[Reading]:
    """Which modules are adapted, by the last part of their names; each written target has some."""
    names = [name for name, _ in _adapted(assembly)]
    if not names:
        return
    counted = Counter(name.rsplit(".", 1)[-1] for name in names)
    source = ", ".join(f"{name} x {count}" for name, count in counted.most_common())
    written = assembly.config.peft.lora_target_modules
    if written is None or written == (ALL_LINEAR,):
        yield Reading("peft.lora_target_modules", None, ", ".join(counted), source)
        return
    present = [target for target in written if any(name == target or name.endswith(f".{target}") for name in names)]
    yield Reading("peft.lora_target_modules", ", ".join(written), ", ".join(present), source)


def read_adapter_dropout(assembly: Assembly) -> Iterator[Reading]:
    """The probability of each layer's dropout; peft puts an identity where it is 0."""
    rates = {
        float(getattr(dropout, "p", 0.0)) for _, layer in _adapted(assembly) for dropout in layer.lora_dropout.values()
    }
    if rates:
        found = ", ".join(f"{rate:g}" for rate in sorted(rates))
        yield Reading("peft.lora_dropout", f"{assembly.config.peft.lora_dropout:g}", found, "lora_dropout modules")


def read_adapter_saved_modules(assembly: Assembly) -> Iterator[Reading]:
    """Modules trained in full beside the adapter."""
    asked = assembly.config.peft.lora_modules_to_save
    if not assembly.config.training.use_peft or not asked:
        return
    from peft.utils import ModulesToSaveWrapper

    wrapped = [name for name, module in assembly.model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    found = [name for name in asked if any(item == name or item.endswith(f".{name}") for item in wrapped)]
    yield Reading("peft.lora_modules_to_save", ", ".join(asked), ", ".join(found), f"{len(wrapped)} wrapped modules")
