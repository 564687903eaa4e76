"""Derived values of a config: fills in everything that a recipe leaves open."""

from collections.abc import Mapping
from typing import Any

from framework.memory.cards import best_autocast
from framework.schema.architecture import position_count
from framework.schema.choices import MixedPrecision, Rounding, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.objectives import DEFAULT_BETA
from framework.schema.optimizers import facts_of
from framework.schema.rules.precision import overflows_in_float16
from framework.schema.tasks import Task

DEFAULT_LENGTH = 2048
"""Default row length, if the model supports it."""


def resolve(config: TrainingConfig, settings: Mapping[str, Any] | None = None) -> TrainingConfig:
    """Fill in every derived value; written values do not change.

    `settings` is the model's own config as a mapping, by default `model.architecture` as written. Values that only an
    unread checkpoint could provide remain open. A frozen base keeps the checkpoint's dtype. Trained weights are float32
    with the best autocast of the card (float16 with a loss scaler if it has no bfloat16; none if float16 is unsafe), or
    bfloat16 with `anyprecision_adamw`. Raises ValueError if the batch does not divide.
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
    # Sharded quantized weights are gathered with their adapter in one dtype: without autocast the base's.
    is_quantized = config.fsdp.is_sharded and config.training.use_peft and config.peft.q_lora
    follows = is_quantized and autocast is MixedPrecision.NONE
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
    """The architecture if the recipe has all of it; a few keys only modify a model config that was not read here."""
    architecture = config.model.architecture
    return architecture if architecture is not None and "model_type" in architecture else None


_HALF = {MixedPrecision.BF16: TorchDtype.BFLOAT16, MixedPrecision.FP16: TorchDtype.FLOAT16}


def _precision(config: TrainingConfig, settings: Mapping[str, Any] | None) -> tuple[TorchDtype, MixedPrecision]:
    """Weight dtype and autocast, keeping written values. A frozen base stored in half precision is held in the autocast
    dtype: on a card without bfloat16 a bfloat16 checkpoint is converted to float16, or to float32 if float16 is
    unsafe."""
    written, autocast = config.model.torch_dtype_str, config.training.mixed_precision_dtype
    frozen_base = config.training.use_peft
    dtype = written or (TorchDtype.AUTO if frozen_base else TorchDtype.FLOAT32)
    if written is None and not frozen_base and facts_of(config.training.optimizer).keeps_small_updates:
        dtype = TorchDtype.BFLOAT16  # the purpose of this optimizer
    if dtype is TorchDtype.AUTO and settings is not None:
        stored = settings.get("dtype") or settings.get("torch_dtype")  # as written by transformers 5 and 4
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
    """Reason why float16 autocast is not the default of this run on a card without bfloat16; None if it is."""
    if config.fsdp.is_sharded:
        return "loss scaling is not supported with sharded gradients"
    if config.fsdp.tensor_parallel_size > 1:
        return "loss scaling is not supported with tensor-parallel gradients"
    if config.training.optimizer_in_backward is True:
        return "with optimizer_in_backward an overflow is detected only after weights have changed"
    kind = (settings or {}).get("model_type")
    return f"{kind} is known to overflow in it" if overflows_in_float16(kind) else None


def describe_float16(config: TrainingConfig, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Assumptions of a plan if float16 is not used on a card without bfloat16, or is used despite a known problem.

    `config` is resolved."""
    reason, computed = float16_left_out(config, settings), config.training.mixed_precision_dtype
    if reason is None or best_autocast(config.gpu) is not MixedPrecision.FP16:
        return ()
    if computed is MixedPrecision.FP16:
        return (f"computed in float16 as requested, although {reason}",)
    unsafe = f"float16 is not used ({reason}), and {config.gpu.name} has no bfloat16"
    return (f"computed in float32 without autocast, which is slower: {unsafe}",)


def _length(config: TrainingConfig, settings: Mapping[str, Any] | None) -> int | None:
    written = config.model.model_max_length
    if isinstance(written, int) or settings is None:
        return written if isinstance(written, int) else None
    return min(DEFAULT_LENGTH, position_count(settings) or DEFAULT_LENGTH)


def with_length(config: TrainingConfig) -> TrainingConfig:
    """Fill in an unset `model.model_max_length`, if the recipe suffices."""
    if config.model.model_max_length is not None:
        return config
    length = _length(config, config.model.architecture or {})
    return config.model_copy(update={"model": config.model.model_copy(update={"model_max_length": length})})


def with_precision(config: TrainingConfig) -> TrainingConfig:
    """Fill in unset dtypes for the config's card, if the recipe suffices."""
    dtype, autocast = _precision(config, _written(config))
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"mixed_precision_dtype": autocast}),
            "model": config.model.model_copy(update={"torch_dtype_str": dtype}),
        }
    )
