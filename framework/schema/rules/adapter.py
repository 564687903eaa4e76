"""Rules about adapters."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import Fp8, PeftMethod, PeftSaveMode, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict

_HEADS = ("lm_head", "embed_out", "output_projection")
"""Usual names of the head; others are found when the model is built."""


def adapter_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Settings that conflict with the kind of adapter."""
    peft, training, method = config.peft, config.training, config.peft.peft_method
    if not training.use_peft:
        return
    key = "peft.peft_method"
    if peft.adapter_path is not None and ADAPTERS[method].moves_base:
        message = f"{method} initializes an adapter from the base's weights, and peft.adapter_path names a trained one"
        yield Conflict((key, "peft.adapter_path"), message, "lora, the kind that such an adapter is saved as")
    if method is PeftMethod.PREFIX and training.activation_offload is True:
        message = "a trained prefix is a cache of keys and values, which offloaded blocks drop"
        yield Conflict((key, "training.activation_offload"), message, "prompt, or no offload")
    if method is PeftMethod.PREFIX and training.enable_gradient_checkpointing is True:
        message = "a trained prefix is a cache of keys and values, which checkpointed blocks drop"
        yield Conflict((key, "training.enable_gradient_checkpointing"), message, "prompt, or no checkpointing")
    if method is PeftMethod.PREFIX and training.compile is True:
        message = "each layer reads its own part of a trained prefix, so every layer would be compiled again"
        yield Conflict((key, "training.compile"), message, "prompt, or compile: false")
    if ADAPTERS[method].is_prompt and config.model.chunked_loss not in (None, False, "auto"):
        message = f"the chunked loss runs the model without its {method}"
        yield Conflict((key, "model.chunked_loss"), message, "chunked_loss: false")
    for name in ("lora_modules_to_save", "lora_target_modules"):
        written = getattr(peft, name)  # a text is a regular expression, which needs the model
        items = () if written is None or isinstance(written, str) else written
        on_head = [item for item in items if item.rpartition(".")[2] in _HEADS]
        if on_head and not ADAPTERS[method].is_prompt and config.model.chunked_loss not in (None, False, "auto"):
            message = f"the chunked loss uses the head's weight directly, without what is trained on {on_head[0]}"
            yield Conflict((f"peft.{name}", "model.chunked_loss"), message, "chunked_loss: false, or not the head")
    yield from _start_conflicts(config)
    if method is PeftMethod.OFT and (training.compile is True or config.fsdp.is_sharded):
        other = "training.compile" if training.compile is True else "fsdp.enable_fsdp"
        yield Conflict((key, other), "oft's rotations are not tested there", "lora, or false")
    if ADAPTERS[method].is_prompt and peft.peft_save_mode is PeftSaveMode.MERGED:
        message = f"a {method} is tokens before the row: there is nothing to merge into the weights"
        yield Conflict((key, "peft.peft_save_mode"), message, "adapter_only or adapter_and_base_model")
    if ADAPTERS[method].is_prompt and peft.lora_modules_to_save:
        message = f"peft trains no full modules with a {method}"
        yield Conflict((key, "peft.lora_modules_to_save"), message, "another method, or no modules")
    joins = "packing" if config.data.packing else "padding_free"
    if ADAPTERS[method].is_prompt and config.data.joins_rows:
        message = f"a {method} would be put only before the first document of a row"
        yield Conflict((key, f"data.{joins}"), message, f"{joins}: false, or another method")
    if method in (PeftMethod.LOFTQ, PeftMethod.PISSA, PeftMethod.OLORA) and peft.rank_pattern:
        message = f"{method} initializes all layers with factors of one rank"
        yield Conflict(("peft.rank_pattern", key), message, "one rank, or another method")
    if peft.adapter_dtype is TorchDtype.FLOAT16:
        message = "an adapter in float16 cannot be trained: small updates vanish and a loss scaler refuses it"
        yield Conflict(("peft.adapter_dtype",), message, "float32 (unset) or bfloat16")
    if method is PeftMethod.LOFTQ and not peft.q_lora:
        message = "loftq initializes the adapter from the quantization error, and nothing is quantized"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: true, or another method")
    if method is PeftMethod.DORA and peft.q_lora and peft.q_lora_bits == 8 and config.gpu.name == "cpu":
        message = "peft 0.21 loses the scales of 8-bit weights when dora reads them on a CPU"
        yield Conflict((key, "peft.q_lora_bits", "gpu.name"), message, "4 bits, lora, or a CUDA GPU")
    if method in (PeftMethod.PISSA, PeftMethod.OLORA) and peft.q_lora:
        message = f"{method} moves a part of each weight into the adapter, which is not exact for quantized weights"
        yield Conflict((key, "peft.q_lora"), message, "lora or loftq")


def _start_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Frozen A matrices, and EVA's initialization from training rows."""
    peft, training = config.peft, config.training
    frozen_too = {
        "fsdp.tensor_parallel_size": config.fsdp.tensor_parallel_size > 1,
        "fsdp.enable_fsdp": config.fsdp.is_sharded,
        "model.offload_frozen_base": config.model.offload_frozen_base is True,
        "training.fp8": training.fp8 is not Fp8.NONE,
    }
    for other, is_on in frozen_too.items():
        if peft.lora_freeze_a and is_on and "lora_freeze_a" in ADAPTERS[peft.peft_method].keys:
            message = "the frozen A matrices would be treated like the frozen base there"
            yield Conflict(("peft.lora_freeze_a", other), message, "false")
    if not peft.starts_from_rows:
        return
    key = "peft.lora_init"
    if config.gpu.count > 1:
        yield Conflict((key, "gpu.count"), "eva uses the rows of one device", "gaussian, or gpu.count: 1")
    if config.data.streaming:
        yield Conflict((key, "data.streaming"), "eva needs rows before the first step", "gaussian, or false")
    if training.compile is True:
        message = "eva needs the inputs of modules inside compiled regions"
        yield Conflict((key, "training.compile"), message, "gaussian, or compile: false")
