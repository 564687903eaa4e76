"""How much of a model an adapter is on, read from the built model: by group, and what of it is unusual."""

from collections import Counter
from collections.abc import Iterator

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.adapter import still_zero
from framework.build.adapters.quantize import is_packed, quantized_kinds, unquantized, weight_count
from framework.build.assembly import Assembly
from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.schema.plural import counted

GROUPS = ("attention", "dense MLP", "experts", "head", "other")


def describe_adapter(assembly: Assembly) -> tuple[str, ...]:
    """What to tell before the first step: what the adapter covers."""
    on_modules = assembly.adapter is not None and not hasattr(assembly.model, "prompt_encoder")
    said = [coverage_line(assembly.model)] if on_modules else []
    if kinds := quantized_kinds(assembly.model):
        listed = ", ".join(f"{counted(count, 'linear layer')} in {kind}" for kind, count in kinds.items())
        plain = unquantized(causal_model(assembly.model))
        said.append(f"base: {listed}{_stored(assembly)}; not quantised, nor cast: {plain}")
    return tuple(said)


def _stored(assembly: Assembly) -> str:
    """What follows from the dtype of gathering, which nobody writes."""
    if assembly.sharding is None:
        return ""
    stored = {str(item.dtype).removeprefix("torch.") for item in assembly.model.parameters() if is_packed(item)}
    held = {str(item.dtype).removeprefix("torch.") for item in assembly.trained}
    dtype, pure = " and ".join(sorted(stored)), assembly.sharding.gathered_dtype is None
    key = "model.torch_dtype_str" if pure else "training.mixed_precision_dtype"
    adapter = " and ".join(sorted(held))
    return f", stored as {dtype} as {key} has units gathered; adapter held in {adapter}, gathered in {dtype}"


def describe_save_dtypes(assembly: Assembly) -> tuple[str, ...]:
    """What to tell when training is over: B matrices that have not moved."""
    idle = still_zero(assembly.model) if assembly.adapter is not None else []
    if not idle:
        return ()
    return (f"warning: {len(idle)} LoRA B matrices are still zero, so their adapters do nothing: first {idle[0]}",)


def coverage(model: nn.Module) -> dict[str, float]:
    """Group -> share of its weights that sit in adapted modules, for the groups that the model has."""
    total: Counter[str] = Counter()
    adapted: Counter[str] = Counter()
    for group, weights, has_adapter in _weights(model):
        total[group] += weights
        adapted[group] += weights if has_adapter else 0
    return {group: adapted[group] / total[group] for group in GROUPS if total[group]}


def coverage_line(model: nn.Module) -> str:
    """The shares in one line."""
    shares = (f"{group} {share:.0%}" for group, share in coverage(model).items())
    return f"adapter covers {', '.join(shares)} of the weights"


def _weights(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """(group, weights, whether adapted) of each matrix of the base model."""
    causal = causal_model(model)
    head = head_layers(causal)
    inside: list[str] = []  # names of the adapters' own modules
    trained_whole: set[int] = set()
    stacked: set[tuple[int, str]] = set()
    under: set[int] = set()
    for name, module in causal.named_modules():
        if isinstance(module, ParamWrapper):
            stacked.add((id(module.get_base_layer()), module.parameter_name))
        elif isinstance(module, BaseTunerLayer):
            under.add(id(module.get_base_layer()))
        elif isinstance(module, AuxiliaryTrainingWrapper):
            trained_whole |= {id(inner) for inner in module.original_module.modules()}
            inside.append(f"{name}.modules_to_save.")
        if isinstance(module, BaseTunerLayer):
            inside += [f"{name}.{part}." for part in (*module.adapter_layer_names, *module.other_param_names)]
    prefixes = tuple(inside)
    for name, module in causal.named_modules():
        if prefixes and name.startswith(prefixes):
            continue
        if isinstance(module, nn.Linear | Conv1D):
            group = "head" if module in head else _group(name)
            yield group, weight_count(module.weight), id(module) in under or id(module) in trained_whole
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield "experts", parameter.numel(), (id(module), parameter_name) in stacked


def _group(name: str) -> str:
    words = name.replace(".base_layer", "").lower().split(".")
    if any("attn" in word or "attention" in word for word in words):
        return "attention"
    if "experts" in words:
        return "experts"
    is_mlp = any("mlp" in word or "ffn" in word or "feed_forward" in word or "expert" in word for word in words)
    return "dense MLP" if is_mlp else "other"
