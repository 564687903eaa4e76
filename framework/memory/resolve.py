"""What a recipe leaves open, made explicit: the same config with every derived value written out."""

from collections.abc import Mapping
from typing import Any

from framework.memory.cards import best_autocast
from framework.schema.architecture import position_count
from framework.schema.choices import MixedPrecision, Rounding, Task, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.objectives import DEFAULT_BETA
from framework.schema.optimizers import facts_of
from framework.schema.rules.precision import overflows_in_float16

DEFAULT_LENGTH = 2048
"""Longest row when a recipe names none and the model can take it."""


def resolve(config: TrainingConfig, settings: Mapping[str, Any] | None = None) -> TrainingConfig:
    """Every value that is derived rather than written, filled in; nothing that was written changes.

    `settings` is the model's own config as a mapping; without it, `model.architecture` as it was written. What only
    an unread checkpoint could tell stays open. A frozen base keeps the checkpoint's dtype; trained weights are
    float32 masters under the best autocast of the card (float16, with a loss scaler, where it has no bfloat16; none
    where float16 is left out), or bfloat16 with `anyprecision_adamw`. Raises ValueError when the batch does not divide.
    """
    settings = _written(config) if settings is None else settings
    dtype, autocast = _precision(config, settings)
    rounding = config.training.rounding
    if facts_of(config.training.optimizer).keeps_small_updates:
        rounding = rounding or Rounding.STOCHASTIC
    preference = config.training.preference
    if config.training.task is Task.PREFERENCE and preference.beta is None:
        preference = preference.model_copy(update={"beta": DEFAULT_BETA[preference.loss_type]})
    training: dict[str, Any] = {
        "gradient_accumulation_steps": config.batch.accumulation,
        "global_batch_size": None,
        "per_device_eval_batch_size": config.eval_rows,
        "mixed_precision_dtype": autocast,
        "rounding": rounding,
        "preference": preference,
    }
    # Quantized weights that are split are gathered with their adapter in one dtype: without autocast the base's.
    is_packed = config.fsdp.is_sharded and config.training.use_peft and config.peft.q_lora
    follows = is_packed and autocast is MixedPrecision.NONE
    adapter_dtype = config.peft.adapter_dtype or (TorchDtype.AUTO if follows else None)
    peft = {"adapter_dtype": adapter_dtype}
    model = {"torch_dtype_str": dtype, "model_max_length": _length(config, settings)}
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "model": config.model.model_copy(update=model),
            "peft": config.peft.model_copy(update=peft),
        }
    )


def _written(config: TrainingConfig) -> Mapping[str, Any] | None:
    """The architecture as far as the recipe has all of it: some keys alone change one that nobody has read here."""
    architecture = config.model.architecture
    return architecture if architecture is not None and "model_type" in architecture else None


_HALF = {MixedPrecision.BF16: TorchDtype.BFLOAT16, MixedPrecision.FP16: TorchDtype.FLOAT16}


def _precision(config: TrainingConfig, settings: Mapping[str, Any] | None) -> tuple[TorchDtype, MixedPrecision]:
    """Written values as they are. A frozen base that is stored in one half precision is held in that of its autocast:
    on a card without bfloat16 this is float16, which a bfloat16 checkpoint is then converted to, or float32 where
    float16 is left out."""
    written, autocast = config.model.torch_dtype_str, config.training.mixed_precision_dtype
    frozen_base = config.training.use_peft
    dtype = written or (TorchDtype.AUTO if frozen_base else TorchDtype.FLOAT32)
    if written is None and not frozen_base and facts_of(config.training.optimizer).keeps_small_updates:
        dtype = TorchDtype.BFLOAT16  # what this optimizer is for
    if dtype is TorchDtype.AUTO and settings is not None:
        stored = settings.get("dtype") or settings.get("torch_dtype")  # as transformers 5 and 4 write it
        dtype = TorchDtype(str(stored or TorchDtype.FLOAT32).removeprefix("torch."))
    best = best_autocast(config.gpu)
    reason = float16_left_out(config, settings)
    if autocast is None:
        autocast = MixedPrecision.NONE
        if frozen_base and dtype is TorchDtype.FLOAT16 and (written is not None or reason is None):
            autocast = MixedPrecision.FP16
        elif frozen_base or dtype is TorchDtype.FLOAT32:
            autocast = MixedPrecision.NONE if best is MixedPrecision.FP16 and reason is not None else best
    computed = MixedPrecision(autocast)
    if frozen_base and written is None and dtype in _HALF.values():
        is_none_left = computed is MixedPrecision.NONE and (
            config.gpu.lacks_bfloat16 or (dtype is TorchDtype.FLOAT16 and reason is not None)
        )
        dtype = TorchDtype.FLOAT32 if is_none_left else _HALF.get(computed, dtype)
    return dtype, computed


def float16_left_out(config: TrainingConfig, settings: Mapping[str, Any] | None) -> str | None:
    """Why float16 autocast is not the default of this run on a card without bfloat16; None where it is."""
    if config.fsdp.is_sharded:
        return "a loss scale is not kept over sharded gradients"
    if config.fsdp.tensor_parallel_size > 1:
        return "a loss scale is not kept over gradients that each device has a part of"
    if config.training.optimizer_in_backward is True:
        return "with optimizer_in_backward a gradient that overflowed is known only when its weight has changed"
    kind = (settings or {}).get("model_type")
    return f"{kind} is known to overflow in it" if overflows_in_float16(kind) else None


def describe_float16(config: TrainingConfig, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What a plan tells of a run that does without the float16 of its card, or has it in spite of what is known.

    `config` is resolved."""
    reason, computed = float16_left_out(config, settings), config.training.mixed_precision_dtype
    if reason is None or best_autocast(config.gpu) is not MixedPrecision.FP16:
        return ()
    if computed is MixedPrecision.FP16:
        return (f"computed in float16 as asked, though {reason}",)
    left_out = f"float16 is left out ({reason}), and {config.gpu.name} has no bfloat16"
    return (f"computed in float32 without autocast, which is slower: {left_out}",)


def _length(config: TrainingConfig, settings: Mapping[str, Any] | None) -> int | None:
    written = config.model.model_max_length
    if isinstance(written, int) or settings is None:
        return written if isinstance(written, int) else None
    return min(DEFAULT_LENGTH, position_count(settings) or DEFAULT_LENGTH)


def with_length(config: TrainingConfig) -> TrainingConfig:
    """The config with the length that an unset `model.model_max_length` stands for, as far as the recipe tells."""
    if config.model.model_max_length is not None:
        return config
    length = _length(config, config.model.architecture or {})
    return config.model_copy(update={"model": config.model.model_copy(update={"model_max_length": length})})


def with_precision(config: TrainingConfig) -> TrainingConfig:
    """The config with the dtypes that an unset precision stands for on its card, as far as the recipe tells."""
    dtype, autocast = _precision(config, _written(config))
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"mixed_precision_dtype": autocast}),
            "model": config.model.model_copy(update={"torch_dtype_str": dtype}),
        }
    )
