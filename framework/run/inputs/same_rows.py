"""Whether a run that goes on reads what it began with: the tokens mean the same, the training rows and the models that
it reads are the same.

A config names files, not what is in them; and a tokenizer that is built on the rows is another one when they change, so
that the weights of a checkpoint would stand for other words.
"""

import json
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from framework.build.data.packing import Packs
from framework.build.data.rows import Rows
from framework.build.loading.bases import BASE, TEACHER, Base, differences, read_bases
from framework.compose.own_adapter import BASE_RECORD, find_adapter
from framework.compose.trained_folders import read_json
from framework.errors import Problem, RequestError
from framework.run.inputs.inputs import Inputs
from framework.schema.config import TrainingConfig

WHAT = {"model.tokenizer": "the tokenizer has other tokens", "data.train": "the training rows are others"}
"""What is compared, by the key that lets it differ."""
MOST = 6
"""Differences of a model that a message lists."""
MODELS = {BASE: "model", TEACHER: "training.teacher"}
"""Models that are compared, by the word that lets them differ, with the section that names them."""


def read_digests(inputs: Inputs) -> dict[str, Any]:
    """Of the tokenizer's vocabulary, of the training rows (of a stream its first block stands for all of it), and of
    each model that is read, as `Base.to_json` has it."""
    vocabulary = json.dumps(sorted(inputs.tokenizer.get_vocab().items()))
    train = inputs.data.train
    plain = train.rows if isinstance(train, Packs) else train
    found: dict[str, Any] = {"model.tokenizer": f"{zlib.crc32(vocabulary.encode()):08x}"}
    found |= {"data.train": f"{rows_checksum(plain):08x}"} if isinstance(plain, Rows) else {}
    models = read_bases(inputs.config, inputs.architecture)
    return found | {name: base.to_json() for name, base in models.items()}


def rows_checksum(rows: Rows, found: int = 0) -> int:
    """Of all that is trained on from the rows, in their order before they are mixed."""
    for array in (rows.tokens, rows.labels, rows.offsets, rows.targets):
        if array is not None:
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found if rows.rejected is None else rows_checksum(rows.rejected, found)


def needed_models(config: TrainingConfig) -> set[str]:
    """Those of `MODELS` whose weights a run needs in addition to those in its checkpoint: an adapter's base, what a
    preference is measured against, a teacher."""
    needs_base = config.training.use_peft or config.training.has_reference
    return {TEACHER, *([BASE] if needs_base else [])}


def check_read(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str], needed: Set[str] = frozenset(MODELS)
) -> list[str]:
    """One line for each allowed difference; an older checkpoint that says nothing passes. `needed` are the models whose
    weights matter.

    Raises RequestError for the others.
    """
    found = [
        (key, f"{WHAT[key]} than those that the run began with", "the same files")
        for key in WHAT
        if key in saved and key in now and saved[key] != now[key]
    ]
    for name, section in MODELS.items():
        if name in saved and name in now:
            before, after = Base.from_json(saved[name]), Base.from_json(now[name])
            if changed := differences(before, after, name in needed):
                message = f"{after.name or section} is not what the run began with: {'; '.join(changed[:MOST])}"
                found.append((name, message, "the model as it was"))
    problems = [
        Problem(key, message, expected=f"{expected}, or --allow {key}")
        for key, message, expected in found
        if key not in allow
    ]
    if problems:
        raise RequestError(problems)
    return [f"{key}: {message}" for key, message, _ in found]


def check_adapters_base(config: TrainingConfig, now: Mapping[str, Any], allow: Sequence[str]) -> list[str]:
    """One line for each allowed difference between the model and what the adapter of `peft.adapter_path` was trained
    on, as far as that was recorded next to it. Raises RequestError for others."""
    found = find_adapter(config.peft.adapter_path) if config.peft.adapter_path is not None else None
    if not isinstance(found, tuple) or (before := read_json(found[0] / BASE_RECORD)) is None:
        return []
    try:
        changed = differences(Base.from_json(before), Base.from_json(now[BASE]))
    except ValueError as error:
        raise RequestError([Problem("peft.adapter_path", f"{found[0] / BASE_RECORD} {error}")]) from None
    if not changed:
        return []
    message = f"it is not what the adapter in {found[0]} was trained on: {'; '.join(changed[:MOST])}"
    if BASE not in allow:
        expected = f"{before.get('name') or 'the base as it was'}, or --allow {BASE}"
        raise RequestError([Problem("model.model_name", message, expected=expected)])
    return [f"{BASE}: {message}"]


def moved(saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> set[str]:
    """Keys that say where a model or tokenizer lies, of those that are what they were, or may differ."""
    keys = set[str]()
    for name, section in MODELS.items():
        before, after = (items[name]["weights"] if name in items else None for items in (saved, now))
        if name in allow or (before is not None and before == after):
            keys |= {f"{section}.model_name", f"{section}.model_revision"}
    if "model.tokenizer" in saved and saved["model.tokenizer"] == now.get("model.tokenizer"):
        keys.add("model.tokenizer_name")
    return keys
