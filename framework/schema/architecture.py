"""Positions in a Hugging Face config, and `model.rope_scaling`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from framework.schema.choices import Choice
from framework.schema.facts import NO_MEMORY
from framework.schema.params import Integer, Number, Params

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys for the number of positions in Hugging Face configs. `max_seq_len` is MPT's, `seq_length` ChatGLM's."""


def language_part(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings, which multimodal models have in a nested config."""
    text = settings.get("text_config")
    return text if isinstance(text, Mapping) else settings


def position_count(settings: Mapping[str, Any]) -> int | None:
    """Number of positions of the architecture; None if it has no limit (ALiBi, relative) or states none."""
    part = language_part(settings)
    return next((part[key] for key in POSITION_KEYS if type(part.get(key)) is int), None)


def scales_positions(settings: Mapping[str, Any]) -> bool:
    """Whether positions are scaled, in all layers or in one layer type (then nested one level deeper).

    transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`; both may have the type "default".
    """
    part = language_part(settings)
    ropes = [part[key] for key in ("rope_scaling", "rope_parameters") if isinstance(part.get(key), Mapping)]
    ropes += [kind for rope in ropes for kind in rope.values() if isinstance(kind, Mapping)]
    return any(rope.get("rope_type", rope.get("type")) not in (None, "default") for rope in ropes)


def laid_over(own: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """A model's own config, overridden by the written values.

    Rotary positions and dtype of both are first converted to the keys of transformers 5: an older `rope_theta` next to
    newer `rope_parameters` would be ignored.
    """
    below, above = with_current_names(own), with_current_names(written)
    rope = above.get(_ROPE)
    if isinstance(rope, Mapping) and isinstance(below.get(_ROPE), Mapping):
        own_rope = below[_ROPE]
        if "rope_type" in rope:  # another type keeps only the base
            own_rope = {name: value for name, value in own_rope.items() if name == "rope_theta"}
        above[_ROPE] = {**own_rope, **rope}
    return {**below, **above}


_ROPE = "rope_parameters"


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


class RopeType(Choice):
    """Types of position scaling, by transformers' names."""

    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


OWN_KEYS: Mapping[RopeType, Mapping[str, float | None]] = {
    RopeType.LINEAR: {},
    RopeType.DYNAMIC: {},
    RopeType.YARN: {"attention_factor": None, "beta_fast": None, "beta_slow": None},
    RopeType.LLAMA3: {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Keys of one type only, with the value that is written if unset; None leaves the key out."""

_Above0 = Annotated[Number, Field(gt=0)]


class RopeScaling(Params):
    """Scaled rotary positions. They replace scaling in the model's config and are saved with it."""

    rope_type: RopeType
    """`linear` divides positions by `factor`; `yarn` and `llama3` scale low frequencies and keep high ones; `dynamic`
    changes the base only for rows longer than the original length. No memory."""
    factor: Annotated[Number, Field(ge=1)]
    """Ratio of the new to the original number of positions. No memory by itself: longer rows cost by
    `model_max_length`."""
    original_max_position_embeddings: Annotated[Annotated[Integer, Field(ge=1)] | None, NO_MEMORY] = None
    """Original number of positions. Unset: that of the model's config."""
    rope_theta: Annotated[_Above0 | None, NO_MEMORY] = None
    """Base of the frequencies. Unset: the model's."""
    attention_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """Factor on cosines and sines in `yarn`. Unset: 0.1 ln(factor) + 1."""
    beta_fast: Annotated[_Above0 | None, NO_MEMORY] = None
    """Rotations within the original length above which `yarn` keeps a frequency. Unset: 32."""
    beta_slow: Annotated[_Above0 | None, NO_MEMORY] = None
    """Rotations below which `yarn` scales a frequency fully. Unset: 1."""
    low_freq_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """Rotations within the original length below which `llama3` scales a frequency fully. Unset: 1."""
    high_freq_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """Rotations above which `llama3` keeps a frequency. Unset: 4."""


def has_limit(scaling: RopeScaling | None) -> bool:
    """Whether scaling gives a fixed number of positions, unlike dynamic scaling."""
    return scaling is not None and scaling.rope_type is not RopeType.DYNAMIC
