"""What a Hugging Face config says of positions, read from its plain mapping."""

from collections.abc import Mapping
from typing import Any

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Where Hugging Face configs keep the number of positions. `max_seq_len` is MPT's word, `seq_length` ChatGLM's."""


def language_part(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings: models that also see or hear keep them one level down."""
    text = settings.get("text_config")
    return text if isinstance(text, Mapping) else settings


def position_count(settings: Mapping[str, Any]) -> int | None:
    """Positions that the architecture was made for; None when it has no limit (ALiBi, relative) or says none."""
    part = language_part(settings)
    return next((part[key] for key in POSITION_KEYS if type(part.get(key)) is int), None)


def scales_positions(settings: Mapping[str, Any]) -> bool:
    """Whether positions are stretched, in all layers or in one kind of them (then one level deeper).

    transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`; both may stand there saying "default".
    """
    part = language_part(settings)
    ropes = [part[key] for key in ("rope_scaling", "rope_parameters") if isinstance(part.get(key), Mapping)]
    ropes += [kind for rope in ropes for kind in rope.values() if isinstance(kind, Mapping)]
    return any(rope.get("rope_type", rope.get("type")) not in (None, "default") for rope in ropes)


def laid_over(own: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A model's own config with what was written of it in place of its values.

    Both say rotary positions and the dtype in one way, that of transformers 5: an earlier version's `rope_theta` next
    to the `rope_parameters` of a newer one would be read by nobody.
    """
    below, above = with_current_names(own), with_current_names(written)
    rope = above.get(_ROPE)
    if isinstance(rope, Mapping) and isinstance(below.get(_ROPE), Mapping):
        above[_ROPE] = {**below[_ROPE], **rope} if "rope_type" not in rope else {**_theta(below[_ROPE]), **rope}
    return {**below, **above}


_ROPE = "rope_parameters"


def _theta(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same config, with `torch_dtype`, `rope_theta` and `rope_scaling` under the names of transformers 5."""
    named = dict(settings)
    if "torch_dtype" in named:
        named.setdefault("dtype", named.pop("torch_dtype"))
    scaling = named.pop("rope_scaling", None)
    rope = {**(scaling if isinstance(scaling, Mapping) else {}), **(named.get(_ROPE) or {})}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if "rope_theta" in named:
        rope.setdefault("rope_theta", named.pop("rope_theta"))
    return {**named, _ROPE: rope} if rope else named
