"""The fastest structure and micro batch whose plan fits. Best first: what promises most is looked at more closely,
until the best that was planned as a whole beats every promise. No torch.

A promise is an upper end of speed. A structure of which nothing is known promises what ones that compute no more could
reach at a batch that may fit (nothing: everything). Two depths at two micro batches (`estimate`) turn that into a line,
a third micro batch mends the line where it is used, the plan of the whole model ends the matter and corrects the line.
What the host keeps costs a time of its own: such structures come after all others, where they promise more than the
best of these or none of these fits.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from framework.memory.ledger import Plan
from framework.memory.search.estimate import Estimate, Figures, deepened, depths_of, with_depth
from framework.memory.search.space import (
    ACTIVATIONS,
    COMPILE,
    EXPANDABLE,
    Mix,
    Order,
    Structure,
    kin_of,
    mixed,
    mixes,
    with_rows,
)
from framework.schema.config import TrainingConfig

AT_A_TIME = 2
"""Candidates looked at in one call of `measure`, which may work on several at once."""
WORTH = 1.02
"""A promise of less than this much more speed is not followed up: plans of time are no better."""
WORTH_A_LOOK = 1.04
"""The same for a structure of which nothing is known: its promise is an upper end."""
LIKELY = 1.05
"""Shares over the card by which a line may still be wrong about what does not fit."""
MOST_PLANS = 32
"""Plans of the whole model in one search, each with both settings of the allocator."""
MOST_FILLED_IN = 4
"""Structures of plain code, cheap to plan, that are looked at for the sake of the frontier alone."""
FINALISTS = 3
FIRST_SIZES = (1, 8)
"""Micro batches that a structure is first planned with, those of them that divide."""


class Measure(Protocol):
    """Plans configs; None for one that the built model refuses. Order is kept."""

    def __call__(self, configs: Sequence[TrainingConfig], /) -> Sequence[Plan | None]: ...


class Shortage(Protocol):
    """Says what a plan lacks of the host memory of the machine that it is to run on; None where it lacks nothing."""

    def __call__(self, plan: Plan, /) -> str | None: ...


def no_shortage(_: Plan, /) -> None:
    """Of a machine that is not known."""


class Candidate(NamedTuple):
    """A structure, by its number, at a micro batch."""

    number: int
    micro: int


@dataclass(frozen=True)
class Space:
    """All candidates: every structure with every size, `rows` an optimizer step and device, within `usable` bytes and
    without a `shortage` of host memory."""

    structures: Sequence[Structure]
    sizes: Sequence[int]
    rows: int
    usable: int
    free: Collection[str]
    shortage: Shortage = no_shortage

    @property
    def count(self) -> int:
        return len(self.structures) * len(self.sizes)

    @cached_property
    def mixes(self) -> list[Mix]:
        """What the figures of each structure are a sum of."""
        return mixes(self.structures)

    @cached_property
    def families(self) -> list[tuple[str, ...]]:
        """What each structure's figures depend on; the allocator's settings move only what is cached."""
        return [tuple(word for word in item.name if not word.startswith(EXPANDABLE)) for item in self.structures]

    @cached_property
    def order(self) -> Order:
        """What the structures are to each other."""
        return Order(self.structures)

    def weight(self, number: int) -> int:
        """How far a structure is from the plain settings: of those about as fast the plainer one is taken."""
        return sum(self.structures[number].positions)

    def config(self, candidate: Candidate) -> TrainingConfig:
        return with_rows(self.structures[candidate.number].config, self.rows, candidate.micro, self.free)


@dataclass
class Search:
    """A search under way, and what it found. `estimates` has the structures that were looked at, by their number."""

    space: Space
    measure: Measure
    estimates: dict[int, Estimate] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    plans: dict[Candidate, Plan] = field(default_factory=dict)
    short: dict[Candidate, str] = field(default_factory=dict)
    """What the planned candidates that the host has no room for lack."""
    within: frozenset[int] = frozenset()
    """The structures that are looked at for now."""
    probes: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate whose plan fits; of those about as fast, the one that changes least, then the one that
        takes least."""
        fitting = self._fitting()
        if not fitting:
            return None
        least = min(self._seconds(item) for item in fitting) * WORTH
        near = [item for item in fitting if self._seconds(item) <= least]
        upper = {item: self.plans[item].peak.device_bytes_upper for item in near}
        return min(near, key=lambda item: (self.space.weight(item.number), upper[item], self._seconds(item)))

    @property
    def closest(self) -> Candidate | None:
        """The planned candidate that needs least, of those that the host has room for where there are any."""
        candidates = self.plans.keys() - self.short.keys() or self.plans
        return min(candidates, key=lambda item: self.plans[item].peak.device_bytes_upper, default=None)

    @property
    def computed(self) -> int:
        """Candidates whose bytes and seconds are known, if by a line."""
        return len(self.estimates.keys() - self.refused) * len(self.space.sizes)

    def finalists(self) -> list[Candidate]:
        """The planned candidates that fit, fastest first; a few."""
        return sorted(self._fitting(), key=self._seconds)[:FINALISTS]

    def run(self) -> "Search":
        """Look until nothing promises more than the best, or nothing can fit."""
        everything = frozenset(range(len(self.space.structures)))
        on_the_card = frozenset(number for number in everything if not self.space.structures[number].uses_host)
        for self.within in (on_the_card, everything):
            if self.best is None:
                self._probe(_strongest(self.space.order, self.within))
            while len(self.plans) < MOST_PLANS and (chosen := self._most_promising()):
                self._probe([number for number, micro in chosen if micro is None])
                sized = [Candidate(number, micro) for number, micro in chosen if micro is not None]
                near = [item for item in sized if item.micro not in self.estimates[item.number].shallow]
                self._plan_shallow(near)  # a line with a point at this size first, then the plan of the whole model
                self._plan_whole([item for item in sized if item not in near])
        return self

    def fill_in(self) -> None:
        """Look at plain code that the search could do without: many candidates follow from few structures."""
        unknown = set(range(len(self.space.structures))) - self.estimates.keys() - self.refused
        parents = {parent for number in unknown for parent in self._parents(number) if parent not in self.estimates}
        plain = [number for number in sorted(parents) if self.space.structures[number].choices[COMPILE] is not True]
        families = {self.space.families[number]: number for number in reversed(plain)}
        self._probe(sorted(families.values())[:MOST_FILLED_IN])

    def points(self) -> list[tuple[Candidate, float, float]]:
        """(candidate, upper end of device bytes, seconds of a step) at sizes that were planned, if with few layers."""
        most = max((share for estimate in self.estimates.values() for share in estimate.corrections), default=1.0)
        return [
            (Candidate(number, size), estimate.told(size, most), estimate.seconds(size))
            for number, estimate in self.estimates.items()
            for size in {*estimate.shallow, *estimate.planned}
            if not self._is_short(number, size)
        ]

    def _fitting(self) -> list[Candidate]:
        fitting = (item for item, plan in self.plans.items() if plan.peak.device_bytes_upper <= self.space.usable)
        return [item for item in fitting if item not in self.short]

    def _seconds(self, item: Candidate) -> float:
        return Figures.of(self.plans[item]).seconds

    def _most_promising(self) -> list[tuple[int, int | None]]:
        """The structures to look at next, with the size at which, or None where nothing is known of one yet.

        Until something was planned that fits, the best that is known goes first, so that there is a mark to beat.
        """
        best = self.best
        mark = self._seconds(best) if best is not None else math.inf
        known = sorted(promise for promise in self._known_promises() if promise[0] < mark / WORTH)
        unknown = sorted(promise for promise in self._unknown_promises() if promise[0] < mark / WORTH_A_LOOK)
        promises = sorted([*known, *unknown]) if best is not None else [*known[:1], *unknown]
        if not promises and best is None:
            return self._smallest()
        families = {self.space.families[number]: (number, size) for _, _, number, size in reversed(promises)}
        return list(reversed(families.values()))[:AT_A_TIME]

    def _known_promises(self) -> Iterator[tuple[float, int, int, int | None]]:
        """(seconds, weight, number, size) of the fastest size of each structure that may fit and was not planned."""
        for number in (self.estimates.keys() - self.refused) & self.within:
            estimate = self.estimates[number]
            fitting = [size for size in self._open(number) if estimate.upper(size) <= self.space.usable]
            if fitting:
                size = min(fitting, key=estimate.seconds)
                yield estimate.seconds(size), self.space.weight(number), number, size

    def _unknown_promises(self) -> Iterator[tuple[float, int, int, int | None]]:
        """The same for structures of which nothing is known, the most promising of those that are known together."""
        together: dict[frozenset[tuple[str, ...]], tuple[float, int, int, int | None]] = {}
        least = self._least_seconds()
        for number in sorted(self.within - self.estimates.keys() - self.refused):
            if all(self._is_short(number, size) for size in self.space.sizes):
                continue
            parents = [parent for parent in self._parents(number) if parent not in self.estimates]
            behind = frozenset(self.space.families[parent] for parent in parents)
            promise = float(least[number]), self.space.weight(number), number, None
            together[behind] = min(promise, together.get(behind, promise))
        yield from (promise for promise in together.values() if promise[0] < math.inf)

    def _smallest(self) -> list[tuple[int, int | None]]:
        """The candidate that needs least, when its line is not far over the card, or where nothing of its kind, on the
        card or by the host, was planned yet and it needs less than all that was."""
        needs = [
            (self.estimates[number].upper(size), number, size)
            for number in (self.estimates.keys() - self.refused) & self.within
            for size in self._open(number)
        ]
        if not needs:
            return []
        need, number, size = min(needs)
        uses_host = self.space.structures[number].uses_host
        is_first = all(self.space.structures[item.number].uses_host != uses_host for item in self.plans)
        is_less = all(need < plan.peak.device_bytes_upper for plan in self.plans.values())
        return [(number, size)] if (is_first and is_less) or need <= self.space.usable * LIKELY else []

    def _open(self, number: int) -> list[int]:
        """Sizes at which a structure was not planned as a whole, and for which the host may have room."""
        planned = self.estimates[number].planned
        return [size for size in self.space.sizes if size not in planned and not self._is_short(number, size)]

    def _is_short(self, number: int, size: int) -> bool:
        """Whether the host has no room for a candidate, or for one that keeps no more there. Of what it keeps the
        activations alone grow with the rows."""
        structure = self.space.structures[number]
        for other, micro in self.short:
            lacking = self.space.structures[other]
            grows = lacking.choices[ACTIVATIONS] is True
            if (size >= micro or not grows) and structure.needs_no_less_host_than(lacking):
                return True
        return False

    def _least_seconds(self) -> npt.NDArray[np.float64]:
        """Seconds that each structure needs at least, at the sizes at which it may fit; infinite where there are none.

        One that takes no more memory says what is too large, and so do the rows of one that keeps more on the card."""
        sizes, usable = self.space.sizes, self.space.usable * LIKELY
        least = np.zeros((len(self.space.structures), len(sizes)))
        for other, known in self.estimates.items():
            upper, grown, seconds = (
                np.array([*map(told, sizes)]) for told in (known.upper, known.grown, known.seconds)
            )
            no_smaller, no_faster, same_rows = (flags[:, None] for flags in self.space.order.to(other))
            is_too_large = (no_smaller & (upper > usable)) | (same_rows & (grown > usable))
            least = np.maximum(least, np.where(is_too_large, math.inf, np.where(no_faster, seconds, 0.0)))
        return least.min(axis=1)  # type: ignore[no-any-return]

    def _probe(self, numbers: Sequence[int]) -> None:
        """Plan structures of which nothing is known with few layers, at the first sizes."""
        sizes = [size for size in FIRST_SIZES if size in self.space.sizes]
        if len(sizes) < len(FIRST_SIZES):
            sizes = sorted({self.space.sizes[0], self.space.sizes[-1]})
        self._plan_shallow([Candidate(number, size) for number in numbers for size in sizes])

    def _plan_shallow(self, wanted: Sequence[Candidate]) -> None:
        """Figures from two depths. Structures that differ in the allocator alone share them."""
        behind = [Candidate(parent, item.micro) for item in wanted for parent in self._parents(item.number)]
        new = [item for item in behind if item.micro not in self._shallow(item.number)]
        asked = list({(self.space.families[item.number], item.micro): item for item in new}.values())
        depths = [depths_of(self.space.structures[item.number].config) for item in asked]
        configs: list[TrainingConfig] = []
        for item, depth in zip(asked, depths, strict=True):
            config = without_evaluation(self.space.config(item))
            configs += [with_depth(config, count) for count in (depth.few, depth.more)] if depth else [config]
        plans = iter(self.measure(configs) if configs else ())
        self.probes += len(configs)
        for item, depth in zip(asked, depths, strict=True):
            few = next(plans)
            more = next(plans) if depth else few
            figures = None if few is None or more is None else deepened(few, more, depth)
            self._keep(item, figures)

    def _parents(self, number: int) -> Mix:
        """The structures to plan for the figures of one, with their weights."""
        mix = self.space.mixes[number]
        return {number: 1.0} if self.refused & mix.keys() else mix

    def _shallow(self, number: int) -> Mapping[int, Figures]:
        return self.estimates[number].shallow if number in self.estimates else {}

    def _keep(self, item: Candidate, figures: Figures | None) -> None:
        """Note figures for all structures that have them, and what follows for others."""
        family = self.space.families[item.number]
        same = {number for number, other in enumerate(self.space.families) if other == family}
        if figures is None:
            self.refused |= same
            return
        for number in same:
            self.estimates.setdefault(number, Estimate()).shallow[item.micro] = figures
        for number in range(len(self.space.structures)):
            parents = self._parents(number)
            parts = [(self._shallow(parent).get(item.micro), weight) for parent, weight in parents.items()]
            known = [(figures, weight) for figures, weight in parts if figures is not None]
            if number not in parents and same & parents.keys() and len(known) == len(parents):
                self.estimates.setdefault(number, Estimate()).shallow[item.micro] = mixed(known)

    def _lend(self, number: int) -> None:
        """Let those that differ from a structure in their checkpoints alone be corrected by its plans, and those that
        keep another part on the host until one of theirs was planned."""
        lender = self.space.structures[number]
        kin = kin_of(lender)
        for other, estimate in self.estimates.items():
            borrower = self.space.structures[other]
            is_nearest = borrower.uses_host == lender.uses_host or estimate.lender is None
            if other != number and is_nearest and kin_of(borrower) == kin:
                estimate.lender = self.estimates[number]

    def _plan_whole(self, chosen: Sequence[Candidate]) -> None:
        """Plan candidates as a whole, with every setting of the allocator: these share a rehearsal."""
        families = [(self.space.families[item.number], item.micro) for item in chosen]
        wanted = [
            Candidate(number, micro)
            for family, micro in families
            for number, other in enumerate(self.space.families)
            if other == family and Candidate(number, micro) not in self.plans
        ]
        plans = self.measure([self.space.config(item) for item in wanted]) if wanted else ()
        for item, plan in zip(wanted, plans, strict=True):
            if plan is None:
                self.refused.add(item.number)
                continue
            self.plans[item] = plan
            if (lacking := self.space.shortage(plan)) is not None:
                self.short[item] = lacking
            self.estimates[item.number].planned[item.micro] = plan
            self._lend(item.number)


def without_evaluation(config: TrainingConfig) -> TrainingConfig:
    """The config without evaluation, which takes half of a rehearsal and less memory than training at its batch."""
    data = config.data.model_copy(update={"eval": (), "eval_fraction": 0.0})
    training = config.training.model_copy(update={"eval_steps": None})
    return config.model_copy(update={"data": data, "training": training})


def _strongest(order: Order, within: frozenset[int]) -> list[int]:
    """Structures that no other of them is sure to be smaller than: when these do not fit, little else can."""
    is_larger = np.zeros(order.count, dtype=bool)
    for other in within:
        is_larger |= order.is_no_smaller(other) & (np.arange(order.count) != other)
    return [number for number in sorted(within) if not is_larger[number]]
