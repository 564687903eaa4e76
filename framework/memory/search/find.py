"""Search for the settings of a request: with exact levers first, then, if nothing fits or the user allows it, with ones
that change the training result. No torch."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from framework.memory.cards import card_names, read_card
from framework.memory.ledger import Plan
from framework.memory.levers import format_value, lever, same
from framework.memory.requirements import default_of, possible, with_values
from framework.memory.resolve import resolve
from framework.memory.search.estimate import Figures
from framework.memory.search.fastest import (
    WORTH,
    WORTH_A_LOOK,
    Candidate,
    Measure,
    Search,
    Shortage,
    Space,
    no_shortage,
)
from framework.memory.search.found import Change, Found, Point, typed
from framework.memory.search.free_keys import DTYPE, INEXACT, change_of, opened, traded, with_tradeoffs
from framework.memory.search.space import (
    ACTIVATIONS,
    AXES,
    EVAL_BATCH,
    MICRO_BATCH,
    OFF_THE_CARD,
    SHARDING,
    micro_batches,
    structures,
    table_of,
    with_preferred,
    with_rows,
)
from framework.memory.units import size
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams
from framework.schema.keys import left_open, value_of
from framework.schema.plural import counted

STAND_IN = "a6000_48gb"
"""Card whose rates rank candidates if the card's own are unknown; it has the capability assumed for cards known by
size. Its times are not reported."""
RATES = ("bandwidth_bytes_per_second", "fp32_flops", "tf32_flops", "bf16_flops", "fp16_flops")
MOST_POINTS = 10
LARGER_CARDS = 4
"""Most cards on which a closest miss is planned, from the smallest plausible one."""


@dataclass
class _Best:
    """The searches so far and the fastest result."""

    measure: Measure
    free: Collection[str]
    runs_here: bool
    searches: list[Search]
    shortage: Shortage = no_shortage
    chosen: Search | None = None

    def search(self, config: TrainingConfig) -> bool:
        """Search a config, and keep its result if that is worth the changes. Returns whether something fits."""
        rows = config.batch.global_size // config.batch.world
        found = structures(config, self.free, table_of(config), self.runs_here)
        usable = config.gpu.usable_bytes or 0
        space = Space(found, micro_batches(config, rows, self.free), rows, usable, self.free, self.shortage)
        if not space.structures:
            return False
        search = Search(space, self.measure).run()
        self.searches.append(search)
        if search.best is None:
            return False
        if self.chosen is None or _speed(search) > WORTH_A_LOOK * _speed(self.chosen):
            self.chosen = search
        return True


def find(
    config: TrainingConfig,
    measure: Measure,
    free: Collection[str],
    inexact: Collection[str] = (),
    last_resort: Collection[str] = INEXACT,
    runs_here: bool = True,
    judge: Callable[[Sequence[TrainingConfig]], int] | None = None,
    shortage: Shortage = no_shortage,
) -> Found | None:
    """Find the fastest settings of `free` keys whose plan fits the config's card, with the same global batch.

    Args:
        config: a composed request. Its `auto` keys are always free.
        measure: plans configs.
        free: keys that may change.
        inexact: keys of INEXACT that may change the training result for speed.
        last_resort: keys that may do so only if nothing else fits.
        runs_here: whether training will run on this machine, whose packages and compilers are then needed.
        judge: chooses among the fastest that fit, fastest first; by default the first.
        shortage: checks a plan against the host memory of the machine that trains.

    Returns None if no candidate could be planned: the plan of the request then shows why. Raises RequestError if `auto`
    leaves the batch undetermined.
    """
    before = opened(config)
    free = {*free, *left_open(config)}
    start = with_preferred(_ranked(before), free)
    best = _Best(measure, free, runs_here, [], shortage)
    best.search(start)
    for changed in with_tradeoffs(start, inexact, runs_here):
        best.search(changed)
    if best.chosen is None:
        for changed in with_tradeoffs(start, {*inexact, *last_resort}, runs_here):
            if best.search(changed):
                break
    search = best.chosen or min(best.searches, key=_need, default=None)
    candidate = (search.best or search.closest) if search is not None else None
    if search is None or candidate is None:
        return None
    finalists = search.finalists() if judge is not None else []
    if judge is not None and finalists:
        candidate = finalists[judge([search.space.config(item) for item in finalists])]
    if search.best is not None:
        search.fill_in()
    chosen = search.space.config(candidate)
    if search.best is not None and judge is None:
        chosen = _pruned(before, chosen, search.plans[candidate], best)
    return _report(config, chosen, best)


def _pruned(before: TrainingConfig, chosen: TrainingConfig, plan: Plan, best: _Best) -> TrainingConfig:
    """Remove changes without gain: repeatedly undo the change whose removal leaves the fastest config, as long as the
    rest fits and is about as fast."""
    slowest = WORTH * Figures.of(plan).seconds
    while True:
        undone = (_undone(before, chosen, key, best.runs_here) for key in changed_keys(before, chosen))
        fewer = [config for config in undone if config is not None]
        kept: list[tuple[float, int, int]] = []
        for place, other in enumerate(best.measure(fewer) if fewer else ()):
            if other is None or not other.fits or best.shortage(other) is not None:
                continue
            if (seconds := Figures.of(other).seconds) <= slowest:
                kept.append((seconds, other.peak.device_bytes_upper, place))
        if not kept:
            return chosen
        chosen = fewer[min(kept)[-1]]


def _undone(before: TrainingConfig, chosen: TrainingConfig, key: str, runs_here: bool) -> TrainingConfig | None:
    """The config without one change; None if the other changes require it."""
    if key == MICRO_BATCH:
        micro, rows = before.batch.per_device, chosen.batch.global_size // chosen.batch.world
        return possible(with_rows(chosen, rows, micro, ()), {}, runs_here) if not rows % micro else None
    others = _MASTERS if key == DTYPE else ()
    return possible(chosen, {name: value_of(before, name) for name in (key, *others)}, runs_here)


def _speed(search: Search) -> float:
    """Tokens per second of a search's best candidate."""
    step = search.plans[search.best].step if search.best is not None else None
    return step.tokens_per_second if step is not None else 0.0


def _need(search: Search) -> int:
    closest = search.closest
    return search.plans[closest].peak.device_bytes_upper if closest is not None else 1 << 62


def _is_timed(card: GPUParams) -> bool:
    return card.bandwidth_bytes_per_second is not None and card.fp32_flops is not None


def _ranked(config: TrainingConfig) -> TrainingConfig:
    """The config with rates of another card if its own has none, to rank candidates."""
    if _is_timed(config.gpu):
        return config
    facts = read_card(STAND_IN)
    return config.model_copy(update={"gpu": config.gpu.model_copy(update={name: facts[name] for name in RATES})})


def _report(written: TrainingConfig, after: TrainingConfig, best: _Best) -> Found:
    """The result with all its plans, on the actual card."""
    before = opened(written)
    after = after.model_copy(update={"gpu": written.gpu})
    keys = changed_keys(before, after)
    steps = _one_by_one(before, after, keys)
    plans = best.measure([before, *steps[:-1], after] if keys else [after])
    plan = plans[-1]
    assert plan is not None, "the search has planned it before"
    changes = tuple(_change(written, after, key, *pair) for key, pair in zip(keys, pairwise(plans), strict=True))
    was_open = bool(left_open(written))
    keys_left = [key for key in left_open(written) if key not in keys]
    why = {True: "the plain value is the fastest", False: "the plain value fits, and others change training"}
    filled_in = [Change(key, "auto", value_of(after, key), 0, 0.0, True, why[key in AXES]) for key in keys_left]
    return Found(
        config=after,
        plan=plan,
        before=None if was_open else plans[0],
        changes=(*changes, *filled_in),
        frontier=frontier(written, best.searches, _is_timed(written.gpu)),
        tried=sum(search.space.count for search in best.searches),
        planned=sum(len(search.plans) for search in best.searches),
        computed=sum(search.computed for search in best.searches),
        remarks=(*_remarks(written, after), *_of_the_host(after, plan, best)),
        shortage=best.shortage(plan),
        smallest_card=None if plan.fits else _smallest_card(after, plan, best.measure),
    )


def changed_keys(before: TrainingConfig, after: TrainingConfig) -> list[str]:
    """The keys that a search changed: free improvements, inexact ones, other levers."""
    better = [key for key, axis in AXES.items() if axis.better is not None]
    order = dict.fromkeys((*better, *INEXACT, *OFF_THE_CARD, *SHARDING, EVAL_BATCH, MICRO_BATCH))
    return [key for key in order if not same(value_of(before, key), value_of(after, key))]


def _one_by_one(before: TrainingConfig, after: TrainingConfig, keys: Sequence[str]) -> list[TrainingConfig]:
    """The configs from `before` to `after`, each with one more key changed. The plan refuses one that cannot run."""
    rows = after.batch.global_size // after.batch.world
    steps: list[TrainingConfig] = []
    current = before
    for key in keys:
        if key == MICRO_BATCH:
            current = with_rows(current, rows, after.batch.per_device, ())
        else:
            others = _MASTERS if key == DTYPE else ()
            current = with_values(current, {name: value_of(after, name) for name in (key, *others)})
        steps.append(current)
    return steps


_MASTERS = ("training.mixed_precision_dtype",)


def _change(
    written: TrainingConfig, after: TrainingConfig, key: str, without: Plan | None, with_it: Plan | None
) -> Change:
    saves = costs = None
    if without is not None and with_it is not None:
        saves = without.peak.device_bytes_upper - with_it.peak.device_bytes_upper
        if without.step is not None and with_it.step is not None:
            costs = with_it.step.seconds - without.step.seconds
    new = value_of(after, key)
    changes_training = change_of(key, new) if key in traded(opened(written), after) else ""
    why = f"{lever(key).line} Changes training: {changes_training}." if changes_training else lever(key).line
    return Change(key, value_of(written, key), new, saves, costs, not changes_training, why)


def _remarks(written: TrainingConfig, after: TrainingConfig) -> list[str]:
    remarks = [f"batch: {after.batch}"]
    if not _is_timed(written.gpu):
        remarks.append(
            f"the speed of {written.gpu.name} is not known: candidates were ranked by the rates of {STAND_IN}"
        )
    for key in traded(opened(written), after):
        value = value_of(after, key)
        remarks.append(f"{key}={format_value(value)} changes the training result: {change_of(key, value)}")
    if after.training.compile is True and opened(written).training.compile is not True:
        remarks.append("compiling makes the first step 8 to 40 s longer, and again for each new shape of batch")
    return remarks


def _of_the_host(after: TrainingConfig, plan: Plan, best: _Best) -> Iterator[str]:
    """Remarks on host memory: what the proposal needs for offloading, and why other settings were left out."""
    on_host = [ACTIVATIONS, *(key for key, axis in AXES.items() if axis.on_host)]
    if not all(same(value_of(after, key), default_of(key)) for key in on_host):
        needed = f"up to {size(plan.host_needed(plan.host.processes))} of host memory"
        yield f"offloading to host memory: a machine with {counted(plan.host.processes, 'card')} needs {needed}"
    lacking = [shortage for search in best.searches for shortage in search.short.values()]
    if lacking and best.shortage(plan) is None:
        yield f"settings with more host memory were left out, as this machine has too little: {lacking[0]}"


def frontier(written: TrainingConfig, searches: Sequence[Search], is_timed: bool) -> tuple[Point, ...]:
    """The Pareto frontier: candidates that no other beats in both memory and speed, by increasing memory."""
    known = [
        (upper, seconds / tokens_of(search, item), search, item)
        for search in searches
        for item, upper, seconds in search.points()
    ]
    best, fastest = [], float("inf")
    for upper, seconds, search, item in sorted(known, key=lambda row: row[:2]):
        if seconds < fastest:
            fastest = seconds
            best.append((upper, seconds, search, item))
    every = max(1, -(-len(best) // MOST_POINTS))
    best = [row for place, row in enumerate(best) if not place % every or row[3] in row[2].plans]
    return tuple(
        Point(
            overrides=_overrides(written, search.space.config(item)),
            device_bytes=int(upper),
            tokens_per_second=1 / seconds if is_timed and seconds else None,
            planned=item in search.plans,
        )
        for upper, seconds, search, item in best
    )


def tokens_of(search: Search, item: Candidate) -> int:
    """Tokens of one optimizer step on a device."""
    config = resolve(search.space.structures[item.number].config)
    length = config.model.model_max_length
    return search.space.rows * (length // config.sharing if isinstance(length, int) else 1)


def _overrides(written: TrainingConfig, after: TrainingConfig) -> tuple[str, ...]:
    """Overrides for a candidate: its changes, and the values of `auto` keys."""
    keys = dict.fromkeys((*changed_keys(opened(written), after), *left_open(written)))
    return typed({key: value_of(after, key) for key in keys}, after.batch.global_size)


def _smallest_card(config: TrainingConfig, plan: Plan, measure: Measure) -> str | None:
    """The smallest shipped card that this config is predicted to fit; None if it fits none of those tried."""
    cards = [facts for name in card_names() if (facts := read_card(name)).get("usable_bytes")]
    need = plan.peak.device_bytes_upper
    larger = sorted(
        (card for card in cards if card["usable_bytes"] >= need), key=lambda card: int(card["usable_bytes"])
    )
    for card in larger[:LARGER_CARDS]:
        moved = config.model_copy(update={"gpu": GPUParams(**card, count=config.gpu.count)})
        (found,) = measure([moved]) if possible(moved, {}, runs_here=False) else (None,)
        if found is not None and found.fits:
            return str(card["name"])
    return None
