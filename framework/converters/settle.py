"""Validation of converted entries: defaults are removed, and values that our schema or rules refuse are reported as
left."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import yaml

from framework.compose.validation import validate
from framework.converters.translation import Left, Translation, Why
from framework.errors import Problem
from framework.installation import shipped
from framework.schema.config import TrainingConfig
from framework.schema.keys import dotted, values
from framework.schema.optimizers import FACTS
from framework.schema.renamed import OLD_NAMES
from framework.schema.rules.every import Needs, find_conflicts

NEEDED = ("model.torch_dtype_str", "training.mixed_precision_dtype")
"""Keys whose default depends on the trained weights."""
AS_UNSET = {
    "training.tf32": False,
    "training.gradient_accumulation_steps": 1,
    "training.warmup_steps": 0,
    "model.attn_implementation": "sdpa",
}
"""Effective defaults of keys whose default is not a value (sdpa if the model supports it)."""
GIVEN_UP_FIRST = (
    "model.chunked_loss", "model.enable_liger_kernel", "training.compile", "training.activation_offload",
    "training.gradient_checkpointing_kwargs.use_reentrant", "training.optimizer_in_backward", "training.fp8",
    "fsdp.cpu_offload", "fsdp.forward_prefetch", "data.workers",
)  # fmt: skip
"""Keys that affect only memory or time, not the training result: in a conflict, these are left out."""
_CARD = {"name": "h100_80gb", "capability": "9.0", "bf16_flops": 1e15}
"""A card that supports everything in these recipes, which do not name their card."""
_SHARDS = 2
"""Devices for checking a sharded recipe: the minimum."""


def settle(t: Translation) -> tuple[str, ...]:
    """Remove entries that do not validate, and record the result for every value. Returns problems that no entry can
    fix."""
    # The shipped model of that name, planned without network.
    if t.has("model.model_name") and not t.has("model.architecture"):
        t.preset = _presets().get(str(t.entries["model.model_name"].value), "")
    _put_what_goes_together(t)
    _drop_invalid(t)
    warnings = _drop_conflicts(t)
    _drop_defaults(t)
    # `500_000` and `1e-5` in quotes, as numbers.
    config = {dotted(path): value for path, value in values(_config(t))}
    for ours, entry in t.entries.items():
        number = config.get(ours)
        if isinstance(entry.value, str) and isinstance(number, int | float) and not isinstance(number, bool):
            t.entries[ours] = replace(entry, value=number)
    _name_the_rest(t)
    t.left = [_as_read(row, t.source.misread) for row in t.left]
    t.left.sort(key=lambda row: int(row.place.rpartition(":")[2]))
    return warnings


def tree(t: Translation) -> dict[str, Any]:
    """The entries as nested sections."""
    nested: dict[str, Any] = {}
    for ours, entry in t.entries.items():
        *sections, name = ours.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = entry.value
    return nested


def preset(name: str) -> dict[str, Any]:
    """The `model` section of a shipped model."""
    section: dict[str, Any] = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())["model"]
    return section


@cache
def _presets() -> dict[str, str]:
    """Name of a model on the hub -> name of its preset."""
    names = [file.stem for file in (shipped("conf") / "model").glob("*.yaml")]
    return {str(hub): name for name in names if (hub := preset(name).get("model_name"))}


def _put_what_goes_together(t: Translation) -> None:
    """Keys that ours requires together with one of theirs."""
    if t.has("model.load_pretrained_weights", False) and not (t.preset or t.has("model.architecture")):
        t.head.append("It starts from random weights there: add model.architecture, load_pretrained_weights: false")
    if t.has("data.streaming", True) and not t.has("training.max_steps"):
        t.drop("data.streaming", Why.WRITE, "training.max_steps next to data.streaming: true")
    if t.has("training.eval_steps") and not (t.has("data.eval") or t.has("data.eval_fraction")):
        t.drop("training.eval_steps", Why.ABSENT, "there are no rows to evaluate on")
    has_reference = t.has("training.task", "preference") and not any(
        t.has("training.preference.loss_type", loss) for loss in ("orpo", "simpo")
    )
    if has_reference and t.has("fsdp.enable_fsdp", True):
        comment = "sharded weights cannot be taken back to what they were"
        t.put("training.preference.precompute_reference", True, comment=comment)
    _put_what_can_be_sharded(t)
    if t.has("model.enable_liger_kernel", True) and not t.has("model.chunked_loss"):
        t.put("model.chunked_loss", True, comment="Liger's loss builds no logits either")


def _put_what_can_be_sharded(t: Translation) -> None:
    """Small states and 8-bit weights are dropped in favour of sharding, which the file also requests."""
    if not t.has("fsdp.enable_fsdp", True):
        return
    optimizer = t.entries.get("training.optimizer")
    if optimizer and optimizer.value in {str(choice) for choice, facts in FACTS.items() if not facts.shards.is_sharded}:
        text = f"the states of {optimizer.value} cannot be sharded; those of adamw_torch_fused are, 8 bytes a parameter"
        t.drop("training.optimizer", Why.NOT_OURS, text)
        t.put("training.optimizer", "adamw_torch_fused", comment=f"{optimizer.value} cannot be sharded")
    if t.has("peft.q_lora_bits", 8):
        text = (
            "8-bit weights are not sharded; peft.q_lora: true holds them in 4 bits, until then they are not quantized"
        )
        t.drop("peft.q_lora_bits", Why.NOT_OURS, text)
        t.entries.pop("peft.q_lora", None)


def _drop_invalid(t: Translation) -> None:
    """Invalid values, with valid alternatives."""
    for ours in [ours for ours, entry in t.entries.items() if "${" in str(entry.value)]:
        t.drop(ours, Why.WRITE, f"{ours}: the reference in it leads nowhere")
    problems: list[Problem] = []
    written = tree(t)
    _, invalid = validate(written, lambda path: None, problems)
    for key in invalid:
        if key not in t.entries:
            continue
        first = next(problem for problem in problems if problem.key.startswith(key))
        text = f"{key}, {first.expected}" if first.expected else f"{key}: {first.message}"
        t.drop(key, Why.WRITE, text)


def _drop_conflicts(t: Translation) -> tuple[str, ...]:
    """Remove the first of the conflicting keys, until none conflict."""
    needs = Needs(model=True)
    for _ in range(len(t.entries)):
        config = _config(t)
        found = [conflict for conflict in find_conflicts(config, needs) if not conflict.is_warning]
        fixable = [
            (conflict, key)
            for conflict in found
            for key in sorted(conflict.keys, key=lambda key: key not in GIVEN_UP_FIRST)
            if _entry(t, key)
        ]
        if not fixable:
            return tuple(f"{', '.join(conflict.keys)}: {conflict.message}" for conflict in found)
        conflict, key = fixable[0]
        keys = ", ".join(conflict.keys).replace("[0]", "")
        t.drop(_entry(t, key), Why.NOT_OURS, f"{conflict.message} ({keys})")
    return ()


def _entry(t: Translation, key: str) -> str:
    """The entry at, above or below a conflict's key; empty if there is none."""
    around = (ours for ours in t.entries if f"{key}.".startswith((f"{ours}.", f"{ours}[")))
    inside = (ours for ours in t.entries if ours.startswith(f"{key}."))
    return next(iter([*around, *inside]), "")


def _config(t: Translation) -> TrainingConfig:
    count = _SHARDS if t.has("fsdp.enable_fsdp", True) else 1
    count = max(count, int(t.entries["fsdp.tensor_parallel_size"].value) if t.has("fsdp.tensor_parallel_size") else 1)
    written = tree(t)
    if t.preset:
        written["model"] = preset(t.preset) | written["model"]
    return TrainingConfig.model_validate(written | {"gpu": {**_CARD, "count": count}})


def _drop_defaults(t: Translation) -> None:
    """Entries equal to the defaults."""
    unset = {dotted(path): value for path, value in values(TrainingConfig())} | AS_UNSET
    if not t.has("training.use_peft", True):
        # Trained weights are float32 unless it is said, and bfloat16 ones have no autocast.
        held, computed = (t.entries[key].value if key in t.entries else None for key in NEEDED)
        if held == "float32" and computed is not None:
            of = t.entries.pop("model.torch_dtype_str").of
            t.put("training.mixed_precision_dtype", computed, *of, *t.entries["training.mixed_precision_dtype"].of)
        elif held == "bfloat16" and computed == "none":
            del t.entries["training.mixed_precision_dtype"]
    config = {dotted(path): value for path, value in values(_config(t))}
    for ours in list(t.entries):
        if ours in NEEDED or ours not in unset or ours not in config or config[ours] != unset[ours]:
            continue
        for key in t.entries.pop(ours).of:
            if not any(key in entry.of for entry in t.entries.values()):
                t.leave(key, Why.DEFAULT, f"{ours}: {_shown(unset[ours])}")


def _as_read(row: Left, misread: Mapping[str, str]) -> Left:
    """A value of the wrong type was not understood, so it cannot count as the default."""
    if row.why is not Why.DEFAULT or row.key not in misread:
        return row
    return replace(row, why=Why.ABSENT, text=f"not read: {misread[row.key]} is expected there")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "unset" if value in (None, ()) else str(value)


def _name_the_rest(t: Translation) -> None:
    """Leave every value without a result, with its reason."""
    for key in filter(t.is_open, t.source.leaves):
        name = ".".join(part.partition("[")[0] for part in key.split("."))
        old = OLD_NAMES.get(name) or OLD_NAMES.get(name.rpartition(".")[2])
        why, text = Why.ABSENT, old.how if old else ""
        if old and old.use:
            why, text = Why.WRITE, f"{old.use} ({old.how})" if old.how else old.use
        if key in t.source.misread:
            why = Why.DEFAULT  # reported below as not read
        t.leave_unless_off(key, why, text)
