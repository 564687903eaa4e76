"""What may differ between a checkpoint and the run that goes on from it."""

from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.levers import LEVERS
from framework.run.inputs.same_rows import MODELS, WHAT
from framework.schema.choices import Attention
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key
from framework.schema.wording import counted

FREE = {
    "schema_version",
    "training.eval_steps",
    "training.eval_first",
    "training.save_first",
    "training.best_metric",
    "training.early_stopping_patience",
    "training.export_best",
    "training.save_steps",
    "training.save_total_limit",
    "training.async_save",
    "training.logging_steps",
    "training.output_dir",
    "training.fallback_dir",
    "training.run_name",
    "training.trackers",
    "training.on_oom",
    "training.optimizer_offload_folder",
    "data.workers",
    "data.cache",
    *(row.key for row in LEVERS if row.bitwise),
}
"""Keys that change neither the weights nor the order of the rows, not by one bit."""

EXACT = {row.key for row in LEVERS if row.exact} | {"training.gradient_checkpointing_kwargs.use_reentrant"}
"""Keys that change results by rounding alone: `--allow` lets them differ."""

SIZES = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}
"""Keys that go with the number of devices: their product with it is what a step learns from."""

STEERING = {
    "training.learning_rate",
    "training.lr_scheduler_type",
    "training.min_learning_rate",
    "training.lr_cycles",
    "training.lr_power",
    "training.lr_decay_ratio",
    "training.warmup_steps",
    "training.warmup_ratio",
    "training.weight_decay",
    "training.max_grad_norm",
    "training.router_aux_loss_coef",
    "training.max_steps",
    "training.num_train_epochs",
    "training.mixed_precision_dtype",
    "training.gradient_accumulation_steps",
    "training.tf32",
    "training.fp8",
}
"""Keys that change what is learned from here on, but leave the checkpoint loadable: `--allow` lets them differ too.
Every other key is refused."""


def check_allowed(allow: Sequence[str]) -> None:
    """Raises RequestError for each word of `--allow` that lets nothing differ."""
    takes = (*sorted({*EXACT, *STEERING, *WHAT, *MODELS}),)
    problems = list[Problem]()
    for word in allow:
        if word in takes or word in FREE or word.startswith(("gpu.", "fsdp.")):
            continue
        if word in every_key():
            problems.append(Problem("--allow", f"no checkpoint can go on with another {word}", None, ", ".join(takes)))
        else:
            found = next((key for key in takes if key.endswith(f".{word}")), None)
            nearest = found or next(iter(get_close_matches(word, takes, 1)), None)
            problems.append(Problem("--allow", f"there is no key `{word}`", None, ", ".join(takes), nearest))
    if problems:
        raise RequestError(problems)


def check_resume(
    saved: Mapping[str, Any], config: TrainingConfig, allow: Sequence[str], moved: Set[str] = frozenset()
) -> list[str]:
    """One line for each free or allowed difference. `moved`: keys that say where a model lies which is what it was.

    Raises RequestError listing every difference that needs `--allow KEY`, or that no checkpoint can survive.
    """
    lines = list[str]()
    known = _with_defaults(saved, TrainingConfig().model_dump(mode="json"))
    problems = list(_other_global_batch(known, config, allow))
    is_cut_otherwise = known["gpu"]["count"] != config.gpu.count or _world(known) != config.batch.world
    free = {*FREE, *moved, *(SIZES if is_cut_otherwise else ())}
    for key, before, now in _differences(known, config.model_dump(mode="json"), ""):
        change = f"was {before}, is now {now}"
        if key in free or key.startswith(("gpu.", "fsdp.")) or (key in allow and key in (EXACT | STEERING)):
            lines.append(f"{key} {change}")
        elif key in EXACT:
            problems.append(Problem(key, f"{change}: the results differ by rounding", expected=f"--allow {key}"))
        elif key in STEERING:
            problems.append(Problem(key, f"{change}: the run would learn something else", expected=f"--allow {key}"))
        else:
            problems.append(Problem(key, f"{change}: the checkpoint is of another run", expected=f"{before}"))
    if problems:
        raise RequestError(problems)
    return lines


def _other_global_batch(known: Mapping[str, Any], config: TrainingConfig, allow: Sequence[str]) -> Iterator[Problem]:
    """More or fewer devices cut a step into other parts, but it is to have the same rows."""
    training, world, batch = known["training"], _world(known), config.batch
    if world == batch.world or "training.gradient_accumulation_steps" in allow:
        return
    rows = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * world
    if rows != batch.global_size:
        before = _counted(known["gpu"]["count"], world)
        now = _counted(config.gpu.count, batch.world)
        message = f"a step had {counted(rows, 'row')} on {before}, and has {batch.global_size} on {now}"
        fitting, remainder = divmod(rows, batch.per_device * batch.world)
        expected = f"{fitting}" if fitting and not remainder else "sizes whose product is the same"
        yield Problem("training.gradient_accumulation_steps", message, expected=expected)


def _world(known: Mapping[str, Any]) -> int:
    """Devices that had rows of their own, or groups of devices that shared rows or matrices."""
    world: int = known["gpu"]["count"]
    if known["model"]["attn_implementation"] == Attention.RING_ATTENTION:
        world //= known["fsdp"]["context_parallel_size"] or world
    world //= known["fsdp"]["tensor_parallel_size"]
    return world


def _counted(count: int, world: int) -> str:
    devices = f"{counted(count, 'device')}"
    return devices if count == world else f"{devices} ({counted(world, 'group')})"


def _with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What an older version saved, with the defaults of the keys that it did not know: it ran without them."""
    filled = {**defaults, **saved}
    for name, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(filled[name], Mapping):
            filled[name] = _with_defaults(filled[name], default)
    return filled


def _are_sections(value: Any) -> bool:
    """Whether this is a list of sections, such as sources; one of an older version lacks keys, which were unset."""
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
