"""Plans of changed configs: values of one key compared, causes of a difference, savings of levers.

Savings come from rehearsals only: shrinking one term moves the peak to another moment, which the terms at the old peak
do not show. A rehearsal takes a tenth of a second (a tiny model) to about ten seconds (8B), and about a dozen are
needed, so they run when memory has run out, the most promising first. A lever that is not reached in time gets no
figure rather than an estimate. Loads no torch."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.compose import load_of_run
from framework.compose.trained_folders import trusted_keys
from framework.errors import Problem, RequestError, TunesmithError
from framework.memory.explain.evidence import PLAN, SavedPlan
from framework.memory.explain.moves import HOST, propose
from framework.memory.ledger import Plan
from framework.memory.requirements import is_installed
from framework.paths import read_regular
from framework.run.planning.plan_pool import PROCESSES, Rehearsals
from framework.schema.config import TrainingConfig
from framework.schema.keys import moves_memory
from framework.schema.rules.every import Needs, find_conflicts


@dataclass(frozen=True)
class Row:
    """A value of the key and its plan; None if the built model refuses it, with the reason in `refusal`."""

    value: str
    plan: Plan | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is accepted and its plan fits the card."""
        return self.plan is not None and self.plan.fits

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of one device, if the card's speed is known."""
        return self.plan.step.tokens_per_second if self.plan is not None and self.plan.step is not None else None

    def to_json(self) -> dict[str, Any]:
        """The value and its plan as JSON."""
        plan = self.plan.to_json() if self.plan is not None else None
        return {"value": self.value, "fits": self.fits, "plan": plan, "refusal": self.refusal or None}


def what_if(configs: Mapping[str, TrainingConfig]) -> list[Row]:
    """Plan configs that differ in one key: a row for each value. Their rehearsals share common work.

    Raises TunesmithError for an internal fault.
    """
    with Rehearsals() as rehearsals:
        return list(map(_row, configs, rehearsals.tried(list(configs.values()))))


def _row(value: str, made: Plan | TunesmithError) -> Row:
    if isinstance(made, Plan):
        return Row(value, made)
    if not isinstance(made, RequestError):
        raise made
    return Row(value, None, "; ".join(problem.message for problem in made.problems))


Make = Callable[[Sequence[TrainingConfig]], Sequence[Plan | TunesmithError]]
"""`Rehearsals.tried`: the plan of each config, or its error."""

MOST_CHANGES = 6
"""Most changes that are planned separately; each takes a rehearsal of some seconds."""

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
"""Sections and keys that are only meaningful together and therefore change together, those with most effect first."""


@dataclass(frozen=True)
class Cause:
    """The plan of the first request with only these keys taken from the second.

    `plan` is None if that request is invalid; `refusal` then gives the reason.
    """

    keys: tuple[str, ...]
    plan: Plan | None
    refusal: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Both plans, the effect of each change by itself, and the changes beyond the limit that were not planned."""

    a: Plan
    b: Plan
    causes: tuple[Cause, ...]
    others: tuple[str, ...]


def find_causes(
    a: TrainingConfig, b: TrainingConfig, plans: tuple[Plan, Plan], differing: Iterable[str], make: Make
) -> Comparison:
    """Plan `a` with each change to `b` separately. `plans` are their plans, `differing` the dotted keys that differ."""
    found = changes(differing)
    alone, others = found[:MOST_CHANGES], found[MOST_CHANGES:]

    if len(found) == 1:
        made: list[Plan | TunesmithError] = [plans[1]]
    else:
        changed: list[TrainingConfig | RequestError] = []
        for keys in alone:
            try:
                changed.append(with_keys(a, b, keys))
            except RequestError as error:
                changed.append(error)
        possible = [each for each in changed if isinstance(each, TrainingConfig)]
        rest = iter(make(possible) if possible else ())
        made = [next(rest) if isinstance(each, TrainingConfig) else each for each in changed]
    causes = tuple(map(_cause, alone, made))
    return Comparison(*plans, causes, tuple(key for keys in others for key in keys))


def _cause(keys: tuple[str, ...], made: Plan | TunesmithError) -> Cause:
    if isinstance(made, Plan):
        return Cause(keys, made)
    if not isinstance(made, RequestError):
        raise made
    return Cause(keys, None, made.problems[0].message)


def changes(differing: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the keys that can matter for memory into joint changes, those with most effect first."""
    keys = [key for key in differing if moves_memory(key)]
    found: list[tuple[str, ...]] = []
    for group in TOGETHER:
        if group[0] == "training.use_peft" and group[0] not in keys:
            continue  # both train an adapter, or neither does: its keys then change separately
        part = tuple(name for name in group if any(_holds(name, key) for key in keys))
        keys = [key for key in keys if not any(_holds(name, key) for name in group)]
        found += [part] if part else []
    # The section's own key around a differing value: `model.freeze_layers` for `model.freeze_layers[0]`
    return found + list(dict.fromkeys((".".join(key.partition("[")[0].split(".")[:2]),) for key in keys))


def with_keys(a: TrainingConfig, b: TrainingConfig, keys: Sequence[str]) -> TrainingConfig:
    """`a` with the named sections and keys taken from `b`. Raises RequestError if that is invalid."""
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
    """Whether `key` is `name` or inside it."""
    return key == name or key.startswith((f"{name}.", f"{name}["))


MOST_SECONDS = 60.0
"""Time limit for computing savings, after a failure or for `explain`."""


def lever_savings(config: TrainingConfig, plan: Plan) -> list[dict[str, Any]]:
    """The `levers` of `plan.json` for a resolved config and its plan: each with its savings, None if not known after
    MOST_SECONDS."""
    terms = plan.step_peak.terms.to_json()  # the bytes at the step's peak that a lever could shrink at best
    proposals = sorted(propose(config), key=lambda proposal: -sum(terms[name] for name in proposal.shrinks))
    entries: list[dict[str, Any]] = [
        {"key": each.key, "override": each.override, "costs": each.costs, "exact": each.exact, "saves": None}
        for each in proposals
    ]
    end = time.monotonic() + MOST_SECONDS
    with suppress(TunesmithError, OSError), Rehearsals() as rehearsals:  # the host's memory may be full, too
        for at in range(0, len(proposals), PROCESSES):
            if time.monotonic() > end:
                break
            made = rehearsals([proposal.config for proposal in proposals[at : at + PROCESSES]])
            for entry, other in zip(entries[at:], made, strict=False):
                entry["saves"] = _savings(plan, other) if other is not None else {}
    return entries


def savings_of_run(folder: Path) -> SavedPlan | None:
    """The plan of a run folder with the savings of each lever, computed now.

    None if plan or config cannot be read, torch is not installed, or the model has its own Python code, which a run's
    config does not authorize to run.
    """
    if not is_installed("torch"):
        return None
    try:
        plan = Plan.from_json(json.loads(read_regular(folder / PLAN)))
        config = load_of_run(folder / "config.yaml")
    except (TunesmithError, OSError, ValueError, KeyError, TypeError):
        return None
    if trusted_keys(config):
        return None
    return SavedPlan.model_validate({**plan.to_json(), "levers": lever_savings(config, plan)})


def _savings(plan: Plan, other: Plan) -> Mapping[str, int]:
    """Bytes that a change saves at the allocated peak of each phase, and on the host; negative if it needs more.

    Allocated, not reserved: unused reserved memory is returned to the driver before memory runs out.
    """
    after = {phase.name: phase.allocated_bytes for phase in other.phases}
    saved = {phase.name: phase.allocated_bytes - after.get(phase.name, 0) for phase in plan.phases}
    return {**saved, HOST: plan.host_bytes - other.host_bytes}
