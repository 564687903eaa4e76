"""What a search may choose from: structures (every lever but the micro batch), and the micro batches of a global batch.

Values come from the levers table: which are worth trying and in which order, with their hardware, package and company.
No torch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from framework.memory.editing import default_of, possible, with_values
from framework.memory.levers import LEVERS, Axis, lever, word
from framework.memory.requirements import is_installed, suits
from framework.memory.search.estimate import depths_of
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of

MICRO_BATCH = "training.per_device_train_batch_size"
EVAL_BATCH = "training.per_device_eval_batch_size"
ACCUMULATION = "training.gradient_accumulation_steps"
GLOBAL_BATCH = "training.global_batch_size"
EXPANDABLE = "training.allocator.expandable_segments"
CHECKPOINTS = "training.enable_gradient_checkpointing"
EVERY = "training.gradient_checkpointing_every"
_BUDGET = "training.activation_memory_budget"
COMPILE = "training.compile"
CHUNKS = "model.chunked_loss"
ACTIVATIONS = "training.activation_offload"

STATES, BASE, PARTS = "training.optimizer_offload", "model.offload_frozen_base", "fsdp.cpu_offload"

AXES: Mapping[str, Axis] = {row.key: row.search for row in LEVERS if row.search is not None}
"""Every lever that `fit` moves without being asked; none of them changes what is learned."""
Table = Mapping[str, tuple[Any, ...]]
SHARDING: Table = {key: axis.values for key, axis in AXES.items() if key.startswith("fsdp.")}
"""What several devices may split between them."""
OFF_THE_CARD: Table = {key: axis.values for key, axis in AXES.items() if axis.values and key not in SHARDING}
EXACT: Table = {key: values for key, values in OFF_THE_CARD.items() if not AXES[key].on_host}
"""Those that move neither weights nor states over the link at each step."""
FINE = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
"""Values of `gradient_checkpointing_every` where its figures are arithmetic on others (`mixed`), so that many cost no
more than few."""
LARGEST_MICRO_BATCH = 128
"""Rows a forward pass; a card that these do not fill is filled by no more."""


@dataclass(frozen=True)
class Structure:
    """A config with everything decided but its micro batch. `positions` are those of `choices` in the table."""

    config: TrainingConfig
    choices: Mapping[str, Any]
    positions: tuple[int, ...]

    @property
    def name(self) -> tuple[str, ...]:
        return tuple(f"{key}={word(value)}" for key, value in self.choices.items())

    @property
    def uses_host(self) -> bool:
        """Whether more is kept in host memory than the free levers make necessary."""
        places = dict(zip(self.choices, self.positions, strict=True))
        return any(place > 1 for key, place in places.items() if AXES[key].on_host)

    def needs_no_less_host_than(self, other: "Structure") -> bool:
        """Whether it keeps all in host memory that `other` keeps there, split over as many devices."""
        return all(
            mine >= its if AXES[key].on_host or key == ACTIVATIONS else mine == its or key not in SHARDING
            for key, mine, its in zip(self.choices, self.positions, other.positions, strict=True)
        )

    def is_no_slower_than(self, other: "Structure") -> bool:
        """Whether it takes no longer at the same batch. Of chunks of the loss the smaller are no faster, and none is
        sure to be slower than all logits at once."""
        return self._is_below(other, lambda key: AXES[key].slower or (key == CHUNKS and self.choices[key] is not False))

    def is_no_smaller_than(self, other: "Structure") -> bool:
        """Whether it takes at least the memory of `other` at the same batch."""
        return self._is_below(other, lambda key: AXES[key].smaller)

    def differs_by_host(self, other: "Structure") -> bool:
        """Whether nothing but what is kept in host memory may be another: the same grows with the rows."""
        return all(
            mine == its or AXES[key].on_host
            for key, mine, its in zip(self.choices, self.positions, other.positions, strict=True)
        )

    def _is_below(self, other: "Structure", is_ordered: Callable[[str], bool]) -> bool:
        pairs = zip(self.choices, self.positions, other.positions, strict=True)
        return all(mine == its or (mine < its and is_ordered(key)) for key, mine, its in pairs)


def with_rows(config: TrainingConfig, rows: int, micro: int, free: Collection[str]) -> TrainingConfig:
    """The config with `micro` rows a forward pass of `rows` an optimizer step and device; evaluation with no more."""
    changes: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "global_batch_size": None,
    }
    written = config.training.per_device_eval_batch_size
    if EVAL_BATCH in free and isinstance(written, int):  # unset, it follows by itself
        changes["per_device_eval_batch_size"] = min(written, micro)
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def with_preferred(config: TrainingConfig, free: Collection[str]) -> TrainingConfig:
    """The config with the value that is better in every way where a free key holds the worse one."""
    known = {key: axis.better for key, axis in AXES.items() if axis.better is not None and key in free}
    changes = {
        key: better.value
        for key, better in known.items()
        if value_of(config, key) == better.than and suits(better.hardware, config.gpu)
    }
    return with_values(config, changes) if changes else config


def table_of(config: TrainingConfig) -> Table:
    """All exact levers, with what there is to choose on several devices where there are."""
    return OFF_THE_CARD if config.gpu.count == 1 else {**OFF_THE_CARD, **SHARDING}


def micro_batches(config: TrainingConfig, rows: int, free: Collection[str]) -> list[int]:
    """Rows a forward pass that divide the rows of a step on one device, from few to many; a pinned one alone."""
    accumulation = config.training.gradient_accumulation_steps
    if ACCUMULATION not in free and isinstance(accumulation, int):
        return [rows // accumulation]
    if MICRO_BATCH not in free:
        return [int(config.training.per_device_train_batch_size)]
    return [size for size in range(1, min(rows, LARGEST_MICRO_BATCH) + 1) if not rows % size]


def structures(config: TrainingConfig, free: Collection[str], table: Table, runs_here: bool) -> list[Structure]:
    """Every combination of the table's values of free keys that can run. Other keys keep their value."""
    if config.training.task.is_of_rows and CHUNKS in free:  # one answer a row: there are no logits to leave out
        config, free = with_values(config, {CHUNKS: False}), [key for key in free if key != CHUNKS]
    if CHECKPOINTS in free and EVERY in free and (depths := depths_of(config)) is not None:
        table = {**table, EVERY: tuple(every for every in FINE if every < depths.all)}
    axes = {key: _values(config, key, table[key]) if key in free else (value_of(config, key),) for key in table}
    found: list[Structure] = []
    changed_to = _Changed(config, runs_here)
    for chosen in product(*axes.values()):
        choices = dict(zip(axes, chosen, strict=True))
        idle = {key for key in axes if not _has_company(config, key, choices)}
        if any(key in free and not _same(choices[key], default_of(key)) for key in idle):
            continue
        is_as_written = all(_same(value_of(config, key), value) for key, value in choices.items())
        if _is_left_out(choices, free) and not is_as_written:
            continue
        changed = changed_to({key: value for key, value in choices.items() if key in free})
        if changed is not None:
            positions = tuple(0 if key in idle else axes[key].index(value) + 1 for key, value in choices.items())
            found.append(Structure(changed, choices, positions))
    return found


@dataclass
class _Changed:
    """A config with other values, None where that is not possible. What rules say of checkpoints at every second block
    they say of every third: one is asked for all."""

    config: TrainingConfig
    runs_here: bool
    known: dict[tuple[str, ...], TrainingConfig | None] = field(default_factory=dict)

    def __call__(self, values: Mapping[str, Any]) -> TrainingConfig | None:
        every = values.get(EVERY, 1)
        if every == 1:
            return possible(self.config, values, self.runs_here)
        others = tuple(word(value) for key, value in values.items() if key != EVERY)
        if others not in self.known:
            self.known[others] = possible(self.config, values, self.runs_here)
        like = self.known[others]
        if like is None:
            return None
        return like.model_copy(
            update={"training": like.training.model_copy(update={"gradient_checkpointing_every": every})}
        )


def _is_left_out(choices: Mapping[str, Any], free: Collection[str]) -> bool:
    """Whether freely chosen values do what others do better: next to checkpoints a budget is for one block at work."""
    return choices.get(CHECKPOINTS) is True and choices.get(_BUDGET) is not None and _BUDGET in free


def _values(config: TrainingConfig, key: str, tried: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values to try less those that card or packages rule out; the one that is there now is the first of others."""
    now = value_of(config, key)
    now = 1024 if key == CHUNKS and now in (True, None) else now
    known = [value for value in tried if _can_be_had(config, key, value)]
    if not any(_same(now, value) for value in known):
        known.insert(1, now)
    return tuple(known)


def _can_be_had(config: TrainingConfig, key: str, value: Any) -> bool:
    setting = next((item for item in lever(key).settings if _same(item.value, value)), None)
    if setting is None:
        return True
    return suits(setting.hardware, config.gpu) and all(map(is_installed, filter(None, setting.package.split(", "))))


def _has_company(config: TrainingConfig, key: str, choices: Mapping[str, Any]) -> bool:
    """Whether the other keys are such that this one has an effect."""
    beside = lever(key).settings[0].beside
    return all(
        _same(choices[name] if name in choices else value_of(config, name), value) for name, value in beside.items()
    )


def _same(a: Any, b: Any) -> bool:
    return a is b or word(a) == word(b)
