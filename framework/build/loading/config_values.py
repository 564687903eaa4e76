"""Checks for impossible values of a Hugging Face config before transformers builds the model.

Its config classes check only types: an epsilon of NaN makes every loss NaN, a model without layers builds, and one with
a million layers builds for hours.
"""

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from framework.errors import Problem, RequestError
from framework.schema.architecture import OWN_KEYS, POSITION_KEYS, RopeScaling, RopeType, position_count
from framework.schema.model import ModelParams

MOST_LAYERS = 10_000
"""Public models have up to 126 (Llama 3.1 405B); 1,000 of ten parameters each build in seconds."""
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""transformers' common names, mapped to a family's own by `attribute_map`."""
_NOT_NEGATIVE = ("_eps", "_epsilon", "initializer_range", "init_std")
_FRACTIONS = ("dropout", "_pdrop", "_dropout_prob", "drop_rate")
_POSITIVE = ("rope_theta", "rope_local_base_freq", "factor")
_DTYPES = ("dtype", "torch_dtype")


def refuse_unreadable_values(settings: Mapping[str, Any], where: str, key: str) -> None:
    """Raise RequestError, under `key`, for values for which transformers would raise a Python error: an unknown dtype,
    a `quantization_config` that is not an object, 0 heads. `where` names the config."""
    problems = [
        Problem(key, f"{where} has {name} {count}", expected=works)
        for name, (count, works) in _impossible_counts(settings)
    ]
    for name, value in _leaves(settings):
        known = getattr(torch, str(value).removeprefix("torch."), None)
        if name.rpartition(".")[2] in _DTYPES and isinstance(value, str) and not isinstance(known, torch.dtype):
            message = f"{where} has {name} {value!r}, which torch does not have"
            problems.append(Problem(key, message, expected="float32, bfloat16 or float16"))
    stored = settings.get("quantization_config")
    if stored is not None and not isinstance(stored, Mapping):
        message = f"{where} has quantization_config {stored!r}"
        problems.append(Problem(key, message, expected="an object with quant_method, or none"))
    if problems:
        raise RequestError(problems)


def refuse_impossible_values(architecture: PretrainedConfig, where: str, written: Container[str]) -> None:
    """Raise RequestError for impossible numbers of a config: under `model.model_name`, with `where` as the name of the
    config, or under `model.architecture` if the key is `written` there."""
    found: dict[str, tuple[Any, str]] = {}
    for name, value in _leaves(architecture.to_dict()):
        if not isinstance(value, bool) and (works := _wanted(name, value)):
            found.setdefault(name, (value, works))
    for part in (architecture, getattr(architecture, "text_config", None)):
        if isinstance(part, PretrainedConfig):
            # read from the dict: attributes that differ between layers cannot be read
            called, settings = part.attribute_map, part.to_dict()
            counts = {name: settings.get(called.get(name, name)) for name in _COUNTS}
            found = {called.get(name, name): wrong for name, wrong in _impossible_counts(counts)} | found
    if found:
        raise RequestError(
            [
                Problem(f"model.architecture.{name}", f"cannot be {value}", expected=works)
                if name.partition(".")[0] in written
                else Problem("model.model_name", f"{where} has {name} {value}", expected=works)
                for name, (value, works) in found.items()
            ]
        )


def _impossible_counts(settings: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, str]]]:
    for name in _COUNTS:
        count, most = settings.get(name), MOST_LAYERS if name == "num_hidden_layers" else 2**31 - 1
        if type(count) is int and not 1 <= count <= most:
            yield name, (count, f"1 to {most:,}")


def _wanted(name: str, value: Any) -> str | None:
    """The expected values of a key; None if the value may be right."""
    last = name.rpartition(".")[2]
    if not isinstance(value, int | float):
        return "a number" if last in _POSITIVE and isinstance(value, str) else None
    if math.isnan(value) or (math.isinf(value) and last):  # list items may be infinite, as the end of a range
        return "a finite number"
    if last.endswith(_NOT_NEGATIVE) and value < 0:
        return "0 or more"
    if last.endswith(_FRACTIONS) and not 0 <= value <= 1:
        return "0 to 1"
    if last in POSITION_KEYS and value < 1:
        return "1 or more"
    return "more than 0" if last in _POSITIVE and value <= 0 else None


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a config; list items have the list's name with a trailing dot."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif isinstance(value, list | tuple):
            yield from ((f"{above}{name}.", item) for item in value if not isinstance(item, Mapping | list | tuple))
        else:
            yield f"{above}{name}", value


def explain_refusal(architecture: PretrainedConfig, error: Exception) -> str | None:
    """Message that names the config key whose value transformers looked up in vain; None for other errors."""
    if not isinstance(error, KeyError) or len(error.args) != 1:
        return None
    asked = error.args[0]
    names = [name for name, value in _leaves(architecture.to_dict()) if value == asked and type(value) is type(asked)]
    if not names:
        return f"it looks for {asked!r}, which is missing"
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {asked!r}, which it does not know"


KEY = "model.rope_scaling"
FULL = "full_attention"
"""Layer type whose positions are scaled if types differ: the others see a window of tokens."""


def scale_positions(model: ModelParams, architecture: PretrainedConfig) -> None:
    """Set scaled positions in a model's config. Raises RequestError for one without rotary positions."""
    scaling, text = model.rope_scaling, architecture.get_text_config()
    if scaling is None:
        return
    settings = text.to_dict()
    own, positions = rope_of(settings), position_count(settings)
    if own is None or positions is None:
        message = f"{architecture.model_type} has no rotary positions to scale"
        raise RequestError([Problem(KEY, message, expected="unset")])
    before = own.get("original_max_position_embeddings") or positions  # before the model's own scaling
    if own.get("rope_type") == RopeType.LINEAR:
        before = positions / own.get("factor", 1)
    trained = scaling.original_max_position_embeddings or int(before)
    own_keys = OWN_KEYS[RopeType(scaling.rope_type)]
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if own.get(name) is not None}
    original = {"original_max_position_embeddings": trained} if own_keys else {}
    written = {name: getattr(scaling, name) for name in ("rope_theta", *own_keys)}
    given = _set({**own_keys, **_set(written)})
    rope = {**kept, "rope_type": str(scaling.rope_type), "factor": float(scaling.factor), **original, **given}
    if isinstance(text.rope_parameters.get(FULL), Mapping):
        text.rope_parameters = {**text.rope_parameters, FULL: rope}
    else:
        text.rope_parameters = rope
    text.max_position_embeddings = stretched(scaling, trained)
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = trained


def stretched(scaling: RopeScaling, trained: int) -> int:
    """Positions in the config after scaling. Dynamic scaling depends on the row, so the original number stays."""
    return trained if scaling.rope_type is RopeType.DYNAMIC else int(trained * scaling.factor)


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Rotary settings of a config, of its full-attention layers if types differ; None without rotary positions."""
    rope = settings.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope:
        return None
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    found = rope.get(FULL) if nested else rope
    return found if isinstance(found, Mapping) and found.get("rope_theta") else None


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
