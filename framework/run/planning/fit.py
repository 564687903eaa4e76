"""`fit`: the search with real rehearsals, and the replacement of `auto` by its result. Loads no torch."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from framework.activity import doing
from framework.errors import DoesNotFit, OutOfMemory, Problem, RequestError
from framework.memory.cards import detect
from framework.memory.levers import format_value
from framework.memory.search.fastest import Shortage, no_shortage
from framework.memory.search.find import find
from framework.memory.search.found import Found
from framework.memory.search.free_keys import INEXACT, freedom, opened
from framework.memory.units import size
from framework.run.planning.capacity import HostMemory
from framework.run.planning.plan_pool import Rehearsals
from framework.schema.config import TrainingConfig
from framework.schema.keys import left_open, value_of
from framework.schema.plural import counted

Judge = Callable[[Sequence[TrainingConfig]], int]
"""Picks the best of some configs, which are sorted by planned speed."""


def fit(
    config: TrainingConfig,
    *,
    pins: Collection[str] = (),
    inexact: Collection[str] = (),
    judge: Judge | None = None,
    runs_here: bool | None = None,
) -> Found:
    """Find the fastest settings that are predicted to fit a config's card, with the same global batch.

    Args:
        pins: keys or sections to keep.
        inexact: keys of `framework.memory.search.free_keys.INEXACT` that may change the training result for speed; if
            nothing else fits, all that are not pinned may.
        judge: chooses among the fastest; `measured_best` runs them.
        runs_here: whether training will run on this machine, whose packages, compilers and host memory then count.
            None: if the card is this machine's.

    Raises RequestError for a card without memory of its own, an unknown pin, or a request that is refused.
    """
    strange = [key for key in inexact if key not in INEXACT]
    if strange:
        problems = [
            Problem(f"--set-free {key}", "is not a key that may be set free", None, ", ".join(INEXACT))
            for key in strange
        ]
        raise RequestError(problems)
    free = freedom(pins)
    last_resort = [key for key in INEXACT if not any(key == pin or key.startswith(f"{pin}.") for pin in pins)]
    return _searched(
        config, free, inexact, last_resort, judge, detect() == config.gpu.name if runs_here is None else runs_here
    )


def _searched(
    config: TrainingConfig,
    free: Collection[str],
    inexact: Collection[str],
    last_resort: Collection[str],
    judge: Judge | None,
    runs_here: bool,
) -> Found:
    if config.gpu.usable_bytes is None:
        message = f"{config.gpu.name} has no memory of its own to fit settings to"
        raise RequestError([Problem("gpu.name", message, expected="gpu=rtx4090_24gb, a size such as gpu=24gb")])
    shortage = _shortage(config) if runs_here else no_shortage
    with Rehearsals() as measure:
        found = find(config, measure, free, inexact, last_resort, runs_here, judge, shortage)
        if found is None:
            measure.plans([opened(config)])  # raises the problem
            raise RequestError([Problem("", "no candidate could be planned, though the request itself can")])
    return found.remarking([f"some candidates could not be planned: {fault}" for fault in measure.faults])


def _shortage(config: TrainingConfig) -> Shortage:
    """Checks plans against this machine's host memory, as it is before any rehearsal."""
    here = HostMemory.now()
    return lambda plan: here.shortage(plan, config.data.workers, plan.host.processes)


@dataclass(frozen=True)
class Decided:
    """A config with `auto` replaced, and the reason for each value. `found` is None if nothing was searched."""

    config: TrainingConfig
    reasons: tuple[str, ...]
    found: Found | None = None


def decide(config: TrainingConfig, runs_here: bool) -> Decided:
    """Replace every `auto` of a config; without any, nothing is searched.

    Inexact values are chosen only if nothing else fits, and named in `reasons`. A device without memory of its own gets
    the plain values. If nothing fits, the closest miss is returned.
    """
    keys = left_open(config)
    if not keys:
        return Decided(config, ())
    if config.gpu.usable_bytes is None:
        plain = opened(config)
        return Decided(
            plain,
            tuple(
                f"{key}={format_value(value_of(plain, key))}: the plain value, {config.gpu.name} has no limit"
                for key in keys
            ),
        )
    found = _searched(config, (), (), [key for key in INEXACT if key in keys], None, runs_here)
    reasons = []
    for change in found.changes:
        saves = change.saves_bytes
        moved = f"{'saves' if saves > 0 else 'takes'} {size(abs(saves))}. " if saves else ""
        reasons.append(f"{change.key}={format_value(change.new)}: {moved}{change.why}")
    return Decided(found.config, (*reasons, *found.remarks), found)


def decide_or_refuse(config: TrainingConfig) -> Decided:
    """Run `decide` for training on this machine. Raises DoesNotFit if no choice fits the card."""
    decided = decide(config, runs_here=True)
    if decided.found is not None and not decided.found.fits:
        if decided.found.plan.fits:
            raise DoesNotFit(f"no choice of {', '.join(left_open(config))} fits: {decided.found.shortage}.")
        need = decided.found.plan.peak.device_bytes_upper
        usable = config.gpu.usable_bytes or 0
        message = (
            f"no choice of {', '.join(left_open(config))} fits {config.gpu.name}: the closest needs up to {size(need)}"
        )
        raise DoesNotFit(f"{message}, {size(usable)} is usable. `tunesmith fit` may move other levers too.")
    return decided


def measured_best(say: Callable[[str], None]) -> Judge:
    """A judge that runs each config for some steps on this machine's card, each in a fresh process so that they cannot
    affect each other, and prints the measurements with `say`. Raises OutOfMemory if all fail."""

    def judge(configs: Sequence[TrainingConfig]) -> int:
        from framework.run.planning.measurements import Measurements

        speeds: dict[int, float] = {}
        with Measurements() as measured:
            for number, config in enumerate(configs):
                rows = f"{counted(config.batch.per_device, 'row')} a forward pass"
                try:
                    with doing(f"measuring {rows}"):
                        found = measured(config)
                except OutOfMemory as error:
                    say(f"measured: {rows} ran out of memory ({error})")
                    continue
                speeds[number] = found.tokens_per_second
                say(f"measured: {rows}, {size(found.device_bytes)}, {found.tokens_per_second:,.0f} tokens/s")
        if not speeds:
            raise OutOfMemory("every candidate that was planned to fit ran out of memory on this card")
        return max(speeds, key=lambda number: speeds[number])

    return judge
