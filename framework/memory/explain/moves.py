"""What to change after a failure, the largest predicted saving in the phase that failed first. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from framework.memory.explain.causes import Cause, Repair
from framework.memory.explain.evidence import SavedLever, SavedPlan
from framework.memory.levers import LEVERS, Lever, Setting, lever, same, word
from framework.memory.requirements import is_installed, possible, suits
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.optimizers import FACTS, Optimizer, serves_states_of

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


BATCH = "training.per_device_train_batch_size"
EVAL_BATCH = "training.per_device_eval_batch_size"
OPTIMIZER = "training.optimizer"
TASK = "training.task"


@dataclass(frozen=True)
class Proposal:
    """One change. `override` is as it is typed, several words where the change needs company; `costs` in words."""

    key: str
    override: str
    costs: str
    exact: bool
    config: TrainingConfig
    shrinks: tuple[str, ...] = ()
    """Terms of the ledger that it can make smaller."""


def propose(config: TrainingConfig) -> tuple[Proposal, ...]:
    """Every single change of a resolved config that may take less memory and that can run, in the table's order."""
    return tuple(proposal for row in movable() for proposal in _of(row, config))


def movable() -> Iterator[Lever]:
    """The levers that can take something off what is allocated; those that move the cache alone cannot."""
    return (row for row in LEVERS if set(row.shrinks) - {"fragmentation"} and row.proposed)


def _of(row: Lever, config: TrainingConfig) -> Iterator[Proposal]:
    for setting in _next_settings(row, value_of(config, row.key)):
        if not suits(setting.hardware, config.gpu) or not _has(setting):
            continue
        changes = {key: value for key, value in setting.beside.items() if value_of(config, key) != value}
        if row.key.startswith("peft.") and (changes or not config.training.use_peft):
            continue  # the adapter as a whole is a proposal of its own
        if row.key == "peft.lora_r" and config.peft.adapter_path is not None:
            continue  # a trained adapter has the rank that it has
        if TASK in changes:
            continue  # what is to be learnt is no price
        if is_detail(row.key, changes):
            continue
        if row.key == BATCH:
            changes = {"training.gradient_accumulation_steps": config.batch.accumulation * 2}
        changed = possible(config, {row.key: setting.value, **changes})
        if changed is None:
            continue
        shown = {"training.global_batch_size": config.batch.global_size} if row.key == BATCH else changes
        override = " ".join(f"{key}={word(value)}" for key, value in {row.key: setting.value, **shown}.items())
        exact = _goes_on(row, setting, config) and (row.key == BATCH or not changes)
        yield Proposal(row.key, override, costs_of(setting), exact, changed, row.shrinks)


def _goes_on(row: Lever, setting: Setting, config: TrainingConfig) -> bool:
    """Whether a setting leaves the results of this config, so that a checkpoint of it goes on with it."""
    if row.key == OPTIMIZER:
        return serves_states_of(Optimizer(setting.value), Optimizer(config.training.optimizer))
    return not setting.changes


def is_detail(key: str, beside: Mapping[str, Any]) -> bool:
    """Whether a setting needs another lever moved, which is a proposal of its own: how to compile, what to keep."""
    return key not in (OPTIMIZER, BATCH) and any(row.key in beside for row in movable() if row.key != key)


def _next_settings(row: Lever, value: Any) -> tuple[Setting, ...]:
    """Of a number its half, of rows of an evaluation one as well; of an optimizer every other that keeps its update
    rule; else the step away from the plain setting, after which the others differ little."""
    if isinstance(value, int) and not isinstance(value, bool) and value > row.least:
        like, sizes = row.settings[1], dict.fromkeys([value // 2, *([1] if row.key == EVAL_BATCH else [])])
        return tuple(Setting(size, like.time, like.changes, like.hardware, like.package) for size in sizes)
    plain = row.settings[0]
    if row.key == OPTIMIZER:
        rule = FACTS[value].rule
        return tuple(item for item in row.settings if item.value != value and FACTS[item.value].rule == rule)
    return row.settings[1:2] if same(value, plain.value) else ()


def _has(setting: Setting) -> bool:
    return all(is_installed(name) for name in setting.package.split(", ") if name)


def costs_of(setting: Setting) -> str:
    """What a setting costs in time and in the trajectory of training, in words."""
    return "; ".join(text for text in (setting.time, setting.changes) if text) or "none"
