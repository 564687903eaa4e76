"""Readers of stored weights and positions: counts, dtypes, frozen modules, rows of added tokens, rotary positions."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from framework.build.adapters.quantize import is_quantized_weight
from framework.build.assembly import Assembly
from framework.build.levers.float8 import HELD, Float8Base, linear_layers
from framework.build.loading.config_values import FULL, rope_of
from framework.build.loading.model import embedding_rows
from framework.build.loading.vocabulary import changes_rows, new_rows, token_matrices
from framework.build.model.freeze import still_frozen
from framework.build.model.heads import answers, answers_for_rows, head_modules
from framework.build.model.parts import causal_model, is_of_adapter
from framework.build.place import AUTOCAST_DTYPES, TORCH_DTYPES
from framework.build.text.tokenizer import vocabulary_of
from framework.build.verify.reading import Reading
from framework.memory.resolve import describe_float16
from framework.schema.choices import Fp8, MixedPrecision, TorchDtype
from framework.schema.plural import counted


def read_parameters(assembly: Assembly) -> Iterator[Reading]:
    """Number of trained and frozen parameters by dtype, and whether they match the adapter or patterns."""
    parameters = [(item, assembly.numel(name, item)) for name, item in assembly.model.named_parameters()]
    total, trained = (sum(count for item, count in parameters if item.requires_grad or all_) for all_ in (True, False))
    frozen = sum(item.parameters for item in assembly.frozen)
    asked = "some" if assembly.config.training.use_peft or frozen else f"all {total:,}"
    is_part = 0 < trained < total
    found = asked if is_part or (trained == total and not frozen) else f"{trained:,}"
    kinds = {"trained": Counter[str](), "frozen": Counter[str]()}
    for parameter, count in parameters:
        is_stored_as = is_quantized_weight(parameter) and parameter.is_floating_point()
        kind = _name(parameter.dtype) + (" of quantized bytes" if is_stored_as else "")
        kinds["trained" if parameter.requires_grad else "frozen"][kind] += count
    by_dtype = (f"{count:,} {kind} {word}" for word, each in kinds.items() for kind, count in each.most_common())
    yield Reading("trained parameters", asked, found, f"requires_grad of {total:,}: {', '.join(by_dtype)}")


def read_weight_dtypes(assembly: Assembly) -> Iterator[Reading]:
    """The dtypes of the model's weights, except adapters and quantized ones."""
    asked = assembly.config.model.torch_dtype_str or TorchDtype.AUTO
    own = [
        parameter
        for name, parameter in assembly.model.named_parameters()
        if parameter.is_floating_point()
        and not (assembly.adapter and is_of_adapter(name, parameter))
        and not is_quantized_weight(parameter)  # their dtype is that of bytes
        and parameter.dtype is not HELD  # read back by `read_float8_products`
    ]
    counted = Counter(parameter.dtype for parameter in own)
    found = ", ".join(_name(dtype) for dtype, _ in counted.most_common())
    wanted = TORCH_DTYPES.get(TorchDtype(asked))
    if wanted is not None and set(counted) != {wanted} and _keeps_some_in_float32(assembly.model, counted, wanted):
        found = str(asked)
    key = "model.torch_dtype_str"
    yield Reading(key, None if wanted is None else str(asked), found, "model.parameters()")


def _keeps_some_in_float32(model: nn.Module, counted: Counter[torch.dtype], wanted: torch.dtype) -> bool:
    """Whether the only other dtype is float32, in modules that transformers itself keeps in it."""
    kept = getattr(causal_model(model), "_keep_in_fp32_modules", None)
    kept_strict = getattr(causal_model(model), "_keep_in_fp32_modules_strict", None)
    return bool(kept or kept_strict) and set(counted) == {wanted, torch.float32}


def read_autocast(assembly: Assembly) -> Iterator[Reading]:
    """The dtype of a matrix product in the context of forward, its master weights and its loss scaler."""
    key = "training.mixed_precision_dtype"
    asked = MixedPrecision(assembly.config.training.mixed_precision_dtype or "none")
    names = {dtype: str(choice) for choice, dtype in AUTOCAST_DTYPES.items()}
    kind, sharding = assembly.place.kind, assembly.sharding
    settings = causal_model(assembly.model).config.get_text_config().to_dict()
    float16 = "".join(f"; {line}" for line in describe_float16(assembly.config, settings))
    if sharding is not None:
        gathered = sharding.gathered_dtype
        found = names.get(gathered, "?") if gathered is not None else "none"
        yield Reading(key, str(asked), found, f"what fully_shard gathers weights in{float16}")
        return
    with assembly.autocast:
        found = names.get(torch.get_autocast_dtype(kind), "?") if torch.is_autocast_enabled(kind) else "none"
    source, scale = f"torch.autocast on {kind}", assembly.loss_scale
    if found != "none" and {parameter.dtype for parameter in assembly.trained} == {torch.float32}:
        source += ", float32 masters"
    if scale.enabled != (found == MixedPrecision.FP16):
        found += " with a loss scaler" if scale.enabled else " without a loss scaler"
    elif scale.enabled:
        source += f", loss scale {scale.scaler.get_scale():g}"
    yield Reading(key, str(asked), found, source + float16)


def read_float32_products(assembly: Assembly) -> Iterator[Reading]:
    """torch's current setting for float32 matrix products on CUDA."""
    asked = assembly.config.training.tf32
    found = str(torch.backends.cuda.matmul.fp32_precision == "tf32").lower()
    source = f"torch.backends.cuda.matmul.fp32_precision {torch.backends.cuda.matmul.fp32_precision}"
    yield Reading("training.tf32", None if asked is None else str(asked).lower(), found, source)


def read_frozen_modules(assembly: Assembly) -> Iterator[Reading]:
    """Whether the weights of each pattern are still frozen."""
    for item in assembly.frozen:
        counts = (item.parameters, still_frozen(assembly.model, item.names, assembly.numel))
        asked, found = (f"{item.pattern}: {count:,} frozen" for count in counts)
        tied = "; the head shares them" if item.shares_head else ""
        yield Reading(item.key, asked, found, f"requires_grad; {item.bytes / 2**20:,.1f} MiB{tied}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_float8_products(assembly: Assembly) -> Iterator[Reading]:
    """The float8 layers, with the number of scales per operand; expected in all layers that support it."""
    asked = assembly.config.training.fp8
    linear: list[Any] = [module for module in assembly.model.modules() if isinstance(module, nn.Linear)]
    converted = [module for module in linear if type(module).__name__ == "Float8Linear"]
    found = Counter(str(module.config.cast_config_input.scaling_granularity.value) for module in converted)
    held = [module for module in linear if isinstance(module, Float8Base) and module.weight.dtype is HELD]
    found.update(str(Fp8.ROWWISE if len(module.scales) > 1 else Fp8.TENSORWISE) for module in held)
    kinds = [f"{kind.replace('axiswise', 'rowwise')} in {counted(count, 'layer')}" for kind, count in found.items()]
    could = len(linear_layers(assembly.model, frozen=assembly.config.training.use_peft))
    wanted = "none" if asked is Fp8.NONE else f"{asked} in {counted(could, 'layer')}"
    source = f"class of {counted(len(linear), 'linear layer')}"
    source += f"; {sum(module.weight.nbytes for module in held) / 2**30:.2f} GiB held in {HELD}" if held else ""
    yield Reading("training.fp8", wanted, ", ".join(kinds) or "none", source)


def read_head(assembly: Assembly) -> Iterator[Reading]:
    """Number of outputs of a task of rows, whether the head is fully trained, and its new weights."""
    task, model = assembly.config.training.task, causal_model(assembly.model)
    if not task.facts.is_of_rows:
        return
    names = answers(assembly.config)
    still = [
        f"{top}.{name}"
        for top, module in head_modules(model).items()
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and ".original_module." not in f".{name}"
    ]
    frozen = assembly.frozen and all(any(name in item.names for item in assembly.frozen) for name in still)
    asked = f"{task}, {counted(len(names), 'output')}"
    found = f"{task}, {counted(model.config.num_labels, 'output')}" if answers_for_rows(model) else "a head of tokens"
    if still and not frozen:
        found += f", of which {still[0]} is not trained"
    new = f"; new and random: {', '.join(assembly.new_weights)}" if assembly.new_weights else ""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    trained = f"; trained in full: {', '.join(head_modules(model))}" if assembly.adapter is not None else ""
    yield Reading("training.task", asked, found, f"{type(model).__name__}: {shown}{trained}{new}")


def read_vocabulary(assembly: Assembly) -> Iterator[Reading]:
    """Number of rows, and whether those of added tokens start at the right values; for unsplit matrices only."""
    config = assembly.config
    if not changes_rows(config.model):
        return
    found, (stored, rows) = vocabulary_of(config.model), embedding_rows(config)
    model = causal_model(assembly.model)
    size = model.config.get_text_config().vocab_size
    yield Reading("rows of the embedding", f"{rows:,}", f"{size:,}", "model.config")
    if assembly.is_in_parts:
        return
    matrices = [matrix.detach() for matrix in token_matrices(model)]
    expected = [new_rows(matrix, found, stored) for matrix in matrices]
    started = sum(
        all(torch.equal(item[number], values[number].to(item)) for item, values in zip(matrices, expected, strict=True))
        for number in found.ids
    )
    source = f"{counted(len(matrices), 'matrix', 'matrices')} with {matrices[0].shape[0]:,} rows"
    asked, is_so = (f"{count} at the mean of their parts" for count in (len(found.added), started))
    yield Reading("model.added_tokens", asked, is_so, source)


def read_trained_tokens(assembly: Assembly) -> Iterator[Reading]:
    """The rows that peft trains one by one."""
    asked = assembly.config.peft.trainable_token_indices
    if assembly.adapter is None or not asked:
        return
    from peft.tuners.trainable_tokens import TrainableTokensLayer  # takes seconds to import

    layers = {
        name: module for name, module in assembly.model.named_modules() if isinstance(module, TrainableTokensLayer)
    }
    held = {tuple(layer.token_indices["default"]) for layer in layers.values()}
    found = ", ".join(map(str, *held)) if len(held) == 1 else counted(len(held), "list")
    names = ", ".join(name.removeprefix("base_model.model.").removesuffix(".token_adapter") for name in layers)
    yield Reading("peft.trainable_token_indices", ", ".join(map(str, sorted(set(asked)))), found, f"rows of {names}")


def read_rope_scaling(assembly: Assembly) -> Iterator[Reading]:
    """The type of the rotary modules, and the factor and positions of the config that they read."""
    scaling = assembly.config.model.rope_scaling
    if scaling is None:
        return
    model = causal_model(assembly.model)
    modules = [module for module in model.modules() if hasattr(module, "rope_type")]
    kinds = {kind.get(FULL) if isinstance(kind := module.rope_type, dict) else kind for module in modules}
    text = model.config.get_text_config()
    rope = rope_of(text.to_dict()) or {}
    found = f"{', '.join(sorted(map(str, kinds)))} x {rope.get('factor', 1):g}"
    positions = f"{text.max_position_embeddings:,} positions"
    source = f"{counted(len(modules), 'rotary module')}, {positions} in model.config"
    yield Reading("model.rope_scaling", f"{scaling.rope_type} x {scaling.factor:g}", found, source)
