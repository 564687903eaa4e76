"""What was asked for, read back from the objects that were built. One reader a line; a mismatch stops the run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers.optimization import Adafactor

from framework.build.activations import checkpointed_blocks
from framework.build.assembly import Assembly
from framework.build.loss import causal_model, head_is_last
from framework.build.model import TORCH_DTYPES
from framework.errors import VerificationFailed
from framework.schema.choices import Optimizer, TorchDtype

_OPTIMIZER_CLASSES = {
    Optimizer.ADAMW_TORCH: torch.optim.AdamW,
    Optimizer.ADAMW_TORCH_FUSED: torch.optim.AdamW,
    Optimizer.SGD: torch.optim.SGD,
    Optimizer.ADAFACTOR: Adafactor,
}


@dataclass(frozen=True)
class Reading:
    """One option: what was asked, what is in effect, and which object said so."""

    key: str
    asked: str
    found: str
    source: str

    @property
    def holds(self) -> bool:
        return self.asked == self.found


def verify(assembly: Assembly) -> tuple[Reading, ...]:
    """Every requested option with what is in effect. Raises VerificationFailed listing all that differ."""
    readings = tuple(_readings(assembly))
    broken = [reading for reading in readings if not reading.holds]
    if broken:
        lines = [f"{item.key}: asked {item.asked}, in effect {item.found} ({item.source})" for item in broken]
        raise VerificationFailed("requested but not in effect:\n" + "\n".join(lines))
    return readings


def _readings(assembly: Assembly) -> Iterator[Reading]:
    config, model = assembly.config, assembly.model
    yield _optimizer(assembly)
    yield _dtype(assembly)
    attention = causal_model(model).config._attn_implementation
    wanted_attention = str(config.model.attn_implementation or attention)
    yield Reading("model.attn_implementation", wanted_attention, attention, "model.config")
    done, blocks = checkpointed_blocks(model)
    wanted = blocks if config.training.enable_gradient_checkpointing else 0
    note = "blocks in train mode"
    if config.training.enable_gradient_checkpointing and not blocks:
        note = "this model class has no blocks that can be checkpointed"
        wanted = -1
    asked = f"{wanted}/{blocks}" if wanted >= 0 else "every block"
    yield Reading("training.enable_gradient_checkpointing", asked, f"{done}/{blocks}", note)
    yield _gradients(assembly)
    if config.training.use_peft:
        yield _adapter(assembly)
    if config.model.chunked_loss is not False and not assembly.place.rehearsed:
        yield _chunked(assembly)


def _optimizer(assembly: Assembly) -> Reading:
    asked = assembly.config.training.optimizer
    defaults = assembly.optimizer.defaults
    found = str(asked)
    if type(assembly.optimizer) is not _OPTIMIZER_CLASSES[Optimizer(asked)]:
        found = type(assembly.optimizer).__name__
    elif bool(defaults.get("fused")) != (asked is Optimizer.ADAMW_TORCH_FUSED):
        found = "adamw_torch_fused" if defaults.get("fused") else "adamw_torch"
    held = {id(parameter) for group in assembly.optimizer.param_groups for parameter in group["params"]}
    missing = sum(id(parameter) not in held for parameter in assembly.trained)
    if missing:
        found = f"{found} without {missing} of the trained tensors"
    return Reading("training.optimizer", str(asked), found, f"{type(assembly.optimizer).__name__} groups")


def _dtype(assembly: Assembly) -> Reading:
    """The dtype of the model's own weights, adapters aside."""
    asked = assembly.config.model.torch_dtype_str or TorchDtype.AUTO
    own = [
        parameter
        for name, parameter in assembly.model.named_parameters()
        if "lora_" not in name and "modules_to_save" not in name and parameter.is_floating_point()
    ]
    counted = Counter(parameter.dtype for parameter in own)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in counted}
    found = ", ".join(names[dtype] for dtype, _ in counted.most_common())
    wanted = TORCH_DTYPES.get(TorchDtype(asked))
    if wanted is not None and set(counted) != {wanted} and _keeps_some_in_float32(assembly.model, counted, wanted):
        found = str(asked)
    return Reading("model.torch_dtype_str", found if wanted is None else str(asked), found, "model.parameters()")


def _keeps_some_in_float32(model: nn.Module, counted: Counter[torch.dtype], wanted: torch.dtype) -> bool:
    """Whether the only other dtype is float32 in modules that transformers itself keeps there."""
    kept = getattr(causal_model(model), "_keep_in_fp32_modules", None)
    kept_strict = getattr(causal_model(model), "_keep_in_fp32_modules_strict", None)
    return bool(kept or kept_strict) and set(counted) == {wanted, torch.float32}


def _gradients(assembly: Assembly) -> Reading:
    frozen = sum(item.parameters for item in assembly.frozen)
    total = sum(parameter.numel() for parameter in assembly.model.parameters())
    trained = sum(parameter.numel() for parameter in assembly.trained)
    asked = "some weights" if assembly.config.training.use_peft or frozen else f"all {total:,} weights"
    found = asked if 0 < trained < total or (trained == total and not frozen) else f"{trained:,} weights"
    return Reading("trained weights", asked, found, f"requires_grad: {trained:,} of {total:,}")


def _adapter(assembly: Assembly) -> Reading:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = sum(isinstance(module, BaseTunerLayer) for module in assembly.model.modules())
    asked = str(assembly.config.peft.peft_method)
    return Reading("training.use_peft", asked, asked if layers else "no adapter", f"{layers} adapted modules")


def _chunked(assembly: Assembly) -> Reading:
    """A few tokens through the model tell whether its head can be computed apart from it."""
    model = assembly.model
    ids = torch.arange(4, device=assembly.place.device).unsqueeze(0)
    model.eval()
    with assembly.autocast:
        apart = head_is_last(model, {"input_ids": ids})
    model.train()
    asked = str(assembly.config.model.chunked_loss)
    found = asked if apart else "no: this model changes its logits after the head"
    return Reading("model.chunked_loss", asked, found, "logits with the head's output replaced")


def missing_gradients(assembly: Assembly) -> list[str]:
    """Names of trained tensors that a backward pass left without a gradient. Call between backward and zero_grad."""
    return [
        name
        for name, parameter in assembly.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
