"""Rules about the model: attention and kernels, row length, tokenizer, and training of added tokens."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from framework.schema.adapters import ADAPTERS
from framework.schema.architecture import OWN_KEYS, position_count, scales_positions
from framework.schema.choices import Attention, CheckpointingPolicy, MixedPrecision, SdpaBackend, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.peft import PeftParams
from framework.schema.rules.conflict import Conflict


def model_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Models that cannot be built, and rows that are too long for them."""
    model, architecture = config.model, config.model.architecture
    has_own = (
        model.model_name is not None and model.load_pretrained_weights and "model_type" not in (architecture or {})
    )
    if architecture is not None and not has_own and not isinstance(architecture.get("model_type"), str):
        yield Conflict(("model.architecture",), "has no model_type", "`model_type: llama` or another of transformers")
    if not model.load_pretrained_weights and architecture is None:
        message = "random weights need an architecture"
        yield Conflict(("model.load_pretrained_weights", "model.architecture"), message, "model.architecture or model=")
    written: Mapping[str, Any] = architecture or {}
    positions, length = position_count(written), model.model_max_length
    if positions and isinstance(length, int) and not scales_positions(written) and model.rope_scaling is None:
        yield from too_long(config, length, positions)


def rope_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Positions that are scaled twice, and keys of another type of scaling."""
    scaling = config.model.rope_scaling
    written: Mapping[str, Any] = config.model.architecture or {}
    if scaling is None:
        return
    if scales_positions(written):
        keys = ("model.rope_scaling", "model.architecture")
        yield Conflict(keys, "both scale the positions", "one of the two")
    for kind, names in OWN_KEYS.items():
        for name in names:
            if getattr(scaling, name) is not None and kind is not scaling.rope_type:
                message = f"is used by {kind}, and rope_type is {scaling.rope_type}"
                yield Conflict((f"model.rope_scaling.{name}", "model.rope_scaling.rope_type"), message, "unset")


def remote_code_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Warnings about remote code, with its revision."""
    for section, model in (("model", config.model), ("training.teacher", config.training.teacher)):
        if model is not None and model.trust_remote_code and model.model_name is not None:
            message = remote_code(model.model_name, model.model_revision)
            yield Conflict((f"{section}.trust_remote_code",), message, is_warning=True)


def remote_code(name: str, revision: str | None) -> str:
    """Warning before code of a model's repository or folder runs."""
    of = f"revision {revision}" if revision else "no revision is set: the current one"
    return f"Python code that comes with {name} runs with your permissions ({of})"


def too_long(config: TrainingConfig, length: int, positions: int) -> Iterator[Conflict]:
    """Rows of `length` tokens, as padded, that exceed the model's positions."""
    padded = config.padded(length)
    if length > positions:
        scaling = config.model.rope_scaling
        factor = scaling.factor if scaling is not None else 1
        why = f"scaled by {factor:g}" if scaling is not None else "and no rope scaling is set"
        message = f"{length} tokens are more than the model's {positions} positions, {why}"
        stretch = f"model.rope_scaling={{rope_type: yarn, factor: {math.ceil(factor * length / positions)}}}"
        expected = f"at most {positions}; or {stretch}, where they are rotary"
        yield Conflict(("model.model_max_length", "model.architecture"), message, expected)
    elif padded > positions:
        multiple = config.padded(1)
        message = f"rows of {length} tokens are padded to {padded}, more than the model's {positions} positions"
        by = "data.pad_to_multiple_of" if config.data.pad_to_multiple_of else "fsdp.context_parallel_size"
        keys = (by, "model.model_max_length")
        fitting = positions // multiple * multiple
        expected = f"model.model_max_length={fitting}, or unset" if fitting else "unset"
        yield Conflict(keys, message, expected)


def tokenizer_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A tokenizer that is trained although another is given."""
    model = config.model
    if model.tokenizer is None:
        return
    if model.tokenizer_name is not None:
        keys = ("model.tokenizer", "model.tokenizer_name")
        yield Conflict(keys, "a tokenizer is both built and named", "one of the two")
    if model.load_pretrained_weights and model.model_name is not None:
        keys = ("model.tokenizer", "model.load_pretrained_weights")
        yield Conflict(keys, "pretrained weights do not know a new tokenizer's ids", "load_pretrained_weights: false")


def find_liger_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Liger kernels with the compiler, which cannot see into them, and with policies whose results they overwrite."""
    training, key = config.training, "model.enable_liger_kernel"
    if config.model.enable_liger_kernel is not True:
        return
    if training.compile is True:
        message = "the compiler fuses the same work itself, and cannot see into Liger's kernels"
        yield Conflict((key, "training.compile"), message, "one of the two; compile=true is as fast")
    policy = training.gradient_checkpointing_policy
    if training.enable_gradient_checkpointing is True and policy is CheckpointingPolicy.SAVE_MATMULS:
        message = "Liger rotates queries and keys where their products were kept: they would be rotated twice"
        yield Conflict((key, "training.gradient_checkpointing_policy"), message, "full or save_attention")
    if config.model.chunked_loss is False:
        message = "its kernels do not include the loss: the full logits are built"
        yield Conflict(("model.chunked_loss", key), message, "true, or unset", is_warning=True)


def sdpa_backend(config: TrainingConfig) -> Iterator[Conflict]:
    """A backend of sdpa together with another attention kernel."""
    kernel, backend = config.model.attn_implementation, config.model.sdpa_backend
    if kernel is Attention.RING_ATTENTION and backend is SdpaBackend.MATH:
        message = "math computes all scores of a row and does not return what is needed to combine parts of them"
        yield Conflict(("model.sdpa_backend", "model.attn_implementation"), message, "flash, cudnn or efficient")
    if backend is not None and kernel not in (None, "auto", Attention.SDPA, Attention.RING_ATTENTION):
        message = f"{backend} is a kernel of sdpa, and {kernel} is set"
        yield Conflict(("model.sdpa_backend", "model.attn_implementation"), message, "attn_implementation: sdpa")


def half_precision_attention(config: TrainingConfig) -> Iterator[Conflict]:
    """Flash-attention kernels, and flash and cuDNN kernels of sdpa on a card, which compute only in half precision."""
    if config.model.torch_dtype_str != TorchDtype.FLOAT32:
        return
    if config.training.mixed_precision_dtype != MixedPrecision.NONE:
        return
    dtypes = ("training.mixed_precision_dtype", "model.torch_dtype_str")
    kernel, backend = config.model.attn_implementation, config.model.sdpa_backend
    if kernel in (Attention.FLASH_ATTENTION_2, Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_4):
        message = f"{kernel} does not compute in float32"
        yield Conflict(("model.attn_implementation", *dtypes), message, "sdpa, or bf16 or fp16 autocast")
    if backend in (SdpaBackend.FLASH, SdpaBackend.CUDNN) and config.gpu.capability is not None:
        message = f"{backend} does not compute in float32 on a card"
        yield Conflict(("model.sdpa_backend", *dtypes), message, "leave it unset, or bf16 or fp16 autocast")


_TOKENS = "peft.trainable_token_indices"
_WHOLE = "peft.lora_modules_to_save=[embed_tokens, lm_head], by the model's names for them"
_EMBEDDINGS = ("wte", "word_embeddings", "tok_embeddings")
"""Names of embeddings other than those that begin with `embed`."""


def trains_embedding(peft: PeftParams) -> bool:
    """Whether an embedding is among the modules that are trained in full with the adapter."""
    names = [name.rpartition(".")[2] for name in peft.lora_modules_to_save]
    return any(name.startswith("embed") or name in _EMBEDDINGS for name in names)


def vocabulary_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Added tokens that this kind of adapter cannot save, or whose rows are sharded."""
    peft, method = config.peft, config.peft.peft_method
    if not config.training.use_peft:
        return
    if config.model.added_tokens and not ADAPTERS[method].trains_tokens and not trains_embedding(peft):
        message = f"a {method} adapter would be saved without the rows of the added tokens"
        expected = "a LoRA kind" if ADAPTERS[method].is_prompt else f"a LoRA kind, or {_WHOLE}"
        yield Conflict(("model.added_tokens", "peft.peft_method"), message, expected)
    trains_rows = bool(peft.trainable_token_indices) or (
        bool(config.model.added_tokens) and peft.trainable_token_indices is None and not trains_embedding(peft)
    )
    split = "fsdp.enable_fsdp" if config.fsdp.is_sharded else "fsdp.tensor_parallel_size"
    if trains_rows and (config.fsdp.is_sharded or config.fsdp.tensor_parallel_size > 1):
        key = _TOKENS if peft.trainable_token_indices else "model.added_tokens"
        message = "single rows of an embedding cannot be trained with sharded or tensor-parallel weights"
        yield Conflict((key, split), message, _WHOLE)
