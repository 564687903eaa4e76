"""The levers table: one row for every setting that trades memory for something else.

It determines what a search tries and in which order, what a resumed run may change, the advice after an out-of-memory
error, the verification at start-up, the pairwise tests, and docs/levers.md. No torch.

To add a lever, add its row to a module here and its reader to `framework.build.verify`. Timings name their source
(for an H200 benchmarks/results/levers_h200.json), or say "not measured". `tunesmith levers KEY` prints a row.
"""

from collections.abc import Iterator
from typing import Any

from framework.memory.levers.activations import BATCH, COMPILATION, RECOMPUTE, ROWS
from framework.memory.levers.execution import CACHES, KERNELS, SHARDING, TASKS
from framework.memory.levers.row import Axis, Lever, Setting
from framework.memory.levers.weights import ADAPTERS, FP8, FREEZING, OPTIMIZERS, PRECISION

__all__ = ["LEVERS", "Axis", "Lever", "Setting", "every_setting", "format_value", "lever", "same"]

LEVERS = (
    *BATCH,
    *ROWS,
    *RECOMPUTE,
    *COMPILATION,
    *PRECISION,
    *FP8,
    *OPTIMIZERS,
    *KERNELS,
    *ADAPTERS,
    *FREEZING,
    *TASKS,
    *CACHES,
    *SHARDING,
)
_BY_KEY = {row.key: row for row in LEVERS}


def lever(key: str) -> Lever:
    """The row of `key`. Raises KeyError for a key without one."""
    return _BY_KEY[key]


def every_setting() -> Iterator[tuple[Lever, Setting]]:
    """Yield all settings of all levers, in the order of the table."""
    return ((row, setting) for row in LEVERS for setting in row.settings)


def format_value(value: Any) -> str:
    """Format a value as typed on the command line."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(format_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def same(value: Any, other: Any) -> bool:
    """Whether two values of a key are equal in any spelling. Unset equals `none`."""
    return format_value("none" if value is None else value) == format_value("none" if other is None else other)
