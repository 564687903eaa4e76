"""Differences allowed between a checkpoint's config and the run that resumes from it."""

from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.levers import LEVERS
from framework.run.inputs import MODELS, WHAT
from framework.schema.choices import Attention
from framework.schema.config import TrainingConfig
from framework.schema.facts import Resume
from framework.schema.keys import every_key, resume_of
from framework.schema.optimizers import Optimizer, serves_states_of
from framework.schema.plural import counted

ACCUMULATION, OPTIMIZER = "training.gradient_accumulation_steps", "training.optimizer"
SIZES = {"training.per_device_train_batch_size", ACCUMULATION}
"""Keys that scale with the number of devices: their product with it gives the rows of a step."""

_OTHERWISE = {
    Resume.ROUNDING: "the results differ by rounding",
    Resume.STEERING: "the training result would be another",
}


def resume_with(key: str) -> Resume | None:
    """Effect of another value of `key` on a resumed run; None if no run can resume with it.

    Taken from the key's definition, else from its lever's row.
    """
    row = next((row for row in LEVERS if row.key == key), None)
    if (effect := resume_of(key)) is not None or row is None or not row.exact:
        return effect
    return Resume.FREE if row.bitwise else Resume.ROUNDING


def check_allowed(allow: Sequence[str]) -> None:
    """Raise RequestError for each key of `--allow` that does not exist or cannot be allowed to differ."""
    known = {key: found for key in every_key() if (found := resume_with(key))}
    takes = (*sorted({*(key for key, found in known.items() if found in _OTHERWISE), OPTIMIZER, *WHAT, *MODELS}),)
    problems = list[Problem]()
    for word in allow:
        if word in takes or known.get(word) is Resume.FREE:
            continue
        if word in every_key():
            problems.append(Problem("--allow", f"no run can resume with another {word}", None, ", ".join(takes)))
        else:
            ends = next((key for key in takes if key.endswith(f".{word}")), None)
            nearest = ends or next(iter(get_close_matches(word, takes, 1)), None)
            problems.append(Problem("--allow", f"there is no key `{word}`", None, ", ".join(takes), nearest))
    if problems:
        raise RequestError(problems)


def check_resume(
    saved: Mapping[str, Any], config: TrainingConfig, allow: Sequence[str], moved: Set[str] = frozenset()
) -> list[str]:
    """Compare a checkpoint's config with the run's. Returns one line for each free or allowed difference. `moved` are
    keys with the new path of an unchanged model.

    Raises RequestError listing every difference that needs `--allow KEY` or cannot be allowed.
    """
    lines = list[str]()
    known = _with_defaults(saved, TrainingConfig().model_dump(mode="json"))
    problems = list(_other_global_batch(known, config, allow))
    is_cut_otherwise = known["gpu"]["count"] != config.gpu.count or _world(known) != config.batch.world
    free = {*moved, *(SIZES if is_cut_otherwise else ())}
    if _rows_of_step(known) == config.batch.global_size:
        free.add(ACCUMULATION)  # follows from the rows of a forward pass
    for key, before, now in _differences(known, config.model_dump(mode="json"), ""):
        change = f"was {before}, is now {now}"
        found = Resume.FREE if key in free else resume_with(key)
        if key == OPTIMIZER and serves_states_of(Optimizer(now), Optimizer(before)):
            found = Resume.ROUNDING
        if found is Resume.FREE or (found and key in allow):
            lines.append(f"{key} {change}")
        elif found:
            problems.append(Problem(key, f"{change}: {_OTHERWISE[found]}", expected=f"--allow {key}"))
        else:
            problems.append(Problem(key, f"{change}: the checkpoint is of another run", expected=f"{before}"))
    if problems:
        raise RequestError(problems)
    return lines


def _other_global_batch(known: Mapping[str, Any], config: TrainingConfig, allow: Sequence[str]) -> Iterator[Problem]:
    """Check that a step still has the same number of rows with more or fewer devices."""
    world, batch, rows = _world(known), config.batch, _rows_of_step(known)
    if world == batch.world or ACCUMULATION in allow:
        return
    if rows != batch.global_size:
        before = _counted(known["gpu"]["count"], world)
        now = _counted(config.gpu.count, batch.world)
        message = f"a step had {counted(rows, 'row')} on {before}, and has {batch.global_size} on {now}"
        fitting, remainder = divmod(rows, batch.per_device * batch.world)
        expected = f"{fitting}" if fitting and not remainder else "sizes whose product is the same"
        yield Problem(ACCUMULATION, message, expected=expected)


def _rows_of_step(known: Mapping[str, Any]) -> int:
    training = known["training"]
    rows: int = training["per_device_train_batch_size"] * (training["gradient_accumulation_steps"] or 1)
    return rows * _world(known)


def _world(known: Mapping[str, Any]) -> int:
    """Number of data-parallel ranks: devices, or groups of devices under context or tensor parallelism."""
    world: int = known["gpu"]["count"]
    if known["model"]["attn_implementation"] == Attention.RING_ATTENTION:
        world //= known["fsdp"]["context_parallel_size"] or world
    world //= known["fsdp"]["tensor_parallel_size"]
    return world


def _counted(count: int, world: int) -> str:
    devices = f"{counted(count, 'device')}"
    return devices if count == world else f"{devices} ({counted(world, 'group')})"


def _with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """An older version's config with defaults for the keys that it did not know."""
    filled = {**defaults, **saved}
    for name, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(filled[name], Mapping):
            filled[name] = _with_defaults(filled[name], default)
    return filled


def _are_sections(value: Any) -> bool:
    """Whether this is a list of sections, such as sources, in which an older version lacks newer keys."""
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    elif _are_sections(before) and _are_sections(now) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, f"{key}[{index}]")
    elif before != now:
        yield key, before, now
