"""Model, length of its rows, and tokenizer."""

from collections.abc import Iterator, Mapping
from typing import Any

from framework.schema.architecture import position_count, scales_positions
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


def model_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A model that cannot be built, and rows that are too long for it."""
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
    if positions and isinstance(length, int) and not scales_positions(written):
        yield from too_long(config, length, positions)


def remote_code_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Code that is run because this request says so: which, and of what day."""
    for section, model in (("model", config.model), ("training.teacher", config.training.teacher)):
        if model is not None and model.trust_remote_code and model.model_name is not None:
            message = remote_code(model.model_name, model.model_revision)
            yield Conflict((f"{section}.trust_remote_code",), message, is_warning=True)


def remote_code(name: str, revision: str | None) -> str:
    """The warning before code of a model's repository or folder runs."""
    of = f"revision {revision}" if revision else "no revision is named: whatever it holds today"
    return f"Python code that comes with {name} runs with your rights ({of})"


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


def tokenizer_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A tokenizer that is built where another is known."""
    model = config.model
    if model.tokenizer is None:
        return
    if model.tokenizer_name is not None:
        keys = ("model.tokenizer", "model.tokenizer_name")
        yield Conflict(keys, "a tokenizer is both built and named", "one of the two")
    if model.load_pretrained_weights and model.model_name is not None:
        keys = ("model.tokenizer", "model.load_pretrained_weights")
        yield Conflict(keys, "pretrained weights do not know a new tokenizer's ids", "load_pretrained_weights: false")
