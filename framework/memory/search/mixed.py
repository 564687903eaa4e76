"""Structures whose figures follow from those of others. Arithmetic; no torch.

With every n-th block checkpointed a model costs what lies between no block and all blocks, by the share of its blocks
that are: against plans of whole models the peak is within 0.2 % so, and seconds are linear in the blocks that compute
again. Another chunk of the loss adds and takes the same whatever the blocks do, and so do optimizer states, or all that
a device has of a sharded model, in host memory. Plans of whole models correct all of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.memory.levers import word
from framework.memory.search.estimate import Figures, depths_of
from framework.memory.search.space import CHECKPOINTS, CHUNKS, EVERY, EXPANDABLE, PARTS, SHARDING, STATES, Structure

Mix = Mapping[int, float]
"""Structure, by number -> its weight in a sum of figures."""


def mixes(structures: Sequence[Structure]) -> list[Mix]:
    """What the figures of each structure are a sum of: of its own alone, or of those of others."""
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
    """Structures, their numbers by name, the plainest of them, and the smallest chunk of the loss."""

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
        """The structure with all of it on the card, and the difference that the plainest one shows."""
        mine, plain = self.structures[number], self.plain
        moved = [key for key in (STATES, PARTS) if key in mine.choices and mine.choices[key] != plain.choices[key]]
        beside = {key: mine.choices[key] for key in mine.choices if key == EXPANDABLE or key in SHARDING}
        here = {key: plain.choices[key] for key in moved}
        base = self.numbers.get(_name(mine, here))
        away = {key: mine.choices[key] for key in moved}
        this = self.numbers.get(_name(plain, {**beside, CHUNKS: self.least, **away}))
        there = self.numbers.get(_name(plain, {**beside, CHUNKS: self.least, **here}))
        if not moved or base is None or this is None or there is None or number in (base, this):
            return {number: 1.0}
        return {base: 1.0, this: 1.0, there: -1.0}

    def of_chunks(self, number: int) -> Mix:
        """The structure with the smallest chunks, which a search looks at first, and the difference that the plainest
        one shows."""
        mine, plain = self.structures[number], self.plain
        beside = {EXPANDABLE: mine.choices[EXPANDABLE]}
        base = self.numbers.get(_name(mine, {CHUNKS: self.least}))
        this = self.numbers.get(_name(plain, {**beside, CHUNKS: mine.choices[CHUNKS]}))
        there = self.numbers.get(_name(plain, {**beside, CHUNKS: self.least}))
        if base is None or this is None or there is None or number in (base, this):
            return {number: 1.0}
        return {base: 1.0, this: 1.0, there: -1.0}

    def of_checkpoints(self, number: int) -> Mix:
        """Without checkpoints and with all of them, by the share of blocks that have one."""
        mine = self.structures[number]
        none = self.numbers.get(_name(mine, {CHECKPOINTS: False, EVERY: 1}))
        full = self.numbers.get(_name(mine, {EVERY: 1}))
        depths = depths_of(self.structures[none].config) if none is not None else None
        if none is None or full is None or depths is None or number in (none, full):
            return {number: 1.0}
        share = math.ceil(depths.all / mine.choices[EVERY]) / depths.all
        return {none: 1.0 - share, full: share}


def _name(structure: Structure, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of the structure that differs in these choices."""
    return tuple(f"{key}={word(value)}" for key, value in {**structure.choices, **changes}.items())


def kin_of(structure: Structure) -> tuple[str, ...]:
    """What structures have in common that differ in their checkpoints alone, or in what the host keeps for them."""
    moved = {key: None for key in (CHECKPOINTS, EVERY, STATES, PARTS) if key in structure.choices}
    return _name(structure, moved)


def mixed(parts: Sequence[tuple[Figures, float]]) -> Figures:
    """The sum of figures with weights."""
    phases = parts[0][0].allocated
    return Figures(
        {name: sum(weight * part.allocated[name] for part, weight in parts) for name in phases},
        sum(weight * part.others for part, weight in parts),
        sum(weight * part.upper for part, weight in parts),
        sum(weight * part.seconds for part, weight in parts),
    )
