"""What to change after a failure, the largest predicted saving in the phase that failed first. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from framework.memory.explain.causes import Cause, Repair
from framework.memory.explain.proposals import BATCH, EVAL_BATCH, OPTIMIZER, TASK, costs_of, is_detail, movable
from framework.memory.explain.saved_plan import SavedLever, SavedPlan
from framework.memory.levers import LEVERS, Lever, Setting, lever, word
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.optimizers import FACTS

HOST = "host"
"""The key, next to the phases, of what a lever saves of the host's memory."""
LEAST_SHARE = 0.005
"""A saving below this share of what the phase allocates is not worth a line: it does not touch the peak."""

TERMS: Mapping[str | None, frozenset[str]] = {
    "load": frozenset({"weights"}),
    "optimizer_step": frozenset({"weights", "gradients", "optimizer"}),
    "eval": frozenset({"weights", "optimizer", "logits_and_loss"}),
    "save": frozenset({"weights", "optimizer"}),
    "resume": frozenset({"weights", "optimizer"}),
}
"""Terms that can make up the peak of a phase; of forward, loss, backward and an unknown phase it can be any. The
temporaries of an optimizer's step are the optimizer's, and no other lever's."""
_DEFAULT = TrainingConfig()
_QUANTIZED, _ADAPTED = "peft.q_lora", {"training.use_peft": True}
_SHARDED = "fsdp.enable_fsdp"
"""Needs several cards; how many there are is not known from a text, and one card alone is the default."""
_DETAILS = ("model.sdpa_backend",)
"""Levers whose plain setting nobody has by default."""
_MOST_DIGITS = 20
"""Of a size; a plan that is damaged may have more than Python reads."""
_GROWING = "training.allocator.expandable_segments=true"


@dataclass(frozen=True)
class Move:
    """One line to paste. `saves_bytes` is None where nothing has predicted it."""

    override: str
    saves_bytes: int | None
    costs: str
    exact: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "override": self.override,
            "saves_bytes": self.saves_bytes,
            "costs": self.costs,
            "exact": self.exact,
        }


def rank_moves(
    plan: SavedPlan | None, phase: str | None, cause: Cause, repairs: Sequence[Repair] = ()
) -> tuple[Move, ...]:
    """The moves that take something off the peak of `phase`.

    The levers of a run's plan hold what each change saves, phase by phase. A lever that was not rehearsed comes last,
    without a figure; without any plan all are of that kind. Memory in pieces is mended first, by what no plan can tell
    the gain of. A size that the run has repaired already is not offered again.
    """
    reached = {repair.key: repair.after for repair in repairs}
    return tuple(move for move in _moves(plan, phase, cause) if not _was_tried(move.override, reached))


def _was_tried(override: str, reached: Mapping[str, int]) -> bool:
    key, _, value = override.partition(" ")[0].partition("=")
    return key in reached and value.isdecimal() and len(value) < _MOST_DIGITS and int(value) >= reached[key]


def _moves(plan: SavedPlan | None, phase: str | None, cause: Cause) -> tuple[Move, ...]:
    pieces = lever(_GROWING.partition("=")[0]).settings[1]
    first = (Move(_GROWING, None, costs_of(pieces), True),) if cause is Cause.FRAGMENTATION else ()
    if plan is None or plan.levers is None:
        return () if cause is Cause.HOST else (*first, *_general(phase))
    if cause is Cause.HOST:
        return _ranked(plan.levers, HOST, plan.host_bytes)
    phase = phase or plan.step_peak.phase
    planned = plan.phase(phase)
    return (*first, *_ranked(plan.levers, phase, planned.allocated_bytes if planned else 0))


def _ranked(levers: Sequence[SavedLever], phase: str, needed: int) -> tuple[Move, ...]:
    found = []
    for row in levers:
        if row.saves is None and phase != HOST and touches(row.key, phase):
            found.append(Move(row.override, None, row.costs, row.exact))
        elif row.saves is not None and (saved := row.saves.get(phase, 0)) > LEAST_SHARE * needed:
            found.append(Move(row.override, saved, row.costs, row.exact))
    return tuple(sorted(found, key=lambda move: (-(move.saves_bytes or 0), not move.exact)))


def touches(key: str, phase: str | None) -> bool:
    """Whether a lever shrinks a term that can be part of the peak of `phase`."""
    row = next((row for row in LEVERS if row.key == key), None)
    if row is None or (row.moment and (row.moment == "eval") != (phase == "eval")):
        return False
    return phase not in TERMS or bool(TERMS[phase] & set(row.shrinks))


@cache
def _general(phase: str | None) -> tuple[Move, ...]:
    """For a text alone: what is known to shrink the phase's terms, those that change no result first."""
    found = []
    for row in movable():
        is_of_adapter = row.key.startswith("peft.") and row.key != _QUANTIZED
        if row.key not in _DETAILS and not is_of_adapter and touches(row.key, phase):
            found += [
                _plain_move(row, setting)
                for setting in _settings(row, phase)
                if TASK not in setting.beside and (setting.beside == _ADAPTED or not is_detail(row.key, setting.beside))
            ]
    return tuple(sorted(found, key=lambda move: not move.exact))


def _plain_move(row: Lever, setting: Setting) -> Move:
    """A setting with what it needs next to it that no recipe has by itself."""
    beside = setting.beside if row.key != BATCH else {}
    beside = {**beside, "gpu.count": 2} if row.key == _SHARDED else beside
    missing = {key: value for key, value in beside.items() if value_of(_DEFAULT, key) != value}
    override = " ".join(f"{key}={word(value)}" for key, value in {row.key: setting.value, **missing}.items())
    is_exact = not setting.changes and missing.keys() <= {"gpu.count"}
    return Move(override, None, costs_of(setting), is_exact)


def _settings(row: Lever, phase: str | None) -> tuple[Setting, ...]:
    """The one setting to try where the present one is not known: of an optimizer those that keep its update rule."""
    if OPTIMIZER in row.settings[0].beside:
        return ()  # a detail of one optimizer
    if row.key == OPTIMIZER:
        rule = FACTS[row.settings[0].value].rule
        others = (item for item in row.settings[2:] if FACTS[item.value].rule == rule and not item.beside)
        return (row.settings[0], *others) if phase == "optimizer_step" else tuple(others)
    if row.key in (BATCH, EVAL_BATCH):
        return row.settings[-1:]
    return row.settings[1:2]
