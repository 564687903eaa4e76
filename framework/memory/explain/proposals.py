"""What a run could change to need less: one step of each lever, as an override and as the config it makes. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framework.memory.editing import possible
from framework.memory.levers import LEVERS, Lever, Setting, word
from framework.memory.requirements import is_installed, suits
from framework.schema.config import TrainingConfig
from framework.schema.keys import value_of
from framework.schema.optimizers import FACTS, Optimizer, serves_states_of

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
    return row.settings[1:2] if word(value) == word(plain.value) else ()


def _has(setting: Setting) -> bool:
    return all(is_installed(name) for name in setting.package.split(", ") if name)


def costs_of(setting: Setting) -> str:
    """What a setting costs in time and in the trajectory of training, in words."""
    return "; ".join(text for text in (setting.time, setting.changes) if text) or "none"
