"""What a recipe leaves open, made explicit: the same config with every derived value written out."""

from typing import Any

from framework.memory.cards import best_autocast
from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.config import TrainingConfig

DEFAULT_LENGTH = 2048
"""Longest row when a recipe names none and the model can take it (CONTRACT.md)."""

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def architecture_positions(architecture: Any) -> int | None:
    """Positions the written architecture can tell apart, or None when it does not say."""
    found = (
        [architecture[key] for key in _POSITION_KEYS if isinstance(architecture.get(key), int)] if architecture else []
    )
    return found[0] if found else None


def resolve(config: TrainingConfig) -> TrainingConfig:
    """Every value that is derived rather than written, filled in; nothing that was written changes.

    A frozen base keeps the checkpoint's dtype (`auto` until the checkpoint has been read). Trained weights are float32
    masters under the best autocast of the card.
    """
    training: dict[str, Any] = {"gradient_accumulation_steps": config.batch.accumulation, "global_batch_size": None}
    dtype, autocast = _precision(config)
    training["mixed_precision_dtype"] = autocast
    model = {"torch_dtype_str": dtype, "model_max_length": sequence_length(config)}
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "model": config.model.model_copy(update=model),
        }
    )


def _precision(config: TrainingConfig) -> tuple[TorchDtype, MixedPrecision]:
    dtype, autocast = config.model.torch_dtype_str, config.training.mixed_precision_dtype
    frozen_base = config.training.use_peft
    if dtype is None:
        dtype = TorchDtype.AUTO if frozen_base else TorchDtype.FLOAT32
    if dtype is TorchDtype.AUTO and config.model.architecture is not None:
        dtype = _written_dtype(config.model.architecture.get("dtype"))
    if autocast is None:
        autocast = MixedPrecision.NONE
        if frozen_base or dtype is TorchDtype.FLOAT32:
            autocast = best_autocast(config.gpu)
    assert not isinstance(autocast, str) or isinstance(autocast, MixedPrecision), "resolve() takes no `auto`"
    return dtype, MixedPrecision(autocast)


def _written_dtype(word: Any) -> TorchDtype:
    """The dtype an architecture states for its checkpoint; float32 when it states none, as Hugging Face has it."""
    return TorchDtype(word) if isinstance(word, str) else TorchDtype.FLOAT32


def with_length(config: TrainingConfig) -> TrainingConfig:
    """The config with the length that an unset `model.model_max_length` stands for."""
    if config.model.model_max_length is not None:
        return config
    return config.model_copy(
        update={"model": config.model.model_copy(update={"model_max_length": sequence_length(config)})}
    )


def sequence_length(config: TrainingConfig) -> int:
    """Longest row in tokens: as written, else the smaller of 2048 and the model's positions where they are known."""
    written = config.model.model_max_length
    if isinstance(written, int):
        return written
    positions = architecture_positions(config.model.architecture)
    return min(DEFAULT_LENGTH, positions) if positions else DEFAULT_LENGTH
