"""Quantization of a frozen base to 4 or 8 bits by bitsandbytes (`peft.q_lora`).

Linear layers are quantized; embeddings, head, norms and stacked experts stay in the model's own dtype, and nothing is
cast to float32 (peft's prepare_model_for_kbit_training would: on an 8B model 2 GiB, and larger activations).
"""

import importlib.util
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.model.heads import answers_for_rows
from framework.build.model.parts import is_of_adapter
from framework.build.place import Place
from framework.errors import Problem, RequestError
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from framework.schema.peft import PeftParams

BLOCK, NESTED_BLOCK = 64, 256
"""Weights per scale, and scales per nested scale (bitsandbytes/functional.py, quantize_4bit)."""
DECOMPOSITION_ITERATIONS = 16
"""Iterations of the fast singular value decomposition, as in peft's `pissa_niter_16`."""

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a module -> (A, B), on the host."""


def require_bitsandbytes(key: str, otherwise: str) -> None:
    """Raise RequestError if bitsandbytes is not installed, with the alternative for `key`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        message = "quantized weights need the package bitsandbytes, which is not installed"
        raise RequestError([Problem(key, message, expected=f"pip install bitsandbytes, or {otherwise}")])


def refuse_other_quantization(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError if a checkpoint is stored in another quantization than the run asks for, since such weights
    load as they are stored, whatever was planned. Only bitsandbytes' are supported, and not sharded."""
    stored: Any = getattr(architecture, "quantization_config", None)
    if stored is None or not config.model.load_pretrained_weights:
        return
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    if (method := settings.get("quant_method")) != "bitsandbytes":
        method = getattr(method, "value", method)
        how = f"are stored quantized by {method!r}" if method else "have a quantization_config without a quant_method"
        message = f"the weights of {config.model.model_name} {how}, so their size cannot be planned"
        works = "the checkpoint that they were quantized from, and peft=qlora, which quantizes it as it loads"
        raise RequestError([Problem("model.model_name", message, expected=works)])
    if config.fsdp.is_sharded:
        message = (
            f"the weights of {config.model.model_name} are stored quantized, and sharding needs to quantize them itself"
        )
        works = "the unquantized checkpoint, or fsdp.enable_fsdp: false"
        raise RequestError([Problem("fsdp.enable_fsdp", message, expected=works)])
    peft, bits = config.peft, 4 if settings.get("load_in_4bit") else 8
    code, nested = settings.get("bnb_4bit_quant_type", "fp4"), bool(settings.get("bnb_4bit_use_double_quant"))
    kind, asked = kind_name(bits, code, nested), "no quantization"
    if config.training.use_peft and peft.q_lora:
        asked = kind_name(peft.q_lora_bits, str(peft.bnb_4bit_quant_type), peft.use_bnb_nested_quant)
    keys = {"peft.q_lora_bits": str(bits)}
    keys |= {"peft.bnb_4bit_quant_type": code, "peft.use_bnb_nested_quant": str(nested).lower()} if bits == 4 else {}
    options = " ".join(f"{key}={value}" for key, value in keys.items())
    expected = f"peft=qlora {options}, or the unquantized checkpoint"
    if asked != kind:
        message = f"the weights of {config.model.model_name} are stored as {kind}, and the run asks for {asked}"
        raise RequestError([Problem("peft.q_lora", message, expected=expected)])
    if peft.peft_method is PeftMethod.LOFTQ:
        message = (
            f"loftq needs the quantization error, and the weights of {config.model.model_name} are stored as {kind}"
        )
        raise RequestError([Problem("peft.peft_method", message, expected="lora, or the unquantized checkpoint")])


ROW_HEADS = ("classifier", "pre_classifier", "score", "head", r".*\.pooler", "pooler")
"""Names or expressions of the head's layers in a task of rows, for transformers' `llm_int8_skip_modules`."""


def quantization(params: PeftParams, computed: torch.dtype, of_rows: bool) -> BitsAndBytesConfig:
    """transformers' quantization config. `computed` is the compute dtype of 4-bit weights; `of_rows`: the model has a
    trained head for rows, of which transformers by default skips only the last layer."""
    kept = list(ROW_HEADS) if of_rows else None
    if params.q_lora_bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    return BitsAndBytesConfig(
        llm_int8_skip_modules=kept,
        load_in_4bit=True,
        bnb_4bit_quant_type=str(params.bnb_4bit_quant_type),
        bnb_4bit_use_double_quant=params.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=computed,
    )


def quantize(params: PeftParams, model: PreTrainedModel, computed: torch.dtype, place: Place) -> Factors:
    """Quantize the linear layers of a model that was built unquantized, as a quantized load would; other tensors move
    to `place`. A model that was loaded quantized is left unchanged; one on meta gets the shapes.

    Returns for LoftQ the factors of the best rank-`lora_r` approximation of each layer's quantization error; else
    nothing.
    """
    import bitsandbytes as bnb
    from transformers.quantizers.auto import AutoHfQuantizer

    lost: dict[str, tuple[Tensor, Tensor]] = {}
    if not is_quantized(model):
        if not place.rehearsed:
            # Move plain layers to the host, and quantize each from there, as for a checkpoint. If all were on the card,
            # small results would be placed at the ends of large layers' segments, which torch then could not free.
            moved = [
                module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module.weight.is_cuda
            ]
            for module in moved:
                module.weight.data = module.weight.data.cpu()
            if moved:
                torch.cuda.empty_cache()
        plain = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        config = quantization(params, computed, answers_for_rows(model))
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        quantizer.preprocess_model(model, device_map=None)
        for name, module in model.named_modules():
            if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
                weight, module.bias = plain[name].weight.detach(), plain[name].bias
                weight = (weight.T if isinstance(plain.pop(name), Conv1D) else weight).contiguous()
                _fill(module, weight, place)
                if params.peft_method is PeftMethod.LOFTQ and not place.rehearsed:
                    lost[name] = _best_factors(weight.float().cpu() - dequantized(module).float().cpu(), params.lora_r)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != place.device.type and not tensor.is_meta:
                tensor.data = tensor.data.to(place.device)
    settle_4bit_layers(model)
    # it logs a line for each 8-bit product
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return lost


def settle_4bit_layers(model: nn.Module) -> None:
    """Make 4-bit layers what bitsandbytes (0.50) makes of them in their first forward.

    On a CPU it would convert weights for evaluation into a format without training support, and only for rows that are
    a multiple of its blocks: they keep theirs. It casts a bias to the compute dtype in place, which breaks a compiled
    block's graph, and a checkpoint around it, whose recomputation then saves one tensor less.
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            if module.bias is not None and module.compute_dtype is not None:
                module.bias.data = module.bias.data.to(module.compute_dtype)


def _fill(module: Any, weight: Tensor, place: Place) -> None:
    import bitsandbytes as bnb

    is_4bit, old = isinstance(module, bnb.nn.Linear4bit), module.weight
    if place.rehearsed or weight.is_meta:
        module.weight = _quantized_shape(old, weight) if is_4bit else _bytes_shape(weight)
    elif is_4bit:
        # with the module, which also gets the scales from the quantization
        module.weight = bnb.nn.Params4bit(weight, requires_grad=False, **{**old.__dict__, "module": module}).to(
            place.device
        )
    else:
        module.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(place.device)
    module._is_hf_initialized = True


def _quantized_shape(old: Any, weight: Tensor) -> Any:
    """A 4-bit weight on meta, shaped as the result of quantize_4bit."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    count, device = weight.numel(), torch.device("meta")
    scales = -(-count // BLOCK)
    state = QuantState(
        absmax=torch.empty(scales, dtype=torch.float32, device=device),
        shape=weight.shape,
        code=torch.empty(16, dtype=torch.float32, device=device),
        blocksize=BLOCK,
        quant_type=old.quant_type,
        dtype=weight.dtype,
    )
    if old.compress_statistics:
        state.absmax = torch.empty(scales, dtype=torch.uint8, device=device)
        state.offset = torch.empty((), dtype=torch.float32, device=device)
        state.state2 = QuantState(
            absmax=torch.empty(-(-scales // NESTED_BLOCK), dtype=torch.float32, device=device),
            code=torch.empty(256, dtype=torch.float32, device=device),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        state.nested = True
    data = torch.empty(((count + 1) // 2, 1), dtype=torch.uint8, device=device)
    settings = {"quant_type": old.quant_type, "compress_statistics": old.compress_statistics, "blocksize": BLOCK}
    return bnb.nn.Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **settings)


def _bytes_shape(weight: Tensor) -> Any:
    import bitsandbytes as bnb

    data = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    return bnb.nn.Int8Params(data, requires_grad=False, CB=data, SCB=scales)


def _best_factors(residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(A, B) with the product B A closest to `residual` (out, in). The decomposition starts from random directions,
    which are seeded so that any number of ranks gets the same adapter."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        left, scales, right = torch.svd_lowrank(residual, min(rank, *residual.shape), niter=DECOMPOSITION_ITERATIONS)
    roots = scales.sqrt()
    a, b = roots[:, None] * right.T, left * roots
    missing = rank - len(roots)
    return torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))


def weight_count(parameter: Tensor) -> int:
    """Number of weights of a parameter: two per byte if quantized to 4 bits."""
    state = quantization_state(parameter)
    return int(state.shape.numel()) if state is not None else parameter.numel()


def scale_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Tensors of quantized weights that are neither parameters nor buffers: scales, codes, offsets."""
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")  # peft's layers expose their base's
        state = getattr(weight, "quant_state", None)
        if isinstance(state, Packing):
            continue
        if state is not None:
            yield from scales_of(state)
        elif type(weight).__name__ == "Int8Params":
            kept: Any = module.state
            scales = weight.SCB if weight.SCB is not None else kept.SCB  # type: ignore[union-attr]
            if scales is not None:
                yield scales


def scales_of(state: Any) -> list[Tensor]:
    """Tensors of a 4-bit weight's `quant_state`: scales, codes, offset, those of nested scales last."""
    states = (state, state.state2) if state.nested else (state,)
    return [value for each in states for value in vars(each).values() if isinstance(value, Tensor)]


def with_scales(state: Any, scales: Iterator[Tensor]) -> Any:
    """A copy of a 4-bit weight's `quant_state` with the next of `scales`, in the order of `scales_of`."""
    copied = copy(state)
    vars(copied).update({name: next(scales) for name, value in vars(state).items() if isinstance(value, Tensor)})
    if state.nested:
        copied.state2 = with_scales(state.state2, scales)
    return copied


@dataclass(frozen=True)
class Packing:
    """Description of a 4-bit weight that contains its scales (framework/build/parallel/quantized_shards.py): `shape`
    (out, in) and `dtype` of the original matrix, and the quantization."""

    shape: torch.Size
    dtype: torch.dtype
    quant_type: str
    nested: bool


def quantization_state(parameter: Tensor) -> Any:
    """Quantization state of a 4-bit weight, bitsandbytes' QuantState or a Packing; None for others."""
    return getattr(parameter, "quant_state", None)


def is_quantized_weight(parameter: Tensor) -> bool:
    """Whether a weight is quantized to 4 or 8 bits."""
    return quantization_state(parameter) is not None or type(parameter).__name__ == "Int8Params"


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight of the model is quantized to 4 or 8 bits."""
    return any(map(is_quantized_weight, model.parameters()))


def quantized_kinds(model: nn.Module) -> Counter[str]:
    """Descriptions of the quantized layers, with counts."""
    kinds: Counter[str] = Counter()
    for parameter in model.parameters():
        if (state := quantization_state(parameter)) is not None:
            kinds[kind_name(4, state.quant_type, state.nested)] += 1
        elif is_quantized_weight(parameter):
            kinds[kind_name(8, "", False)] += 1
    return kinds


def kind_name(bits: int, code: str, nested: bool) -> str:
    """`4-bit nf4, nested scales` and the like."""
    return f"4-bit {code}" + (", nested scales" if nested else "") if bits == 4 else "8-bit"


def unquantized(model: PreTrainedModel) -> str:
    """The frozen unquantized parameters, by location and dtype, in one line."""
    counted: Counter[tuple[str, str]] = Counter()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, parameter in model.named_parameters():
        if is_of_adapter(name, parameter) or is_quantized_weight(parameter):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        known = {id(embedding): "embedding", id(head): "head"}.get(id(owner))
        kind = known or ("experts" if parameter.dim() == 3 else "norms and biases" if parameter.dim() == 1 else "other")
        counted[kind, str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return ", ".join(f"{kind} {count:,} {dtype}" for (kind, dtype), count in counted.most_common())


def dequantized(module: Any) -> Tensor:
    """The dequantized weight of a layer, a matrix (out, in)."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight: Tensor = dequantize_bnb_weight(module.weight, getattr(module, "state", None)).detach()
    return weight


def dequantize(model: PreTrainedModel) -> None:
    """Replace quantized layers by plain ones, in the model's own dtype."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if not isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        weight = dequantized(module).to(model.get_input_embeddings().weight.dtype)
        if getattr(module, "source_cls", nn.Linear) is Conv1D:
            plain: nn.Module = Conv1D(weight.shape[0], weight.shape[1])
            plain.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        else:
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.bias = module.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    for attribute in ("is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    with warnings.catch_warnings():
        model.config._is_quantized = False
