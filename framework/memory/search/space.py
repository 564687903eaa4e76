"""Search space: structures (values of all levers except the micro-batch) and micro-batches of a global batch.

Values and their order come from the levers table, with required hardware, packages and other settings. Also relations
by which a structure's figures follow from those of others. Arithmetic; no torch.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from framework.memory.levers import LEVERS, Axis, format_value, lever, same
from framework.memory.requirements import default_of, is_installed, possible, suits, with_values
from framework.memory.search.estimate import Figures, depths_of
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
"""Levers that `fit` changes by default; all are exact."""
Table = Mapping[str, tuple[Any, ...]]
Flags = npt.NDArray[np.bool_]
SHARDING: Table = {key: axis.values for key, axis in AXES.items() if key.startswith("fsdp.")}
"""Levers of sharding over several devices."""
OFF_THE_CARD: Table = {key: axis.values for key, axis in AXES.items() if axis.values and key not in SHARDING}
EXACT: Table = {key: values for key, values in OFF_THE_CARD.items() if not AXES[key].on_host}
"""Levers that transfer neither weights nor states to or from the host at each step."""
FINE = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
"""Values of `gradient_checkpointing_every` if their figures are derived from others (`mixed`), so that many cost no
more than few."""
LARGEST_MICRO_BATCH = 128
"""Most rows per forward pass; more do not improve utilization."""


@dataclass(frozen=True)
class Structure:
    """A config with everything decided except its micro-batch. `positions` are those of `choices` in the table."""

    config: TrainingConfig
    choices: Mapping[str, Any]
    positions: tuple[int, ...]

    @property
    def name(self) -> tuple[str, ...]:
        return tuple(f"{key}={format_value(value)}" for key, value in self.choices.items())

    @property
    def uses_host(self) -> bool:
        """Whether it offloads more to host memory than the fixed levers do."""
        places = dict(zip(self.choices, self.positions, strict=True))
        return any(place > 1 for key, place in places.items() if AXES[key].on_host)

    def needs_no_less_host_than(self, other: "Structure") -> bool:
        """Whether it keeps everything in host memory that `other` does, sharded over as many devices."""
        return all(
            mine >= its if AXES[key].on_host or key == ACTIVATIONS else mine == its or key not in SHARDING
            for key, mine, its in zip(self.choices, self.positions, other.positions, strict=True)
        )


class Relation(NamedTuple):
    """Certain relations of each structure to another one at the same batch."""

    is_no_smaller: Flags
    """Needs at least the other's memory."""
    is_no_faster: Flags
    has_its_rows: Flags
    """Memory that grows with the rows is equal: only offloading to host memory may differ."""


class Order:
    """Relations between structures. A search needs hundreds of thousands, so they are computed with vectors."""

    def __init__(self, structures: Sequence[Structure]) -> None:
        keys = list(structures[0].choices) if structures else []
        self._places = np.array([item.positions for item in structures], dtype=np.int16).reshape(-1, len(keys))
        self._smaller = np.array([AXES[key].smaller for key in keys], dtype=bool)
        self._on_host = np.array([AXES[key].on_host for key in keys], dtype=bool)
        slower = np.array([AXES[key].slower for key in keys], dtype=bool)
        # Smaller chunks of the loss are never faster, but chunks are not certainly slower than all logits at once.
        chunks = np.array([key == CHUNKS for key in keys], dtype=bool)
        self._slower = [slower | chunks if item.choices[CHUNKS] is not False else slower for item in structures]
        self._known: dict[int, Relation] = {}

    @property
    def count(self) -> int:
        return len(self._places)

    def to(self, other: int) -> Relation:
        """Relations of each structure to the one with that number."""
        if other not in self._known:
            its = self._places[other]
            same, above = self._places == its, self._places > its
            is_no_faster = (same | (above & self._slower[other])).all(axis=1)
            has_its_rows = (same | self._on_host).all(axis=1)
            self._known[other] = Relation(self.is_no_smaller(other), is_no_faster, has_its_rows)
        return self._known[other]

    def is_no_smaller(self, other: int) -> Flags:
        """Whether each structure needs at least the memory of the one with that number."""
        its = self._places[other]
        same, below = self._places == its, self._places < its
        return (same | (below & self._smaller)).all(axis=1)  # type: ignore[no-any-return]


def with_rows(config: TrainingConfig, rows: int, micro: int, free: Collection[str]) -> TrainingConfig:
    """The config with `micro` rows per forward pass and `rows` per optimizer step and device; evaluation uses at most
    as many."""
    changes: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "global_batch_size": None,
    }
    written = config.training.per_device_eval_batch_size
    if EVAL_BATCH in free and isinstance(written, int):  # if unset, it follows automatically
        changes["per_device_eval_batch_size"] = min(written, micro)
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def with_preferred(config: TrainingConfig, free: Collection[str]) -> TrainingConfig:
    """Replace values of free keys for which the table has a strictly better one."""
    known = {key: axis.better for key, axis in AXES.items() if axis.better is not None and key in free}
    changes = {
        key: better.value
        for key, better in known.items()
        if value_of(config, key) == better.than and suits(better.hardware, config.gpu)
    }
    return with_values(config, changes) if changes else config


def table_of(config: TrainingConfig) -> Table:
    """All exact levers, with those of sharding if there are several devices."""
    return OFF_THE_CARD if config.gpu.count == 1 else {**OFF_THE_CARD, **SHARDING}


def micro_batches(config: TrainingConfig, rows: int, free: Collection[str]) -> list[int]:
    """Rows per forward pass that divide the rows of a step on one device, ascending; only the present one if pinned."""
    accumulation = config.training.gradient_accumulation_steps
    if ACCUMULATION not in free and isinstance(accumulation, int):
        return [rows // accumulation]
    if MICRO_BATCH not in free:
        return [int(config.training.per_device_train_batch_size)]
    return [size for size in range(1, min(rows, LARGEST_MICRO_BATCH) + 1) if not rows % size]


def structures(config: TrainingConfig, free: Collection[str], table: Table, runs_here: bool) -> list[Structure]:
    """Every combination of the table's values for free keys that can run. Other keys keep their values."""
    if config.training.task.facts.is_of_rows and CHUNKS in free:  # one answer per row: no logits to chunk
        config, free = with_values(config, {CHUNKS: False}), [key for key in free if key != CHUNKS]
    if CHECKPOINTS in free and EVERY in free and (depths := depths_of(config)) is not None:
        table = {**table, EVERY: tuple(every for every in FINE if every < depths.all)}
    axes = {key: _values(config, key, table[key]) if key in free else (value_of(config, key),) for key in table}
    prerequisites = [(key, tuple(fitting.items())) for key in axes if (fitting := _required(config, key, axes))]
    plain = {key: _places_of(default_of(key), axes[key]) if key in free else range(len(axes[key])) for key in axes}
    found: list[Structure] = []
    changed_to = _Changed(config, runs_here)
    for places in product(*(range(len(values)) for values in axes.values())):
        at = dict(zip(axes, places, strict=True))
        idle = {key for key, others in prerequisites if any(at[name] not in fitting for name, fitting in others)}
        if any(at[key] not in plain[key] for key in idle):
            continue
        choices = {key: axes[key][place] for key, place in at.items()}
        # With checkpoints a budget affects only one block at a time, for which other levers are better.
        is_left_out = choices.get(CHECKPOINTS) is True and choices.get(_BUDGET) is not None and _BUDGET in free
        if is_left_out and not all(same(value_of(config, key), choices[key]) for key in axes):
            continue
        changed = changed_to({key: value for key, value in choices.items() if key in free})
        if changed is not None:
            positions = tuple(0 if key in idle else place + 1 for key, place in at.items())
            found.append(Structure(changed, choices, positions))
    return found


@dataclass
class _Changed:
    """Cache of changed configs, None for impossible ones. Rules treat all values of `gradient_checkpointing_every`
    above one alike, so one is checked for all."""

    config: TrainingConfig
    runs_here: bool
    known: dict[tuple[str, ...], TrainingConfig | None] = field(default_factory=dict)

    def __call__(self, values: Mapping[str, Any]) -> TrainingConfig | None:
        every = values.get(EVERY, 1)
        if every == 1:
            return possible(self.config, values, self.runs_here)
        others = tuple(format_value(value) for key, value in values.items() if key != EVERY)
        if others not in self.known:
            self.known[others] = possible(self.config, values, self.runs_here)
        like = self.known[others]
        if like is None:
            return None
        return like.model_copy(
            update={"training": like.training.model_copy(update={"gradient_checkpointing_every": every})}
        )


def _values(config: TrainingConfig, key: str, tried: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values to try without those that card or packages rule out; a present value outside the table comes first."""
    now = value_of(config, key)
    now = 1024 if key == CHUNKS and now in (True, None) else now
    known = [value for value in tried if _can_be_had(config, key, value)]
    if not any(same(now, value) for value in known):
        known.insert(1, now)
    return tuple(known)


def _can_be_had(config: TrainingConfig, key: str, value: Any) -> bool:
    setting = next((item for item in lever(key).settings if same(item.value, value)), None)
    if setting is None:
        return True
    return suits(setting.hardware, config.gpu) and all(map(is_installed, filter(None, setting.package.split(", "))))


def _required(config: TrainingConfig, key: str, axes: Table) -> Mapping[str, Collection[int]]:
    """Positions that other keys must have on their axes for this one to have an effect; empty if a key without an axis
    has a wrong value."""
    required = lever(key).settings[0].requires
    if any(name not in axes and not same(value_of(config, name), value) for name, value in required.items()):
        return {key: ()}
    return {name: _places_of(value, axes[name]) for name, value in required.items() if name in axes}


def _places_of(value: Any, among: tuple[Any, ...]) -> Collection[int]:
    return {place for place, other in enumerate(among) if same(value, other)}


Mix = Mapping[int, float]
"""Number of a structure -> its weight in a sum of figures."""


def mixes(structures: Sequence[Structure]) -> list[Mix]:
    """The weighted sum that gives each structure's figures: its own, or those of others."""
    if not structures:
        return []
    space = _Space.of(structures)
    found: list[Mix] = []
    for number in range(len(structures)):
        mix: dict[int, float] = {}
        for whole, sign in space.of_host(number).items():
            for part, weight in space.of_chunks(whole).items():
                for other, share in space.of_checkpoints(part).items():
                    mix[other] = mix.get(other, 0.0) + sign * weight * share
        found.append({other: weight for other, weight in mix.items() if weight})
    return found


@dataclass(frozen=True)
class _Space:
    """Structures, their numbers by name, the plainest one, and the smallest chunk of the loss."""

    structures: Sequence[Structure]
    numbers: Mapping[tuple[str, ...], int]
    plain: Structure
    least: Any

    @classmethod
    def of(cls, structures: Sequence[Structure]) -> "_Space":
        plain = min(structures, key=lambda item: sum(item.positions))
        chunks = list(plain.choices).index(CHUNKS)
        least = max(structures, key=lambda item: item.positions[chunks]).choices[CHUNKS]
        return cls(structures, {item.name: number for number, item in enumerate(structures)}, plain, least)

    def of_host(self, number: int) -> Mix:
        """The same structure without offloading, plus the difference of the plainest structure."""
        mine, plain = self.structures[number], self.plain
        moved = [key for key in (STATES, PARTS) if key in mine.choices and mine.choices[key] != plain.choices[key]]
        kept = {key: mine.choices[key] for key in mine.choices if key == EXPANDABLE or key in SHARDING}
        here = {key: plain.choices[key] for key in moved}
        base = self.numbers.get(_name(mine, here))
        away = {key: mine.choices[key] for key in moved}
        this = self.numbers.get(_name(plain, {**kept, CHUNKS: self.least, **away}))
        there = self.numbers.get(_name(plain, {**kept, CHUNKS: self.least, **here}))
        if not moved or base is None or this is None or there is None or number in (base, this):
            return {number: 1.0}
        return {base: 1.0, this: 1.0, there: -1.0}

    def of_chunks(self, number: int) -> Mix:
        """The same structure with the smallest chunks, which a search tries first, plus the difference of the plainest
        structure."""
        mine, plain = self.structures[number], self.plain
        kept = {EXPANDABLE: mine.choices[EXPANDABLE]}
        base = self.numbers.get(_name(mine, {CHUNKS: self.least}))
        this = self.numbers.get(_name(plain, {**kept, CHUNKS: mine.choices[CHUNKS]}))
        there = self.numbers.get(_name(plain, {**kept, CHUNKS: self.least}))
        if base is None or this is None or there is None or number in (base, this):
            return {number: 1.0}
        return {base: 1.0, this: 1.0, there: -1.0}

    def of_checkpoints(self, number: int) -> Mix:
        """Interpolation between no checkpoints and all, by the share of checkpointed blocks."""
        mine = self.structures[number]
        none = self.numbers.get(_name(mine, {CHECKPOINTS: False, EVERY: 1}))
        full = self.numbers.get(_name(mine, {EVERY: 1}))
        depths = depths_of(self.structures[none].config) if none is not None else None
        if none is None or full is None or depths is None or number in (none, full):
            return {number: 1.0}
        share = math.ceil(depths.all / mine.choices[EVERY]) / depths.all
        return {none: 1.0 - share, full: share}


def _name(structure: Structure, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Name of the structure with these choices changed."""
    return tuple(f"{key}={format_value(value)}" for key, value in {**structure.choices, **changes}.items())


def related_key(structure: Structure) -> tuple[str, ...]:
    """Key shared by structures that differ only in checkpointing or offloading."""
    moved = {key: None for key in (CHECKPOINTS, EVERY, STATES, PARTS) if key in structure.choices}
    return _name(structure, moved)


def mixed(parts: Sequence[tuple[Figures, float]]) -> Figures:
    """Weighted sum of figures."""
    phases = parts[0][0].allocated
    return Figures(
        {name: sum(weight * part.allocated[name] for part, weight in parts) for name in phases},
        sum(weight * part.others for part, weight in parts),
        sum(weight * part.upper for part, weight in parts),
        sum(weight * part.seconds for part, weight in parts),
    )
