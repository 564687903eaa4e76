"""Readers of the adapter as peft attached it, and of its share of the model."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.adapter import adapter_dtype, adapter_kind, still_zero, ties_any
from framework.build.adapters.first_adapter import as_saved
from framework.build.adapters.quantize import is_quantized_weight, kind_name, quantized_kinds, unquantized, weight_count
from framework.build.adapters.targets import of_pattern
from framework.build.assembly import Assembly
from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.build.optimizers.build import RATE_FACTOR, rate_and_decay
from framework.build.ranks import local_part
from framework.build.verify.reading import Reading
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit
from framework.schema.plural import counted

SPREAD_CLOSE = 0.2
"""Maximum logarithm of the ratio of two standard deviations that count as equal: for 32 numbers, as in tiny matrices,
the uncertainty is an eighth."""


def _adapted(assembly: Assembly) -> list[tuple[str, Any]]:
    """(name, layer) of every adapted module; empty without an adapter."""
    if assembly.adapter is None:
        return []
    return [(name, module) for name, module in assembly.model.named_modules() if isinstance(module, BaseTunerLayer)]


def _lora(assembly: Assembly) -> list[LoraLayer]:
    return [layer for _, layer in _adapted(assembly) if isinstance(layer, LoraLayer)]


def read_adapter(assembly: Assembly) -> Iterator[Reading]:
    """The kind of the layers that peft attached, or of the tokens before the row, and their trained parameters."""
    if assembly.adapter is None:
        return
    asked = str(assembly.config.peft.peft_method)
    size = f"{counted(sum(parameter.numel() for parameter in assembly.trained), 'trained parameter')}"
    if hasattr(assembly.model, "prompt_encoder"):
        config: Any = assembly.adapter.model.active_peft_config
        kind = config.peft_type.value.lower().removesuffix("_tuning")
        yield Reading("peft.peft_method", asked, kind, f"{counted(config.num_virtual_tokens, 'trained token')}, {size}")
        return
    kinds = Counter(type(module).__name__ for _, module in _adapted(assembly))
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield Reading("peft.peft_method", asked, adapter_kind(assembly.adapter), f"{listed}; {size}")


def read_first_adapter(assembly: Assembly) -> Iterator[Reading]:
    """Whether the adapter starts from the weights of `peft.adapter_path`."""
    written = assembly.config.peft.adapter_path
    if assembly.adapter is None or written is None:
        return
    equal, count = as_saved(written, assembly.adapter.model)
    yield Reading("peft.adapter_path", f"{count} tensors as saved", f"{equal} tensors as saved", written)


def read_adapter_rank(assembly: Assembly) -> Iterator[Reading]:
    """The rank of the matrices themselves, and the factor of their products. Stacked experts have one pair of matrices
    per expert."""
    peft, layers = assembly.config.peft, _lora(assembly)
    if assembly.adapter is None or not layers:
        return
    targets = assembly.adapter.targets.layers
    asked = Counter(int(of_pattern(peft.rank_pattern.thaw(), name, peft.lora_r)) for name in targets)
    ranks = Counter(
        matrix.weight.shape[0] // getattr(layer, "num_experts", 1)
        for layer in layers
        for matrix in layer.lora_A.values()
    )
    yield Reading("peft.lora_r", _counts(asked), _counts(ranks), "rows of lora_A")
    if peft.alpha_pattern:
        alphas = Counter(float(of_pattern(peft.alpha_pattern.thaw(), name, peft.lora_alpha)) for name in targets)
        found = Counter(float(value) for layer in layers for value in layer.lora_alpha.values())
        yield Reading("peft.alpha_pattern", _counts(alphas), _counts(found), "lora_alpha of each layer")


def read_adapter_targets(assembly: Assembly) -> Iterator[Reading]:
    """Whether every target has its adapter, and the share of the weights."""
    if assembly.adapter is None or hasattr(assembly.model, "prompt_encoder"):
        return
    targets = assembly.adapter.targets
    layers = dict(_adapted(assembly))
    stacked = sum(isinstance(layer, ParamWrapper) for layer in layers.values())
    plain = {name.removeprefix("base_model.model.") for name in layers}
    asked = f"{counted(len(targets.modules), 'module')}, {counted(len(targets.parameters), 'stacked weight')}"
    found = f"{counted(sum(name in plain for name in targets.modules), 'module')}, {counted(stacked, 'stacked weight')}"
    yield Reading("peft.lora_target_modules", asked, found, coverage_line(assembly.model))


def read_adapter_dtype(assembly: Assembly) -> Iterator[Reading]:
    """The dtype of the adapter's trained weights, and the dtype that they are gathered in if it differs."""
    if assembly.adapter is None:
        return
    asked = adapter_dtype(assembly.config.peft, causal_model(assembly.model))
    counted = Counter(
        parameter.dtype
        for name, parameter in assembly.model.named_parameters()
        if parameter.requires_grad and ".modules_to_save." not in name
    )
    found = ", ".join(_name_of(dtype) for dtype, _ in counted.most_common())
    gathered = assembly.sharding.gathered_dtype if assembly.sharding is not None else None
    source = "trained parameters" + (f", gathered in {_name_of(gathered)}" if gathered is not None else "")
    yield Reading("peft.adapter_dtype", _name_of(asked), found, source)


def read_faster_matrices(assembly: Assembly) -> Iterator[Reading]:
    """LoRA+: the rate factor of the groups of B matrices, and only of these."""
    asked = assembly.config.peft.lora_plus_lr_ratio
    if assembly.adapter is None or asked is None or not _lora(assembly):
        return
    training, named = assembly.config.training, assembly.model.named_parameters()
    matrices = {id(item): rate_and_decay(training, name)[0] for name, item in named if "lora_B" in name}
    factors = {
        group.get(RATE_FACTOR, 1.0) / matrices[id(parameter)]
        for group in assembly.optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in matrices
    }
    found = ", ".join(f"{factor:g}" for factor in sorted(factors))
    yield Reading("peft.lora_plus_lr_ratio", f"{asked:g}", found, f"groups of {len(matrices)} B matrices")


def read_adapter_start(assembly: Assembly) -> Iterator[Reading]:
    """The initialization of LoRA's A matrices, by their standard deviation; EVA's are computed once rows exist."""
    peft, layers = assembly.config.peft, [layer for layer in _lora(assembly) if "default" in layer.lora_A]
    matrices = [local_part(layer.lora_A["default"].weight.detach()).float() for layer in layers]
    is_drawn = peft.lora_init is not LoraInit.EVA and peft.adapter_path is None
    if "lora_init" not in ADAPTERS[peft.peft_method].keys or not is_drawn or not matrices:
        return
    spreads = {
        LoraInit.GAUSSIAN: [1 / layer.r["default"] for layer in layers],
        LoraInit.KAIMING: [(3 * matrix.shape[1]) ** -0.5 for matrix in matrices],
    }
    found = torch.stack([matrix.square().mean().sqrt() for matrix in matrices])
    distances = {choice: (found.cpu() / torch.tensor(spread)).log().mean().abs() for choice, spread in spreads.items()}
    nearest = min(spreads, key=lambda choice: (float(distances[choice]), choice is not peft.lora_init))
    is_alike = distances[LoraInit(peft.lora_init)] < SPREAD_CLOSE
    shown = peft.lora_init if is_alike else nearest
    yield Reading(
        "peft.lora_init",
        str(peft.lora_init),
        str(shown),
        f"spread of {counted(len(matrices), 'A matrix', 'A matrices')}",
    )


def read_frozen_factors(assembly: Assembly) -> Iterator[Reading]:
    """LoRA-FA: the number of frozen A matrices."""
    named = [item for name, item in assembly.model.named_parameters() if ".lora_A." in name]
    frozen = sum(not item.requires_grad for item in named)
    if named and (assembly.config.peft.lora_freeze_a or frozen):
        asked = len(named) if assembly.config.peft.lora_freeze_a else 0
        yield Reading("peft.lora_freeze_a", f"{asked} of {len(named)}", f"{frozen} of {len(named)}", "A matrices")


def read_rotated_blocks(assembly: Assembly) -> Iterator[Reading]:
    """OFT: the block size in every adapted module."""
    sizes = Counter(size for _, layer in _adapted(assembly) for size in getattr(layer, "oft_block_size", {}).values())
    if sizes:
        asked = Counter({assembly.config.peft.oft_block_size: sizes.total()})
        yield Reading("peft.oft_block_size", _counts(asked), _counts(sizes), counted(sizes.total(), "adapted module"))


def read_quantized(assembly: Assembly) -> Iterator[Reading]:
    """The quantization of the base, the modules without it, and the storage dtype of sharded bytes."""
    peft = assembly.config.peft
    kinds = quantized_kinds(assembly.model)
    if assembly.adapter is None or not (peft.q_lora or kinds):
        return
    wanted = kind_name(peft.q_lora_bits, str(peft.bnb_4bit_quant_type), peft.use_bnb_nested_quant)
    found = ", ".join(kinds) or "not quantized"
    source = f"{counted(kinds.total(), 'linear layer')}; not quantized: {unquantized(causal_model(assembly.model))}"
    yield Reading("peft.q_lora", wanted if peft.q_lora else "not quantized", found, source)
    if assembly.sharding is not None:
        quantized = [parameter for parameter in assembly.model.parameters() if is_quantized_weight(parameter)]
        gathered = assembly.sharding.gathered_dtype or causal_model(assembly.model).dtype
        found = ", ".join(sorted({_name_of(parameter.dtype) for parameter in quantized}))
        size = sum(local_part(parameter).nbytes for parameter in quantized)
        source = counted(len(quantized), "quantized weight with its scales", "quantized weights with their scales")
        source += f", {size:,} bytes of this rank"
        yield Reading("quantized weights stored as", _name_of(gathered), found, source)


def read_adapter_dropout(assembly: Assembly) -> Iterator[Reading]:
    """The probability of each layer's dropout; peft uses an identity for 0."""
    rates = {
        float(getattr(dropout, "p", 0.0))
        for _, layer in _adapted(assembly)
        for dropout in getattr(layer, "lora_dropout", getattr(layer, "vera_dropout", {})).values()
    }
    if rates:
        found = ", ".join(f"{rate:g}" for rate in sorted(rates))
        yield Reading("peft.lora_dropout", f"{assembly.config.peft.lora_dropout:g}", found, "lora_dropout modules")


def read_adapter_saved_modules(assembly: Assembly) -> Iterator[Reading]:
    """Modules trained in full next to the adapter."""
    asked = assembly.config.peft.lora_modules_to_save
    if not assembly.config.training.use_peft or not asked:
        return
    wrapped = [name for name, module in assembly.model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    found = [name for name in asked if any(item == name or item.endswith(f".{name}") for item in wrapped)]
    tied = assembly.adapter is not None and ties_any(causal_model(assembly.model), list(asked))
    source = f"{counted(len(wrapped), 'wrapped module')}" + (", head and embedding as one" if tied else "")
    yield Reading("peft.lora_modules_to_save", ", ".join(asked), ", ".join(found), source)


def _counts(numbers: Counter[Any]) -> str:
    """One number, or each with its count."""
    if len(numbers) == 1:
        return f"{next(iter(numbers)):g}"
    return ", ".join(f"{number:g} ({count})" for number, count in sorted(numbers.items()))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


GROUPS = ("attention", "dense MLP", "experts", "head", "other")


def describe_adapter(assembly: Assembly) -> tuple[str, ...]:
    """Notes before the first step: the adapter's coverage."""
    on_modules = assembly.adapter is not None and not hasattr(assembly.model, "prompt_encoder")
    lines = [coverage_line(assembly.model)] if on_modules else []
    if kinds := quantized_kinds(assembly.model):
        listed = ", ".join(f"{counted(count, 'linear layer')} in {kind}" for kind, count in kinds.items())
        plain = unquantized(causal_model(assembly.model))
        lines.append(f"base: {listed}{_stored(assembly)}; not quantized, nor cast: {plain}")
    return tuple(lines)


def _stored(assembly: Assembly) -> str:
    """Effects of the gathering dtype, which no key sets directly."""
    if assembly.sharding is None:
        return ""
    stored = {
        str(item.dtype).removeprefix("torch.") for item in assembly.model.parameters() if is_quantized_weight(item)
    }
    held = {str(item.dtype).removeprefix("torch.") for item in assembly.trained}
    dtype, pure = " and ".join(sorted(stored)), assembly.sharding.gathered_dtype is None
    key = "model.torch_dtype_str" if pure else "training.mixed_precision_dtype"
    adapter = " and ".join(sorted(held))
    return f", stored as {dtype} as {key} has units gathered; adapter held in {adapter}, gathered in {dtype}"


def describe_save_dtypes(assembly: Assembly) -> tuple[str, ...]:
    """Notes after training: unchanged B matrices."""
    idle = still_zero(assembly.model) if assembly.adapter is not None else []
    if not idle:
        return ()
    return (f"warning: {len(idle)} LoRA B matrices are still zero, so their adapters do nothing: first {idle[0]}",)


def coverage(model: nn.Module) -> dict[str, float]:
    """Group -> share of its weights that are in adapted modules, for the model's groups."""
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
    inside: list[str] = []  # module names of the adapters
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
