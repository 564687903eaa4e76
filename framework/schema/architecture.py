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
