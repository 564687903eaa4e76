"""All rules about combinations of keys, the card, and what a command needs.

Each rule is a pure function of the config: no file is opened, nothing is built.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from framework.schema.config import TrainingConfig
from framework.schema.keys import changed_keys, dotted, uses_of, value_of, values, written_keys
from framework.schema.rules.adapter import adapter_conflicts
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.data import (
    batch_conflicts,
    data_conflicts,
    padding_conflicts,
    row_conflicts,
    step_conflicts,
)
from framework.schema.rules.evaluation import (
    best_conflicts,
    eval_set_conflicts,
    sample_conflicts,
    save_conflicts,
    survival_conflicts,
)
from framework.schema.rules.model import (
    find_liger_conflicts,
    half_precision_attention,
    model_conflicts,
    remote_code_conflicts,
    rope_conflicts,
    sdpa_backend,
    tokenizer_conflicts,
    vocabulary_conflicts,
)
from framework.schema.rules.optimizer import average_conflicts, matrix_conflicts, optimizer_conflicts, update_conflicts
from framework.schema.rules.precision import (
    card_conflicts,
    fp8_conflicts,
    loss_scale_conflicts,
    precision_conflicts,
    rounding_conflicts,
    wide_base_conflicts,
)
from framework.schema.rules.recompute import (
    cache_conflicts,
    compile_conflicts,
    recompute_conflicts,
    recorded_conflicts,
    streamed_base_conflicts,
)
from framework.schema.rules.sharding import context_conflicts, ranks_conflicts, sharding_conflicts, tensor_conflicts
from framework.schema.rules.task import classifier_conflicts, task_conflicts


def unused_key_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Written keys without effect: those that differ from the default, and those set explicitly while the key that
    disables them is not, so that the user expects an effect."""
    changed = set(changed_keys(config, _defaults()))
    written = dict.fromkeys(written_keys(config))
    for key in dict.fromkeys((*written, *sorted(changed))):
        unmet = [use for use in uses_of(key) if use.key != key and not use.fits(value_of(config, use.key))]
        if not unmet:
            continue
        use = next((use for use in unmet if use.refused), unmet[0])
        if key in changed or (use.key not in written and not use.refused):
            message = f"has no effect: {use.reason(value_of(config, use.key))}"
            fitting = f"unset, or {use.key}: true" if use.values == (True,) else "unset"
            yield Conflict((key, use.key), message, fitting if use.refused else None, is_warning=not use.refused)


@cache
def _defaults() -> TrainingConfig:
    return TrainingConfig()


@dataclass(frozen=True)
class Needs:
    """Requirements of a command."""

    model: bool = False
    data: Literal["unneeded", "advised", "required"] = "unneeded"
    devices: Literal["one", "any"] = "one"
    """`any` for a command that inspects one device's share and runs nothing."""


def find_conflicts(config: TrainingConfig, needs: Needs) -> list[Conflict]:
    """Conflicts of all rules, warnings included."""
    return [conflict for rule in RULES for conflict in rule(config)] + list(_unmet_needs(config, needs))


def find_derived_conflicts(config: TrainingConfig) -> list[Conflict]:
    """Conflicts of a resolved config, which may come from derived values: a checkpoint's dtype, the card's autocast. A
    run's config is stored with these values, and has to pass all rules when it is read again."""
    return [conflict for rule in RULES for conflict in rule(config) if not conflict.is_warning]


def _finite(config: TrainingConfig) -> Iterator[Conflict]:
    """Non-finite numbers, and integers beyond 64 bits."""
    for path, value in values(config):
        if not isinstance(value, (int, float)):
            continue
        if not isinstance(value, int) and not math.isfinite(value):
            yield Conflict((dotted(path),), f"cannot be {value}", "a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            yield Conflict((dotted(path),), "is too large for a 64-bit integer", "a smaller number")


def _unmet_needs(config: TrainingConfig, needs: Needs) -> Iterator[Conflict]:
    model = config.model
    if needs.model and model.model_name is None and model.architecture is None:
        keys = ("model.model_name", "model.architecture")
        yield Conflict(keys, "there is no model", "model.model_name, model.architecture, or a preset `model=`")
    if (
        needs.data == "required"
        and model.load_pretrained_weights
        and model.model_name is None
        and model.architecture is not None
    ):
        keys = ("model.load_pretrained_weights", "model.model_name")
        message = "there are no pretrained weights to load: an architecture is given, but no model.model_name"
        yield Conflict(keys, message, "model.load_pretrained_weights: false, or model.model_name")
    if needs.data != "unneeded" and not config.data.train:
        is_warning = needs.data == "advised"
        yield Conflict(("data.train",), "there is no training data", "data.train", is_warning)


RULES = (
    precision_conflicts,
    loss_scale_conflicts,
    rounding_conflicts,
    wide_base_conflicts,
    optimizer_conflicts,
    matrix_conflicts,
    update_conflicts,
    average_conflicts,
    cache_conflicts,
    padding_conflicts,
    compile_conflicts,
    recorded_conflicts,
    recompute_conflicts,
    find_liger_conflicts,
    streamed_base_conflicts,
    sharding_conflicts,
    survival_conflicts,
    save_conflicts,
    best_conflicts,
    eval_set_conflicts,
    sample_conflicts,
    ranks_conflicts,
    context_conflicts,
    tensor_conflicts,
    task_conflicts,
    classifier_conflicts,
    card_conflicts,
    half_precision_attention,
    sdpa_backend,
    fp8_conflicts,
    batch_conflicts,
    step_conflicts,
    model_conflicts,
    remote_code_conflicts,
    tokenizer_conflicts,
    data_conflicts,
    adapter_conflicts,
    row_conflicts,
    _finite,
    vocabulary_conflicts,
    rope_conflicts,
    unused_key_conflicts,
)
