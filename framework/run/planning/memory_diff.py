"""Two requests planned side by side, and which of the keys that differ cause the difference in memory. No torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from framework.errors import Problem, RequestError, TunesmithError
from framework.memory.ledger import Plan
from framework.schema.config import TrainingConfig
from framework.schema.keys import moves_memory
from framework.schema.rules.every import Needs, find_conflicts

Make = Callable[[Sequence[TrainingConfig]], Sequence[Plan | TunesmithError]]
"""`Rehearsals.tried`: the plan of each, or why there is none."""

MOST_CHANGES = 6
"""Changes that are planned alone; each is a rehearsal of some seconds."""

TOGETHER: tuple[tuple[str, ...], ...] = (
    ("gpu",),
    ("model.architecture", "model.model_name"),
    ("training.use_peft", "peft"),
    (
        "training.per_device_train_batch_size",
        "training.gradient_accumulation_steps",
        "training.global_batch_size",
    ),
    ("model.torch_dtype_str", "training.mixed_precision_dtype"),
    ("data.eval", "data.eval_fraction"),
)
"""Sections and keys that only make sense together, so that one is not taken without the others. Those with most
effect come first."""


@dataclass(frozen=True)
class Cause:
    """What the first request's plan becomes when it takes these keys, and no others, from the second.

    `plan` is None when that is no valid request; `refusal` then says why.
    """

    keys: tuple[str, ...]
    plan: Plan | None
    refusal: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Both plans, the effect of each change by itself, and the changes that were too many to be planned alone."""

    a: Plan
    b: Plan
    causes: tuple[Cause, ...]
    others: tuple[str, ...]


def find_causes(
    a: TrainingConfig, b: TrainingConfig, plans: tuple[Plan, Plan], differing: Iterable[str], make: Make
) -> Comparison:
    """Plan `a` with each change to `b` alone. `plans` are theirs, `differing` the dotted keys that differ."""
    found = changes(differing)
    alone, others = found[:MOST_CHANGES], found[MOST_CHANGES:]

    if len(found) == 1:
        made: list[Plan | TunesmithError] = [plans[1]]
    else:
        changed = [_changed(a, b, keys) for keys in alone]
        possible = [each for each in changed if isinstance(each, TrainingConfig)]
        rest = iter(make(possible) if possible else ())
        made = [next(rest) if isinstance(each, TrainingConfig) else each for each in changed]
    causes = tuple(map(_cause, alone, made))
    return Comparison(*plans, causes, tuple(key for keys in others for key in keys))


def _changed(a: TrainingConfig, b: TrainingConfig, keys: Sequence[str]) -> TrainingConfig | RequestError:
    try:
        return with_keys(a, b, keys)
    except RequestError as error:
        return error


def _cause(keys: tuple[str, ...], made: Plan | TunesmithError) -> Cause:
    if isinstance(made, Plan):
        return Cause(keys, made)
    if not isinstance(made, RequestError):
        raise made
    return Cause(keys, None, made.problems[0].message)


def changes(differing: Iterable[str]) -> list[tuple[str, ...]]:
    """The keys that can matter for memory, in groups that are taken together, those with most effect first."""
    keys = [key for key in differing if moves_memory(key)]
    found: list[tuple[str, ...]] = []
    for group in TOGETHER:
        if group[0] == "training.use_peft" and group[0] not in keys:
            continue  # both train an adapter, or neither does: its keys then stand for themselves
        part = tuple(name for name in group if any(_holds(name, key) for key in keys))
        keys = [key for key in keys if not any(_holds(name, key) for name in group)]
        found += [part] if part else []
    # The section's own key around a differing value: `model.freeze_layers` for `model.freeze_layers[0]`
    return found + list(dict.fromkeys((".".join(key.partition("[")[0].split(".")[:2]),) for key in keys))


def with_keys(a: TrainingConfig, b: TrainingConfig, keys: Sequence[str]) -> TrainingConfig:
    """`a` with the sections and keys named taken from `b`. Raises RequestError when that is no valid request."""
    changed = a
    for key in keys:
        section, _, name = key.partition(".")
        value: Any = getattr(b, section)
        if name:
            value = getattr(changed, section).model_copy(update={name: getattr(value, name)})
        changed = changed.model_copy(update={section: value})
    problems = [
        Problem(conflict.keys[0], conflict.message)
        for conflict in find_conflicts(changed, Needs(model=True))
        if not conflict.is_warning and all(map(moves_memory, conflict.keys))
    ]
    if problems:
        raise RequestError(problems)
    return changed


def _holds(name: str, key: str) -> bool:
    """Whether `key` is `name` or stands inside it."""
    return key == name or key.startswith((f"{name}.", f"{name}["))
