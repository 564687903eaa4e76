"""What single values cannot say: keys that contradict each other, the card, or what a verb needs.

Each rule is a pure function of the config. Tier A: no file is opened, nothing is built.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from framework.schema.architecture import position_count, scales_positions
from framework.schema.attention_rules import half_precision_attention, sdpa_backend
from framework.schema.choices import (
    Attention,
    CheckpointingPolicy,
    Fp8,
    MixedPrecision,
    Optimizer,
    OptimizerOffload,
    PeftMethod,
    PeftSaveMode,
    Scheduler,
    SdpaBackend,
    Task,
    TorchDtype,
)
from framework.schema.classifier_rules import classifier_conflicts
from framework.schema.config import TrainingConfig
from framework.schema.conflict import Conflict
from framework.schema.context_rules import context_conflicts
from framework.schema.data_rules import data_conflicts
from framework.schema.fsdp import FSDPParams
from framework.schema.keys import dotted, values
from framework.schema.liger_rules import find_liger_conflicts
from framework.schema.ranks_rules import ranks_conflicts
from framework.schema.save_rules import save_conflicts
from framework.schema.sharding_rules import sharding_conflicts
from framework.schema.survival_rules import survival_conflicts
from framework.schema.task_rules import task_conflicts
from framework.schema.tensor_rules import tensor_conflicts


@dataclass(frozen=True)
class Needs:
    """What a verb cannot do without."""

    model: bool = False
    data: Literal["unneeded", "advised", "required"] = "unneeded"
    devices: Literal["one", "any"] = "one"
    """`any` for a verb that looks at one device's share and runs nothing."""


def find_conflicts(config: TrainingConfig, needs: Needs) -> list[Conflict]:
    """Every conflict of every rule, warnings among them."""
    return [conflict for rule in RULES for conflict in rule(config)] + list(_unmet_needs(config, needs))


def find_derived_conflicts(config: TrainingConfig) -> list[Conflict]:
    """Conflicts of a resolved config, which its written values may not have shown: a checkpoint's dtype, the autocast
    of its card. What trains is written down with these values, and has to pass every rule when it is read again."""
    return [conflict for rule in RULES for conflict in rule(config) if not conflict.is_warning]


LEGAL_PRECISION = "float32 with none, float32 with bf16 or fp16 (float32 masters), or bfloat16 with none"
_TRAINED = {("float32", "none"), ("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "none")}
_FROZEN = {*_TRAINED, ("bfloat16", "bf16"), ("float16", "fp16")}
"""A frozen base may stay in the dtype of its autocast: the adapter, not the base, holds the float32 masters."""


def _precision(config: TrainingConfig) -> Iterator[Conflict]:
    held, computed = config.model.torch_dtype_str, config.training.mixed_precision_dtype
    if held in (None, TorchDtype.AUTO) or computed == "auto":
        return
    legal = _FROZEN if config.training.use_peft else _TRAINED
    pairs = [(str(held), str(word)) for word in ([computed] if computed else MixedPrecision)]
    if not legal.intersection(pairs):
        message = (
            f"model.torch_dtype_str {held} with training.mixed_precision_dtype {computed or 'unset'} "
            f"cannot train {'this adapter' if config.training.use_peft else 'these weights'}"
        )
        both = ("model.torch_dtype_str", "training.mixed_precision_dtype", "training.use_peft")
        yield Conflict(both, message, LEGAL_PRECISION)


SMALL_RATE = 4e-5
"""0.02 x 2^-9: half the last bit of a bfloat16 weight of 0.02, the usual spread at initialization. Adam moves a
weight by about the learning rate, so a smaller one is rounded away."""


def _rounding_away(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    is_pure = config.model.torch_dtype_str == TorchDtype.BFLOAT16 and not training.use_peft
    if is_pure and training.learning_rate < SMALL_RATE and training.optimizer != Optimizer.ANYPRECISION_ADAMW:
        message = (
            f"a learning rate of {training.learning_rate:g} is below {SMALL_RATE:g}: most updates of bfloat16 "
            "weights round away, and norm weights of 1.0 never move"
        )
        expected = "model.torch_dtype_str=float32 (masters: 8 bytes a parameter more with AdamW)"
        yield Conflict(("model.torch_dtype_str", "training.learning_rate"), message, expected, is_warning=True)


def _wide_base(config: TrainingConfig) -> Iterator[Conflict]:
    """Frozen weights need no masters, and autocast computes with a half-precision copy of them anyway (M18)."""
    is_computed_wide = config.training.mixed_precision_dtype == MixedPrecision.NONE or config.gpu.name == "cpu"
    if config.training.use_peft and config.model.torch_dtype_str == TorchDtype.FLOAT32 and not is_computed_wide:
        message = "a frozen base in float32 takes 2 bytes a parameter more than in half precision, and learns nothing"
        expected = "model.torch_dtype_str unset: the checkpoint's dtype; the adapter is float32 all the same"
        yield Conflict(("model.torch_dtype_str", "training.use_peft"), message, expected, is_warning=True)


def _fp8(config: TrainingConfig) -> Iterator[Conflict]:
    """What torchao's linear layers can be beside."""
    training, key = config.training, "training.fp8"
    if training.fp8 not in (Fp8.TENSORWISE, Fp8.ROWWISE):
        return
    if training.use_peft:
        message = "torchao computes the gradients of frozen weights too, which an adapter is there to avoid"
        yield Conflict((key, "training.use_peft"), message, "fp8: none, or full fine-tuning")
    held, computed = config.model.torch_dtype_str, training.mixed_precision_dtype
    in_float32 = held == TorchDtype.FLOAT32 and computed == MixedPrecision.NONE
    if computed == MixedPrecision.FP16 or in_float32:
        keys = (key, "training.mixed_precision_dtype", "model.torch_dtype_str")
        yield Conflict(keys, "fp8 products take and give bfloat16", "bf16 autocast, or bfloat16 weights")
    if training.compile is False:
        message = "without compilation the casts to fp8 are kernels of their own, and cost more than is saved"
        yield Conflict((key, "training.compile"), message, "training.compile=true", is_warning=True)


def _padding(config: TrainingConfig) -> Iterator[Conflict]:
    if config.data.padding_free and config.data.pad_to_multiple_of is not None:
        message = "rows that are put end to end are not padded"
        yield Conflict(("data.pad_to_multiple_of", "data.padding_free"), message, "one of the two")


def _compile(config: TrainingConfig) -> Iterator[Conflict]:
    training, key = config.training, "training.activation_memory_budget"
    if training.activation_memory_budget is None:
        return
    if training.compile is False:
        message = "only the compiler can tell which activations of a block are cheap to compute again"
        yield Conflict((key, "training.compile"), message, "training.compile=true beside it")
    elif training.enable_gradient_checkpointing is True:
        message = "blocks are computed again as a whole: the budget is then only for the one block at work"
        keys = (key, "training.enable_gradient_checkpointing")
        yield Conflict(keys, message, "one of the two", is_warning=True)


BITSANDBYTES = (
    Optimizer.ADAMW_8BIT,
    Optimizer.LION_8BIT,
    Optimizer.PAGED_ADAMW_32BIT,
    Optimizer.PAGED_ADAMW_8BIT,
    Optimizer.PAGED_LION_8BIT,
)
PAGED = BITSANDBYTES[2:]
TORCHAO = (Optimizer.ADAMW_TORCHAO_8BIT, Optimizer.ADAMW_TORCHAO_4BIT)


def _optimizer(config: TrainingConfig) -> Iterator[Conflict]:
    training, choice = config.training, config.training.optimizer
    key = "training.optimizer"
    is_trained_in_float32 = config.model.torch_dtype_str == TorchDtype.FLOAT32 and not training.use_peft
    if choice is Optimizer.ANYPRECISION_ADAMW and is_trained_in_float32:
        message = "anyprecision_adamw is for bfloat16 weights: float32 ones have nothing to round"
        works = "model.torch_dtype_str=bfloat16 with training.mixed_precision_dtype=none, or adamw_torch_fused"
        yield Conflict(("model.torch_dtype_str", key), message, works)
    if choice is Optimizer.SCHEDULE_FREE_ADAMW and training.lr_scheduler_type is not Scheduler.CONSTANT:
        message = f"schedule_free_adamw averages instead of decaying: a {training.lr_scheduler_type} rate undoes that"
        yield Conflict(("training.lr_scheduler_type", key), message, "constant", is_warning=True)


def _updates(config: TrainingConfig) -> Iterator[Conflict]:
    """Updates in backward, and states off the device."""
    training = config.training
    keys: tuple[str, ...]
    choice, offload, key = training.optimizer, training.optimizer_offload, "training.optimizer_in_backward"
    if training.optimizer_in_backward is True:
        if training.gradient_accumulation_steps != "auto" and _accumulation(config) > 1:
            keys = (key, "training.gradient_accumulation_steps", "training.global_batch_size")
            message = f"a gradient is gone after one micro batch, and {_accumulation(config)} are accumulated"
            yield Conflict(keys, message, "one micro batch a step, or optimizer_in_backward: false")
        if training.max_grad_norm:
            message = "the global norm is known only when every gradient is there, and each is used up before"
            yield Conflict((key, "training.max_grad_norm"), message, "training.max_grad_norm=0")
        if training.mixed_precision_dtype is MixedPrecision.FP16:
            message = "a scaled gradient that overflowed is known only when its weight has changed"
            yield Conflict((key, "training.mixed_precision_dtype"), message, "bf16 or none")
        if choice in TORCHAO:
            yield Conflict((key, "training.optimizer"), f"{choice} compiles its step, not in backward", "adamw_8bit")
    if offload in (OptimizerOffload.HOST, OptimizerOffload.NVME) and choice in (*BITSANDBYTES, *TORCHAO):
        message = f"the states of {choice} are small or paged already, and are not offloaded"
        yield Conflict(("training.optimizer_offload", "training.optimizer"), message, "none, or adamw_torch_fused")
    if offload is OptimizerOffload.NVME and not training.optimizer_offload_folder:
        keys = ("training.optimizer_offload_folder", "training.optimizer_offload")
        yield Conflict(keys, "nvme needs a folder on that disk", "a folder, or optimizer_offload: host")


EMPTYING_COSTS_BELOW = 10
"""Steps between two emptyings from which they cost no time that shows (SPEED.md section 3: 1B on an H100, 2026-11)."""


def _device_cache(config: TrainingConfig) -> Iterator[Conflict]:
    """O13, and settings of an allocator that is not there."""
    steps, key = config.training.empty_device_cache_steps, "training.empty_device_cache_steps"
    if steps is not None:
        message = "returns only blocks that nothing uses: the allocated peak stays as it is"
        if config.gpu.name == "cpu":
            message = "the cpu has no cache of blocks: nothing is returned"
        elif steps < EMPTYING_COSTS_BELOW:
            message += "; every step costs 2.8 % of speed, every tenth nothing that shows (1B, H100, 2026-11)"
        nearest = "unset; for less memory training.enable_gradient_checkpointing, model.chunked_loss or fewer rows"
        yield Conflict((key, "gpu.name"), message, nearest, is_warning=True)
    allocator = config.training.allocator
    for name, value in allocator:
        if isinstance(value, int | float) and not isinstance(value, bool) and config.gpu.name == "cpu":
            message = "is a setting of CUDA's allocator, and this is the cpu"
            yield Conflict((f"training.allocator.{name}", "gpu.name"), message, "leave it unset")
    if allocator.expandable_segments is True and allocator.garbage_collection_threshold is not None:
        keys = ("training.allocator.garbage_collection_threshold", "training.allocator.expandable_segments")
        yield Conflict(keys, "has no effect: an expandable segment is never collected", "one of the two", True)


_VARIANT = "training.gradient_checkpointing_kwargs.use_reentrant"


def _recompute(config: TrainingConfig) -> Iterator[Conflict]:
    """What a checkpoint's policy cannot keep."""
    training, model = config.training, config.model
    policy, key = training.gradient_checkpointing_policy, "training.gradient_checkpointing_policy"
    reentrant = training.gradient_checkpointing_kwargs.use_reentrant
    if training.activation_offload is True and training.compile is True:
        message = "compiled code hands nothing it keeps to the offload"
        nearest = "compile: false, or training.activation_memory_budget"
        yield Conflict(("training.activation_offload", "training.compile"), message, nearest)
    if training.enable_gradient_checkpointing is not True:
        return
    if reentrant and training.compile is True:
        yield Conflict((_VARIANT, "training.compile"), "the re-entrant checkpoint cannot be compiled", "false")
    if policy in (CheckpointingPolicy.FULL, "auto"):
        return
    if reentrant:
        message = "the re-entrant checkpoint keeps inputs alone"
        yield Conflict((key, _VARIANT), message, "use_reentrant: false, or full")
    if training.compile is True:
        message = "what compiled code keeps is decided when it is compiled, by training.activation_memory_budget"
        yield Conflict((key, "training.compile"), message, "full")
    if model.attn_implementation is Attention.FLEX_ATTENTION:
        message = "flex_attention runs as compiled code, whose results a policy cannot keep"
        yield Conflict((key, "model.attn_implementation"), message, "sdpa, or full")
    in_parts = Attention.EAGER is model.attn_implementation or SdpaBackend.MATH is model.sdpa_backend
    if policy is CheckpointingPolicy.SAVE_ATTENTION and in_parts:
        message = "this attention is many small operators: no one result of it could be kept"
        yield Conflict((key, "model.attn_implementation", "model.sdpa_backend"), message, "a fused kernel, or full")


def _offloaded_base(config: TrainingConfig) -> Iterator[Conflict]:
    training, key = config.training, "model.offload_frozen_base"
    if config.model.offload_frozen_base is not True:
        return
    if not training.use_peft:
        message = "only frozen weights can stay on the host, and here the weights are trained"
        yield Conflict(
            (key, "training.use_peft"), message, "training.use_peft=true, or training.optimizer_offload=host"
        )
    if training.use_peft and config.peft.q_lora:
        message = "packed weights are not streamed: their scales are no part of them"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: false, or q_lora alone, a quarter of the size")
    if training.compile is True:
        message = "a compiled block does not see its weights come and go"
        yield Conflict((key, "training.compile"), message, "training.compile: false")
    if config.fsdp.enable_fsdp is True:
        yield Conflict((key, "fsdp.enable_fsdp"), "sharded weights are not streamed", "fsdp.cpu_offload=true")
    if training.activation_offload is True:
        message = "views of streamed weights would be offloaded with the activations"
        yield Conflict((key, "training.activation_offload"), message, "training.enable_gradient_checkpointing=true")
    if config.gpu.name == "cpu":
        message = "on the cpu saves nothing: two blocks are held twice in the same memory"
        yield Conflict((key, "gpu.name"), message, "false", is_warning=True)
    is_cast = training.mixed_precision_dtype in (MixedPrecision.BF16, MixedPrecision.FP16)
    if is_cast and config.model.torch_dtype_str == TorchDtype.FLOAT32 and not training.enable_gradient_checkpointing:
        message = "autocast's half-precision copies of every block stay on the device until backward"
        nearest = "model.torch_dtype_str=bfloat16, or training.enable_gradient_checkpointing=true"
        yield Conflict((key, "model.torch_dtype_str"), message, nearest, is_warning=True)


def _accumulation(config: TrainingConfig) -> int:
    try:
        return config.batch.accumulation
    except ValueError:  # said by _batch
        return 1


def _card(config: TrainingConfig) -> Iterator[Conflict]:
    """What `framework.memory.requirements` does not find, since it depends on how words go together."""
    card = config.gpu
    if card.capability is None:
        return
    has = tuple(int(part) for part in card.capability.split("."))
    named = f"{card.name} has capability {card.capability}"
    if has < (8, 0):
        if config.training.mixed_precision_dtype == MixedPrecision.BF16:
            keys = ("training.mixed_precision_dtype", "gpu.name")
            yield Conflict(keys, f"bf16 needs capability 8.0, and {named}", "fp16 (with float32 weights), or none")
        if config.model.torch_dtype_str == TorchDtype.BFLOAT16:
            keys = ("model.torch_dtype_str", "gpu.name")
            yield Conflict(keys, f"bfloat16 needs capability 8.0, and {named}", "float32")


def _batch(config: TrainingConfig) -> Iterator[Conflict]:
    training = config.training
    micro = training.per_device_train_batch_size
    if "auto" in (micro, training.gradient_accumulation_steps):
        if micro == "auto" and training.global_batch_size is None:
            both = ("training.per_device_train_batch_size", "training.global_batch_size")
            message = "a search keeps the global batch, which nothing says while this is `auto`"
            yield Conflict(both, message, "training.global_batch_size beside it")
        return
    try:
        _ = config.batch
    except ValueError as error:
        sizes = ["global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"]
        keys = (*(f"training.{key}" for key in sizes), "gpu.count")
        rows = int(training.per_device_train_batch_size) * max(1, config.gpu.count // config.sharing)
        yield Conflict(keys, str(error), f"a multiple of {rows}")


def _steps(config: TrainingConfig) -> Iterator[Conflict]:
    training, data = config.training, config.data
    if training.max_steps is not None and (training.warmup_steps or 0) > training.max_steps:
        message = f"{training.warmup_steps} warm-up steps do not fit in {training.max_steps} steps"
        yield Conflict(("training.warmup_steps", "training.max_steps"), message, f"at most {training.max_steps}")
    if training.min_learning_rate > training.learning_rate:
        keys = ("training.min_learning_rate", "training.learning_rate")
        yield Conflict(keys, "is above the peak rate", f"at most {training.learning_rate:g}")
    if training.eval_steps is not None and not data.eval and not data.eval_fraction:
        three = ("training.eval_steps", "data.eval", "data.eval_fraction")
        yield Conflict(three, "evaluation is asked for, but there is no data for it", "data.eval or data.eval_fraction")


def _model(config: TrainingConfig) -> Iterator[Conflict]:
    model, architecture = config.model, config.model.architecture
    if architecture is not None and not isinstance(architecture.get("model_type"), str):
        yield Conflict(("model.architecture",), "has no model_type", "`model_type: llama` or another of transformers")
    if not model.load_pretrained_weights and architecture is None:
        message = "random weights need an architecture"
        yield Conflict(("model.load_pretrained_weights", "model.architecture"), message, "model.architecture or model=")
    written: Mapping[str, Any] = architecture or {}
    positions, length = position_count(written), model.model_max_length
    if positions and isinstance(length, int) and not scales_positions(written):
        yield from too_long(config, length, positions)


def too_long(config: TrainingConfig, length: int, positions: int) -> Iterator[Conflict]:
    """Rows of `length` tokens, and what they are padded to, against the positions that a model has."""
    padded = config.padded(length)
    if length > positions:
        message = f"{length} tokens are more than the model's {positions} positions, and no rope scaling is set"
        yield Conflict(("model.model_max_length", "model.architecture"), message, f"at most {positions}")
    elif padded > positions:
        multiple = config.padded(1)
        message = f"rows of {length} tokens are padded to {padded}, more than the model's {positions} positions"
        by = "data.pad_to_multiple_of" if config.data.pad_to_multiple_of else "fsdp.context_parallel_size"
        keys = (by, "model.model_max_length")
        fitting = positions // multiple * multiple
        expected = f"model.model_max_length={fitting}, or unset" if fitting else "unset"
        yield Conflict(keys, message, expected)


def _tokenizer(config: TrainingConfig) -> Iterator[Conflict]:
    model = config.model
    if model.tokenizer is None:
        return
    if model.tokenizer_name is not None:
        keys = ("model.tokenizer", "model.tokenizer_name")
        yield Conflict(keys, "a tokenizer is both built and named", "one of the two")
    if model.load_pretrained_weights and model.model_name is not None:
        keys = ("model.tokenizer", "model.load_pretrained_weights")
        yield Conflict(keys, "pretrained weights do not know a new tokenizer's ids", "load_pretrained_weights: false")


_HEADS = ("lm_head", "embed_out", "output_projection")
"""Names that families of transformers give the matrix of the logits; others are found when the model is built."""
_PROMPTS = (PeftMethod.PREFIX, PeftMethod.PROMPT)
_NO_MATRICES = (PeftMethod.IA3, *_PROMPTS)
_NOT_LORA = (PeftMethod.VERA, *_NO_MATRICES)


def _adapter(config: TrainingConfig) -> Iterator[Conflict]:
    peft, training, method = config.peft, config.training, config.peft.peft_method
    if not training.use_peft:
        return
    key = "peft.peft_method"
    if method is PeftMethod.PREFIX and training.activation_offload is True:
        message = "a trained prefix is a cache of keys and values, which offloaded blocks drop"
        yield Conflict((key, "training.activation_offload"), message, "prompt, or no offload")
    if method is PeftMethod.PREFIX and training.enable_gradient_checkpointing is True:
        message = "a trained prefix is a cache of keys and values, which checkpointed blocks drop"
        yield Conflict((key, "training.enable_gradient_checkpointing"), message, "prompt, or no checkpointing")
    if method in _PROMPTS and config.model.chunked_loss not in (False, "auto"):
        message = f"the chunked loss runs the model without its {method}"
        yield Conflict((key, "model.chunked_loss"), message, "chunked_loss: false")
    for name in ("lora_modules_to_save", "lora_target_modules"):
        written = getattr(peft, name)  # a text is a regular expression: what it matches only the model tells
        items = () if written is None or isinstance(written, str) else written
        on_head = [item for item in items if item.rpartition(".")[2] in _HEADS]
        if on_head and method not in _PROMPTS and config.model.chunked_loss not in (False, "auto"):
            message = f"the chunked loss multiplies by the head itself, without what {on_head[0]} trains beside it"
            yield Conflict((f"peft.{name}", "model.chunked_loss"), message, "chunked_loss: false, or not the head")
    if method in _PROMPTS and peft.peft_save_mode is PeftSaveMode.MERGED:
        message = f"a {method} is tokens before the row: there is nothing to add to the weights"
        yield Conflict((key, "peft.peft_save_mode"), message, "adapter_only or adapter_and_base_model")
    if method in _PROMPTS and peft.lora_modules_to_save:
        message = f"peft trains no whole modules beside a {method}"
        yield Conflict((key, "peft.lora_modules_to_save"), message, "another method, or no modules")
    joins = "packing" if config.data.packing else "padding_free"
    if method in _PROMPTS and config.data.joins_rows:
        message = f"a {method} stands before the first document of a row alone"
        yield Conflict((key, f"data.{joins}"), message, f"{joins}: false, or another method")
    if peft.adapter_dtype is TorchDtype.FLOAT16:
        message = "an adapter in float16 cannot be trained: its small updates vanish and a loss scaler refuses it"
        yield Conflict(("peft.adapter_dtype",), message, "float32 (unset) or bfloat16")
    if method is PeftMethod.LOFTQ and not peft.q_lora:
        message = "loftq starts the adapter from what quantisation loses, and nothing is quantised"
        yield Conflict((key, "peft.q_lora"), message, "peft.q_lora: true, or another method")
    if method is PeftMethod.DORA and peft.q_lora and peft.q_lora_bits == 8 and config.gpu.name == "cpu":
        message = "peft 0.21 loses the scales of 8-bit weights when dora reads them on a CPU"
        yield Conflict((key, "peft.q_lora_bits", "gpu.name"), message, "4 bits, lora, or a CUDA GPU")
    if method in (PeftMethod.PISSA, PeftMethod.OLORA) and peft.q_lora:
        message = f"{method} moves a part of each weight into the adapter, which a quantised weight cannot lose exactly"
        yield Conflict((key, "peft.q_lora"), message, "lora or loftq")


def _rows(config: TrainingConfig) -> Iterator[Conflict]:
    """Rows that are put together."""
    data, kernel = config.data, config.model.attn_implementation
    if data.packing and data.padding_free:
        message = "packs are full rows already: end to end they would only need a larger mask"
        yield Conflict(("data.padding_free", "data.packing"), message, "one of the two")
    if data.padding_free and kernel in (None, Attention.EAGER, Attention.SDPA):
        message = f"{kernel or 'sdpa'} needs a mask of all tokens of a micro batch x all its tokens for it"
        keys = ("data.padding_free", "model.attn_implementation")
        yield Conflict(keys, message, "flash_attention_2 or flex_attention", is_warning=True)


def _finite(config: TrainingConfig) -> Iterator[Conflict]:
    for path, value in values(config):
        if isinstance(value, float) and not math.isfinite(value):
            yield Conflict((dotted(path),), f"cannot be {value}", "a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            yield Conflict((dotted(path),), "is too large for a 64-bit integer", "a smaller number")


@dataclass(frozen=True)
class Idle:
    """Keys that do nothing under a condition on another key."""

    keys: tuple[str, ...]
    """Dotted keys; one that ends in a dot stands for its whole section."""
    cause: str
    is_idle: Callable[[TrainingConfig], bool]
    reason: str


_LIONS = (Optimizer.LION, Optimizer.LION_8BIT, Optimizer.PAGED_LION_8BIT)


_WITHOUT_SHARDS = ("enable_fsdp", "context_parallel_size", "tensor_parallel_size")


def _is_none_of(names: str) -> Callable[[TrainingConfig], bool]:
    return lambda c: str(c.training.optimizer) not in names.split(" and ")


IDLE = (
    Idle(("peft.",), "training.use_peft", lambda c: not c.training.use_peft, "training.use_peft is false"),
    Idle(
        ("model.freeze_layers", "model.freeze_first_blocks"),
        "training.use_peft",
        lambda c: c.training.use_peft,
        "an adapter leaves the whole model frozen; peft.lora_target_modules says where it is",
    ),
    Idle(
        tuple(f"fsdp.{name}" for name in FSDPParams.model_fields if name not in _WITHOUT_SHARDS),
        "fsdp.enable_fsdp",
        lambda c: c.fsdp.enable_fsdp is False,
        "fsdp.enable_fsdp is false",
    ),
    Idle(
        ("training.compile_scope",),
        "training.compile",
        lambda c: c.training.compile is False,
        "training.compile is false",
    ),
    Idle(
        (
            "training.gradient_checkpointing_every",
            "training.gradient_checkpointing_policy",
            "training.gradient_checkpointing_kwargs.use_reentrant",
        ),
        "training.enable_gradient_checkpointing",
        lambda c: c.training.enable_gradient_checkpointing is False,
        "training.enable_gradient_checkpointing is false",
    ),
    Idle(
        ("peft.q_lora_bits", "peft.bnb_4bit_quant_type", "peft.use_bnb_nested_quant"),
        "peft.q_lora",
        lambda c: not c.peft.q_lora,
        "peft.q_lora is false",
    ),
    Idle(
        ("peft.lora_alpha", "peft.lora_plus_lr_ratio"),
        "peft.peft_method",
        lambda c: c.peft.peft_method in _NOT_LORA,
        "this method has no B matrices",
    ),
    Idle(
        ("peft.lora_r", "peft.lora_dropout"),
        "peft.peft_method",
        lambda c: c.peft.peft_method in _NO_MATRICES,
        "this method has no matrices",
    ),
    Idle(
        ("peft.lora_target_modules",),
        "peft.peft_method",
        lambda c: c.peft.peft_method in _PROMPTS,
        "this method is on no module",
    ),
    Idle(
        ("peft.num_virtual_tokens",),
        "peft.peft_method",
        lambda c: c.peft.peft_method not in _PROMPTS,
        "peft.peft_method is neither prefix nor prompt",
    ),
    Idle(
        ("training.min_learning_rate",),
        "training.lr_scheduler_type",
        lambda c: c.training.lr_scheduler_type != Scheduler.COSINE_WITH_MIN_LR,
        "training.lr_scheduler_type is not cosine_with_min_lr",
    ),
    Idle(
        ("training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"),
        "training.optimizer",
        lambda c: c.training.optimizer in (Optimizer.SGD, Optimizer.ADAFACTOR),
        "training.optimizer is not of the Adam family",
    ),
    Idle(
        ("training.adam_epsilon",),
        "training.optimizer",
        lambda c: c.training.optimizer in (*_LIONS, Optimizer.SOPHIA),
        "training.optimizer divides by no root",
    ),
    *(
        Idle(tuple(f"training.{key}" for key in keys), "training.optimizer", _is_none_of(used), f"only {used} use it")
        for keys, used in (
            (("rounding",), "anyprecision_adamw"),
            (("sgd_momentum",), "sgd"),
            (("muon_momentum",), "muon"),
            (("sophia_rho", "sophia_hessian_steps"), "sophia"),
            (("projection_rank", "projection_update_steps", "projection_scale"), "galore_adamw and apollo_adamw"),
        )
    ),
    Idle(
        ("training.optimizer_offload_folder",),
        "training.optimizer_offload",
        lambda c: c.training.optimizer_offload is not OptimizerOffload.NVME,
        "training.optimizer_offload is not nvme",
    ),
    Idle(
        ("training.warmup_ratio",),
        "training.warmup_steps",
        lambda c: c.training.warmup_steps is not None,
        "training.warmup_steps wins",
    ),
    Idle(
        ("training.num_train_epochs",),
        "training.max_steps",
        lambda c: c.training.max_steps is not None,
        "training.max_steps wins",
    ),
    Idle(
        ("data.labels",),
        "training.task",
        lambda c: c.training.task is not Task.CLASSIFICATION,
        "only classification has classes",
    ),
    Idle(("data.shuffle_buffer",), "data.streaming", lambda c: not c.data.streaming, "data.streaming is off"),
    Idle(("data.eval_fraction",), "data.eval", lambda c: bool(c.data.eval), "data.eval is given"),
    Idle(
        ("model.model_revision",),
        "model.model_name",
        lambda c: c.model.model_name is None,
        "there is no model.model_name",
    ),
)


def _idle(config: TrainingConfig) -> Iterator[Conflict]:
    defaults = dict(values(TrainingConfig()))
    changed = [dotted(path) for path, value in values(config) if path not in defaults or value != defaults[path]]
    for idle in IDLE:
        for key in changed if idle.is_idle(config) else ():
            in_section = any(section.endswith(".") and key.startswith(section) for section in idle.keys)
            if key in idle.keys or (in_section and key != idle.cause):
                yield Conflict((key, idle.cause), f"has no effect: {idle.reason}", is_warning=True)


def _unmet_needs(config: TrainingConfig, needs: Needs) -> Iterator[Conflict]:
    model = config.model
    if needs.model and model.model_name is None and model.architecture is None:
        keys = ("model.model_name", "model.architecture")
        yield Conflict(keys, "there is no model", "model.model_name, model.architecture, or a preset `model=`")
    if (
        needs.data == "required"
        and model.load_pretrained_weights
        and model.model_name is None
        and model.architecture is not None
    ):
        keys = ("model.load_pretrained_weights", "model.model_name")
        message = "there are no pretrained weights to load: an architecture is given, but no model.model_name"
        yield Conflict(keys, message, "model.load_pretrained_weights: false, or model.model_name")
    if needs.data != "unneeded" and not config.data.train:
        is_warning = needs.data == "advised"
        yield Conflict(("data.train",), "there is no training data", "data.train", is_warning)


RULES = (
    _precision,
    _rounding_away,
    _wide_base,
    _optimizer,
    _updates,
    _device_cache,
    _padding,
    _compile,
    _recompute,
    find_liger_conflicts,
    _offloaded_base,
    sharding_conflicts,
    survival_conflicts,
    save_conflicts,
    ranks_conflicts,
    context_conflicts,
    tensor_conflicts,
    task_conflicts,
    classifier_conflicts,
    _card,
    half_precision_attention,
    sdpa_backend,
    _fp8,
    _batch,
    _steps,
    _model,
    _tokenizer,
    data_conflicts,
    _adapter,
    _rows,
    _finite,
    _idle,
)
