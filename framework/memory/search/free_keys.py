"""Free keys of a search, its initial config, and inexact settings that change the training result. No torch."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.levers import lever
from framework.memory.requirements import default_of, is_installed, possible, suits, with_values
from framework.memory.resolve import resolve
from framework.memory.search.space import ACCUMULATION, AXES, GLOBAL_BATCH, MICRO_BATCH
from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key, left_open, unknown, value_of
from framework.schema.optimizers import Optimizer
from framework.schema.rules.data import rows_of_global_batch


def opened(config: TrainingConfig) -> TrainingConfig:
    """The config with the plain value for each `auto`, from which a search starts.

    Raises RequestError if the micro-batch is `auto` and the rows per optimizer step are not written.
    """
    plain = {key: default_of(key) for key in left_open(config)}
    if MICRO_BATCH in plain:
        # The largest number of rows up to the default that divides the rows of a step on one device.
        written = config.training.global_batch_size
        if written is None:
            message = "the search keeps the global batch, which is not determined while this is `auto`"
            raise RequestError([Problem(MICRO_BATCH, message, expected=f"{GLOBAL_BATCH} next to it")])
        if (largest := rows_of_global_batch(config, None, int(default_of(MICRO_BATCH)))) is None:
            shares = config.gpu.count // config.sharing
            message = f"{written} rows are not equal shares of {shares} devices"
            raise RequestError([Problem(GLOBAL_BATCH, message, expected=f"a multiple of {shares}")])
        plain |= {MICRO_BATCH: largest, ACCUMULATION: None}
    return with_values(config, plain) if plain else config


def freedom(pins: Collection[str]) -> set[str]:
    """The keys that `fit` may change. A pin is a key or a section. Raises RequestError for one that is neither."""
    strange = []
    for pin in pins:
        if pin not in every_key():
            message, nearest = unknown(tuple(pin.split(".")))
            strange.append(Problem(f"--pin {pin}", message, nearest=nearest))
    if strange:
        raise RequestError(strange)
    return {key for key in AXES if not any(key == pin or key.startswith(f"{pin}.") for pin in pins)}


OPTIMIZER, DTYPE = "training.optimizer", "model.torch_dtype_str"
QUANTIZED, LENGTH = "peft.q_lora", "model.model_max_length"
INEXACT = (OPTIMIZER, DTYPE, QUANTIZED, LENGTH)
"""Keys with inexact settings, from the smallest change of the training result to the largest."""
_ADAMW = (Optimizer.ADAMW_TORCH, Optimizer.ADAMW_TORCH_FUSED)
_LIGHTER = ("adamw_8bit",)
"""Optimizers with AdamW's update rule and smaller states. Paged ones use the card equally while there is space."""


@dataclass(frozen=True)
class Tradeoff:
    """Values to set, and how they change the training result."""

    values: Mapping[str, Any]
    changes: str


def with_tradeoffs(config: TrainingConfig, keys: Collection[str], runs_here: bool) -> Iterator[TrainingConfig]:
    """Yield the config with each combination of tradeoffs at these keys, from few and small changes to many and large.

    The config itself is not among them.
    """
    options: list[list[Tradeoff | None]] = [[None, *_at(config, key)] for key in INEXACT if key in keys]
    combined = [[item for item in chosen if item is not None] for chosen in product(*options)]
    order = {id(item): index for index, item in enumerate(item for row in options for item in row)}
    for chosen in sorted(combined, key=lambda items: (len(items), [order[id(item)] for item in items])):
        values = {key: value for item in chosen for key, value in item.values.items()}
        changed = possible(config, values, runs_here) if values else None
        if changed is not None:
            yield changed


def change_of(key: str, value: Any) -> str:
    """How a value changes the training result, from the levers table; other lengths like the table's."""
    row = lever(key)
    exact = next((item for item in row.settings if item.value == value), None)
    return exact.changes if exact is not None else row.settings[-1].changes


def _at(config: TrainingConfig, key: str) -> Iterator[Tradeoff]:
    if key == OPTIMIZER and config.training.optimizer in _ADAMW:
        for setting in lever(key).settings:
            has = all(map(is_installed, filter(None, setting.package.split(", "))))
            if setting.value in _LIGHTER and suits(setting.hardware, config.gpu) and has:
                yield Tradeoff({key: setting.value}, setting.changes)
    elif key == DTYPE and not config.training.use_peft and resolve(config).model.torch_dtype_str is TorchDtype.FLOAT32:
        values = {key: TorchDtype.BFLOAT16, "training.mixed_precision_dtype": MixedPrecision.NONE}
        yield Tradeoff(values, change_of(key, "bfloat16"))
    elif key == QUANTIZED and config.training.use_peft and not config.peft.q_lora and is_installed("bitsandbytes"):
        yield Tradeoff({key: True}, change_of(key, True))
    elif key == LENGTH:
        length = resolve(config).model.model_max_length
        while isinstance(length, int) and length // 2 >= lever(key).least:
            length //= 2
            yield Tradeoff({key: length}, change_of(key, length))


def traded(before: TrainingConfig, after: TrainingConfig) -> list[str]:
    """The keys at which `after` changes the training result of `before`."""
    return [
        key for key in INEXACT if value_of(before, key) != value_of(after, key) and change_of(key, value_of(after, key))
    ]
