"""Changes to make after a failure, ranked by predicted saving in the failed phase. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from framework.memory.explain.causes import Cause, Repair
from framework.memory.explain.evidence import SavedLever, SavedPlan
from framework.memory.levers import LEVERS, Lever, Setting, format_value, lever, same
from framework.memory.requirements import is_installed, possible, suits
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.optimizers import FACTS, Optimizer, serves_states_of

HOST = "host"
"""Key of a lever's savings of host memory, in addition to the phases."""
LEAST_SHARE = 0.005
"""Savings below this share of the phase's allocation are omitted: they do not affect the peak."""

TERMS: Mapping[str | None, frozenset[str]] = {
    "load": frozenset({"weights"}),
    "optimizer_step": frozenset({"weights", "gradients", "optimizer"}),
    "eval": frozenset({"weights", "optimizer", "logits_and_loss"}),
    "save": frozenset({"weights", "optimizer"}),
    "resume": frozenset({"weights", "optimizer"}),
}
"""Terms that can contribute to the peak of a phase; in forward, loss, backward and an unknown phase any can.
Temporaries in an optimizer's step depend on the optimizer only."""
_DEFAULT = TrainingConfig()
_QUANTIZED, _ADAPTED = "peft.q_lora", {"training.use_peft": True}
_SHARDED = "fsdp.enable_fsdp"
"""Needs several cards; their number is not known from a text, and the default is one."""
_DETAILS = ("model.sdpa_backend",)
"""Levers whose first setting is not the default."""
_MOST_DIGITS = 20
"""Maximum digits of a size; a damaged plan may have more than Python parses."""
_GROWING = "training.allocator.expandable_segments=true"


@dataclass(frozen=True)
class Move:
    """One line to paste. `saves_bytes` is None if it was not predicted."""

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
    """The changes that lower the peak of `phase`.

    The levers of a run's plan have the savings of each change by phase. A lever that was not rehearsed comes last,
    without a figure; without a plan all are of that kind. For fragmentation its own cure comes first, whose gain cannot
    be planned. A size that the run has already reduced is not proposed again.
    """
    reached = {repair.key: repair.after for repair in repairs}
    return tuple(move for move in _moves(plan, phase, cause) if not _is_reached(move.override, reached))


def _is_reached(override: str, reached: Mapping[str, int]) -> bool:
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
    """Whether a lever reduces a term that can be part of the peak of `phase`."""
    row = next((row for row in LEVERS if row.key == key), None)
    if row is None or (row.moment and (row.moment == "eval") != (phase == "eval")):
        return False
    return phase not in TERMS or bool(TERMS[phase] & set(row.shrinks))


@cache
def _general(phase: str | None) -> tuple[Move, ...]:
    """Changes without a plan: those known to reduce the phase's terms, exact ones first."""
    found = []
    for row in movable():
        is_of_adapter = row.key.startswith("peft.") and row.key != _QUANTIZED
        if row.key not in _DETAILS and not is_of_adapter and touches(row.key, phase):
            found += [
                _plain_move(row, setting)
                for setting in _settings(row, phase)
                if TASK not in setting.requires
                and (setting.requires == _ADAPTED or not is_detail(row.key, setting.requires))
            ]
    return tuple(sorted(found, key=lambda move: not move.exact))


def _plain_move(row: Lever, setting: Setting) -> Move:
    """A setting with the other settings that it requires and that are not defaults."""
    requires = setting.requires if row.key != BATCH else {}
    requires = {**requires, "gpu.count": 2} if row.key == _SHARDED else requires
    missing = {key: value for key, value in requires.items() if value_of(_DEFAULT, key) != value}
    override = " ".join(f"{key}={format_value(value)}" for key, value in {row.key: setting.value, **missing}.items())
    is_exact = not setting.changes and missing.keys() <= {"gpu.count"}
    return Move(override, None, costs_of(setting), is_exact)


def _settings(row: Lever, phase: str | None) -> tuple[Setting, ...]:
    """The settings to try if the present one is not known: one, but for optimizers all with the same update rule."""
    if OPTIMIZER in row.settings[0].requires:
        return ()  # a detail of one optimizer
    if row.key == OPTIMIZER:
        rule = FACTS[row.settings[0].value].rule
        others = (item for item in row.settings[2:] if FACTS[item.value].rule == rule and not item.requires)
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
    """One change. `override` is the text to type, several words if it requires other settings; `costs` is a text."""

    key: str
    override: str
    costs: str
    exact: bool
    config: TrainingConfig
    shrinks: tuple[str, ...] = ()
    """Terms of the ledger that it can reduce."""


def propose(config: TrainingConfig) -> tuple[Proposal, ...]:
    """Every single change of a resolved config that may save memory and can run, in the table's order."""
    return tuple(proposal for row in movable() for proposal in _of(row, config))


def movable() -> Iterator[Lever]:
    """The levers that can reduce allocated memory, unlike those that only affect the cache."""
    return (row for row in LEVERS if set(row.shrinks) - {"fragmentation"} and row.proposed)


def _of(row: Lever, config: TrainingConfig) -> Iterator[Proposal]:
    for setting in _next_settings(row, value_of(config, row.key)):
        packages = filter(None, setting.package.split(", "))
        if not suits(setting.hardware, config.gpu) or not all(map(is_installed, packages)):
            continue
        changes = {key: value for key, value in setting.requires.items() if value_of(config, key) != value}
        if row.key.startswith("peft.") and (changes or not config.training.use_peft):
            continue  # the adapter as a whole is a separate proposal
        if row.key == "peft.lora_r" and config.peft.adapter_path is not None:
            continue  # the rank of a trained adapter is fixed
        if TASK in changes:
            continue  # the task is not to be traded
        if is_detail(row.key, changes):
            continue
        if row.key == BATCH:
            changes = {"training.gradient_accumulation_steps": config.batch.accumulation * 2}
        changed = possible(config, {row.key: setting.value, **changes})
        if changed is None:
            continue
        shown = {"training.global_batch_size": config.batch.global_size} if row.key == BATCH else changes
        override = " ".join(f"{key}={format_value(value)}" for key, value in {row.key: setting.value, **shown}.items())
        exact = _keeps_results(row, setting, config) and (row.key == BATCH or not changes)
        yield Proposal(row.key, override, costs_of(setting), exact, changed, row.shrinks)


def _keeps_results(row: Lever, setting: Setting, config: TrainingConfig) -> bool:
    """Whether a setting keeps the results of this config, so that its checkpoint can be resumed."""
    if row.key == OPTIMIZER:
        return serves_states_of(Optimizer(setting.value), Optimizer(config.training.optimizer))
    return not setting.changes


def is_detail(key: str, requires: Mapping[str, Any]) -> bool:
    """Whether a setting is a detail of another lever, which is a separate proposal: how to compile, what to save."""
    return key not in (OPTIMIZER, BATCH) and any(row.key in requires for row in movable() if row.key != key)


def _next_settings(row: Lever, value: Any) -> tuple[Setting, ...]:
    """For a number its half, for rows of an evaluation also one; for an optimizer every other one with the same update
    rule; else the first setting that differs from the plain one, since the others differ little from it."""
    if isinstance(value, int) and not isinstance(value, bool) and value > row.least:
        like, sizes = row.settings[1], dict.fromkeys([value // 2, *([1] if row.key == EVAL_BATCH else [])])
        return tuple(Setting(size, like.time, like.changes, like.hardware, like.package) for size in sizes)
    plain = row.settings[0]
    if row.key == OPTIMIZER:
        rule = FACTS[value].rule
        return tuple(item for item in row.settings if item.value != value and FACTS[item.value].rule == rule)
    return row.settings[1:2] if same(value, plain.value) else ()


def costs_of(setting: Setting) -> str:
    """Costs of a setting in time and in the training result, as text."""
    return "; ".join(text for text in (setting.time, setting.changes) if text) or "none"
