"""Which keys a search may move, and the config it starts from. No torch."""

from collections.abc import Collection

from framework.errors import Problem, RequestError
from framework.memory.editing import default_of, with_values
from framework.memory.search.space import ACCUMULATION, AXES, GLOBAL_BATCH, MICRO_BATCH
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key, left_open, unknown
from framework.schema.rules.data import rows_of_global_batch


def opened(config: TrainingConfig) -> TrainingConfig:
    """The config with the plain value in place of each `auto`: where a search of these keys starts.

    Raises RequestError where a micro batch is left open and the rows of an optimizer step are not written.
    """
    plain = {key: default_of(key) for key in left_open(config)}
    if MICRO_BATCH in plain:
        plain |= {MICRO_BATCH: _largest_micro_batch(config), ACCUMULATION: None}
    return with_values(config, plain) if plain else config


def _largest_micro_batch(config: TrainingConfig) -> int:
    """The most rows of a forward pass, up to the default, that divide the rows of a step on one device."""
    written = config.training.global_batch_size
    if written is None:
        message = "the search keeps the global batch, which nothing says while this is `auto`"
        raise RequestError([Problem(MICRO_BATCH, message, expected=f"{GLOBAL_BATCH} next to it")])
    if (rows := rows_of_global_batch(config, None, int(default_of(MICRO_BATCH)))) is None:
        shares = config.gpu.count // config.sharing
        message = f"{written} rows are not equal shares of {shares} devices"
        raise RequestError([Problem(GLOBAL_BATCH, message, expected=f"a multiple of {shares}")])
    return rows


def freedom(pins: Collection[str]) -> set[str]:
    """The keys that `fit` may move. A pin is a key or a section. Raises RequestError for one that is neither."""
    strange = [Problem(f"--pin {pin}", *_unknown(pin)) for pin in pins if pin not in every_key()]
    if strange:
        raise RequestError(strange)
    return {key for key in AXES if not any(key == pin or key.startswith(f"{pin}.") for pin in pins)}


def _unknown(key: str) -> tuple[str, None, None, str | None]:
    message, nearest = unknown(tuple(key.split(".")))
    return message, None, None, nearest
