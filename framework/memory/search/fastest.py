"""Best-first search for the fastest structure and micro-batch whose plan fits: the candidate with the best optimistic
estimate (bound) is refined, until the best fully planned one beats every bound. No torch.

A bound is an upper limit of speed. An unknown structure's bound comes from structures that compute no more, at a batch
that may fit (without any it is unlimited). Plans with two depths at two micro-batches (`estimate`) turn that into a
line, a third micro-batch improves the line where it is used, and the plan of the whole model decides and corrects the
line. Structures that keep more in host memory add a fixed time: they are tried last, if their bound beats the best of
the others or none of those fits.
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
    mixed,
    mixes,
    related_key,
    with_rows,
)
from framework.schema.config import TrainingConfig

AT_A_TIME = 2
"""Candidates per call of `measure`, which may plan several in parallel."""
WORTH = 1.02
"""Smallest relative gain in speed worth following, since time plans are not more accurate."""
WORTH_A_LOOK = 1.04
"""The same for an unknown structure, whose bound is optimistic."""
LIKELY = 1.05
"""Excess over the card's memory up to which an extrapolated candidate may still fit."""
MOST_PLANS = 32
"""Limit of full plans in one search, each with both settings of the allocator."""
MOST_FILLED_IN = 4
"""Eager structures, cheap to plan, that are planned only for the frontier."""
FINALISTS = 3
FIRST_SIZES = (1, 8)
"""Micro-batches with which a structure is planned first, if they divide the rows."""


class Measure(Protocol):
    """Plans configs in order; None for one that the built model refuses."""

    def __call__(self, configs: Sequence[TrainingConfig], /) -> Sequence[Plan | None]: ...


class Shortage(Protocol):
    """Describes a plan's shortage of host memory on the machine that trains; None if there is none."""

    def __call__(self, plan: Plan, /) -> str | None: ...


def no_shortage(_: Plan, /) -> None:
    """No shortage, for an unknown machine."""


class Candidate(NamedTuple):
    """A structure, by its number, with a micro-batch."""

    number: int
    micro: int


@dataclass(frozen=True)
class Space:
    """All candidates: every structure with every micro-batch size, for `rows` per optimizer step and device, limited by
    `usable` bytes and a `shortage` of host memory."""

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
        """The structures whose weighted sum gives each structure's figures."""
        return mixes(self.structures)

    @cached_property
    def families(self) -> list[tuple[str, ...]]:
        """Key of each structure's figures, without the allocator's settings, which affect only the cache."""
        return [tuple(word for word in item.name if not word.startswith(EXPANDABLE)) for item in self.structures]

    @cached_property
    def order(self) -> Order:
        """Relations between the structures."""
        return Order(self.structures)

    def weight(self, number: int) -> int:
        """Distance of a structure from the plain settings; among about equally fast ones the plainest is chosen."""
        return sum(self.structures[number].positions)

    def config(self, candidate: Candidate) -> TrainingConfig:
        return with_rows(self.structures[candidate.number].config, self.rows, candidate.micro, self.free)


@dataclass
class Search:
    """State and results of a search. `estimates` has the known structures, by number."""

    space: Space
    measure: Measure
    estimates: dict[int, Estimate] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    plans: dict[Candidate, Plan] = field(default_factory=dict)
    short: dict[Candidate, str] = field(default_factory=dict)
    """Host-memory shortages of planned candidates."""
    within: frozenset[int] = frozenset()
    """The structures currently considered."""
    probes: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate whose plan fits; among about equally fast ones the one with fewest changes, then the
        one with least memory."""
        fitting = self._fitting()
        if not fitting:
            return None
        least = min(self._seconds(item) for item in fitting) * WORTH
        near = [item for item in fitting if self._seconds(item) <= least]
        upper = {item: self.plans[item].peak.device_bytes_upper for item in near}
        return min(near, key=lambda item: (self.space.weight(item.number), upper[item], self._seconds(item)))

    @property
    def closest(self) -> Candidate | None:
        """The planned candidate with least memory, among those without a host-memory shortage if there are any."""
        candidates = self.plans.keys() - self.short.keys() or self.plans
        return min(candidates, key=lambda item: self.plans[item].peak.device_bytes_upper, default=None)

    @property
    def computed(self) -> int:
        """Number of candidates with known or extrapolated bytes and seconds."""
        return len(self.estimates.keys() - self.refused) * len(self.space.sizes)

    def finalists(self) -> list[Candidate]:
        """The few fastest planned candidates that fit, fastest first."""
        return sorted(self._fitting(), key=self._seconds)[:FINALISTS]

    def run(self) -> "Search":
        """Search until no bound beats the best, or nothing can fit."""
        everything = frozenset(range(len(self.space.structures)))
        on_the_card = frozenset(number for number in everything if not self.space.structures[number].uses_host)
        for self.within in (on_the_card, everything):
            if self.best is None:
                self._probe(_strongest(self.space.order, self.within))
            while len(self.plans) < MOST_PLANS and (chosen := self._best_bounds()):
                self._probe([number for number, micro in chosen if micro is None])
                sized = [Candidate(number, micro) for number, micro in chosen if micro is not None]
                near = [item for item in sized if item.micro not in self.estimates[item.number].shallow]
                self._plan_shallow(near)  # first a line with a point at this size, then the plan of the whole model
                self._plan_whole([item for item in sized if item not in near])
        return self

    def fill_in(self) -> None:
        """Also plan eager structures that the search did not need: many candidates follow from few of them."""
        unknown = set(range(len(self.space.structures))) - self.estimates.keys() - self.refused
        parents = {parent for number in unknown for parent in self._parents(number) if parent not in self.estimates}
        plain = [number for number in sorted(parents) if self.space.structures[number].choices[COMPILE] is not True]
        families = {self.space.families[number]: number for number in reversed(plain)}
        self._probe(sorted(families.values())[:MOST_FILLED_IN])

    def points(self) -> list[tuple[Candidate, float, float]]:
        """(candidate, upper bound of device bytes, seconds per step) at sizes planned with full or reduced depth."""
        most = max((share for estimate in self.estimates.values() for share in estimate.corrections), default=1.0)
        return [
            (Candidate(number, size), estimate.reported(size, most), estimate.seconds(size))
            for number, estimate in self.estimates.items()
            for size in {*estimate.shallow, *estimate.planned}
            if not self._is_short(number, size)
        ]

    def _fitting(self) -> list[Candidate]:
        fitting = (item for item, plan in self.plans.items() if plan.peak.device_bytes_upper <= self.space.usable)
        return [item for item in fitting if item not in self.short]

    def _seconds(self, item: Candidate) -> float:
        return Figures.of(self.plans[item]).seconds

    def _best_bounds(self) -> list[tuple[int, int | None]]:
        """The structures to refine next, each with a size, or None for an unknown structure.

        Until a fitting plan exists, the best known one comes first, to have a speed to beat.
        """
        best = self.best
        mark = self._seconds(best) if best is not None else math.inf
        known = sorted(bound for bound in self._known_bounds() if bound[0] < mark / WORTH)
        unknown = sorted(bound for bound in self._unknown_bounds() if bound[0] < mark / WORTH_A_LOOK)
        bounds = sorted([*known, *unknown]) if best is not None else [*known[:1], *unknown]
        if not bounds and best is None:
            return self._smallest()
        families = {self.space.families[number]: (number, size) for _, _, number, size in reversed(bounds)}
        return list(reversed(families.values()))[:AT_A_TIME]

    def _known_bounds(self) -> Iterator[tuple[float, int, int, int | None]]:
        """(seconds, weight, number, size) of the fastest unplanned size of each known structure that may fit."""
        for number in (self.estimates.keys() - self.refused) & self.within:
            estimate = self.estimates[number]
            fitting = [size for size in self._open(number) if estimate.upper(size) <= self.space.usable]
            if fitting:
                size = min(fitting, key=estimate.seconds)
                yield estimate.seconds(size), self.space.weight(number), number, size

    def _unknown_bounds(self) -> Iterator[tuple[float, int, int, int | None]]:
        """The same for unknown structures that have the best bound among those whose figures are computed together."""
        together: dict[frozenset[tuple[str, ...]], tuple[float, int, int, int | None]] = {}
        least = self._least_seconds()
        for number in sorted(self.within - self.estimates.keys() - self.refused):
            if all(self._is_short(number, size) for size in self.space.sizes):
                continue
            parents = [parent for parent in self._parents(number) if parent not in self.estimates]
            behind = frozenset(self.space.families[parent] for parent in parents)
            bound = float(least[number]), self.space.weight(number), number, None
            together[behind] = min(bound, together.get(behind, bound))
        yield from (bound for bound in together.values() if bound[0] < math.inf)

    def _smallest(self) -> list[tuple[int, int | None]]:
        """The candidate with least memory, if its line is not far over the card, or if no candidate of its kind (on the
        card or with host memory) was planned yet and it needs less than all planned ones."""
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
        """Sizes at which a structure has no full plan and host memory may suffice."""
        planned = self.estimates[number].planned
        return [size for size in self.space.sizes if size not in planned and not self._is_short(number, size)]

    def _is_short(self, number: int, size: int) -> bool:
        """Whether host memory does not suffice for a candidate, because it did not for one that needs no more. Only
        offloaded activations grow with the rows."""
        structure = self.space.structures[number]
        for other, micro in self.short:
            lacking = self.space.structures[other]
            grows = lacking.choices[ACTIVATIONS] is True
            if (size >= micro or not grows) and structure.needs_no_less_host_than(lacking):
                return True
        return False

    def _least_seconds(self) -> npt.NDArray[np.float64]:
        """Lower bound of each structure's seconds, at the sizes at which it may fit; infinite if there are none.

        A size is too large if it is for a structure with no more memory, or for one with less in host memory."""
        sizes, usable = self.space.sizes, self.space.usable * LIKELY
        least = np.zeros((len(self.space.structures), len(sizes)))
        for other, known in self.estimates.items():
            upper, grown, seconds = (
                np.array([*map(figure, sizes)]) for figure in (known.upper, known.grown, known.seconds)
            )
            no_smaller, no_faster, same_rows = (flags[:, None] for flags in self.space.order.to(other))
            is_too_large = (no_smaller & (upper > usable)) | (same_rows & (grown > usable))
            least = np.maximum(least, np.where(is_too_large, math.inf, np.where(no_faster, seconds, 0.0)))
        return least.min(axis=1)  # type: ignore[no-any-return]

    def _probe(self, numbers: Sequence[int]) -> None:
        """Plan unknown structures with few layers, at the first sizes."""
        sizes = [size for size in FIRST_SIZES if size in self.space.sizes]
        if len(sizes) < len(FIRST_SIZES):
            sizes = sorted({self.space.sizes[0], self.space.sizes[-1]})
        self._plan_shallow([Candidate(number, size) for number in numbers for size in sizes])

    def _plan_shallow(self, wanted: Sequence[Candidate]) -> None:
        """Compute figures from two depths, shared by structures that differ only in the allocator."""
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
        """The structures to plan for one structure's figures, with their weights."""
        mix = self.space.mixes[number]
        return {number: 1.0} if self.refused & mix.keys() else mix

    def _shallow(self, number: int) -> Mapping[int, Figures]:
        return self.estimates[number].shallow if number in self.estimates else {}

    def _keep(self, item: Candidate, figures: Figures | None) -> None:
        """Store figures for all structures that share them, and derived figures for others."""
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
        """Let a structure's plans correct those that differ only in checkpointing, and those that offload differently
        until they have a plan of their own."""
        lender = self.space.structures[number]
        related = related_key(lender)
        for other, estimate in self.estimates.items():
            borrower = self.space.structures[other]
            is_nearest = borrower.uses_host == lender.uses_host or estimate.lender is None
            if other != number and is_nearest and related_key(borrower) == related:
                estimate.lender = self.estimates[number]

    def _plan_whole(self, chosen: Sequence[Candidate]) -> None:
        """Plan candidates with the whole model, with every setting of the allocator, which share a rehearsal."""
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
    """The config without evaluation, which takes half the time of a rehearsal and needs less memory than training."""
    data = config.data.model_copy(update={"eval": (), "eval_fraction": 0.0})
    training = config.training.model_copy(update={"eval_steps": None})
    return config.model_copy(update={"data": data, "training": training})


def _strongest(order: Order, within: frozenset[int]) -> list[int]:
    """Structures of which no other is certainly smaller: if these do not fit, little else can."""
    is_larger = np.zeros(order.count, dtype=bool)
    for other in within:
        is_larger |= order.is_no_smaller(other) & (np.arange(order.count) != other)
    return [number for number in sorted(within) if not is_larger[number]]
