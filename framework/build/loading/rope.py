"""`model.rope_scaling` in the model's own config, in the words of transformers 5."""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from framework.errors import Problem, RequestError
from framework.schema.architecture import position_count
from framework.schema.model import ModelParams
from framework.schema.rope import OWN_KEYS, RopeScaling, RopeType

KEY = "model.rope_scaling"
FULL = "full_attention"
"""Kind of layers that is stretched where layers differ: the others see a window of tokens."""


def scale_positions(model: ModelParams, architecture: PretrainedConfig) -> None:
    """Write the stretched positions into a model's config. Raises RequestError for one without rotary positions."""
    scaling, text = model.rope_scaling, architecture.get_text_config()
    if scaling is None:
        return
    settings = text.to_dict()
    own, positions = rope_of(settings), position_count(settings)
    if own is None or positions is None:
        message = f"{architecture.model_type} has no rotary positions to stretch"
        raise RequestError([Problem(KEY, message, expected="unset")])
    trained = scaling.original_max_position_embeddings or _trained(own, positions)
    rope = _rope(scaling, own, trained)
    if isinstance(text.rope_parameters.get(FULL), Mapping):
        text.rope_parameters = {**text.rope_parameters, FULL: rope}
    else:
        text.rope_parameters = rope
    text.max_position_embeddings = stretched(scaling, trained)
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = trained


def _trained(own: Mapping[str, Any], positions: int) -> int:
    """Positions before the model's own stretching of them, if it has one."""
    if own.get("rope_type") == RopeType.LINEAR:
        return int(positions / own.get("factor", 1))
    return int(own.get("original_max_position_embeddings") or positions)


def stretched(scaling: RopeScaling, trained: int) -> int:
    """Positions that a config states. Dynamic ones are stretched by the rows that come, from those trained on."""
    return trained if scaling.rope_type is RopeType.DYNAMIC else int(trained * scaling.factor)


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rotary positions of a config, of layers that see all tokens where layers differ; None where it has none."""
    rope = settings.get("rope_parameters")
    if not isinstance(rope, Mapping) or not rope:
        return None
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    found = rope.get(FULL) if nested else rope
    return found if isinstance(found, Mapping) and found.get("rope_theta") else None


def _rope(scaling: RopeScaling, own: Mapping[str, Any], trained: int) -> dict[str, Any]:
    own_keys = OWN_KEYS[RopeType(scaling.rope_type)]
    kept = {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if own.get(name) is not None}
    original = {"original_max_position_embeddings": trained} if own_keys else {}
    written = {name: getattr(scaling, name) for name in ("rope_theta", *own_keys)}
    given = _set({**own_keys, **_set(written)})
    return {**kept, "rope_type": str(scaling.rope_type), "factor": float(scaling.factor), **original, **given}


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
