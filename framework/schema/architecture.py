"""Positions as a Hugging Face config states them, and `model.rope_scaling`, which stretches them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from framework.schema.choices import Choice
from framework.schema.facts import NO_MEMORY
from framework.schema.params import Integer, Number, Params

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
        own_rope = below[_ROPE]
        if "rope_type" in rope:  # of another kind, of which the base alone is the same
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
    """How positions are stretched, by transformers' names."""

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
"""Keys that are of one kind alone, with the value that an unset one stands for in a config; None leaves it out."""

_Above0 = Annotated[Number, Field(gt=0)]


class RopeScaling(Params):
    """Stretched rotary positions. They replace a stretching of the model's own and are written to its saved config."""

    rope_type: RopeType
    """`linear` divides positions by `factor`; `yarn` and `llama3` stretch slow frequencies and leave fast ones;
    `dynamic` changes the base for rows longer than the model was trained on, and nothing below. No memory."""
    factor: Annotated[Number, Field(ge=1)]
    """Times as many positions as the model was trained on. No memory: that of longer rows is `model_max_length`'s."""
    original_max_position_embeddings: Annotated[Annotated[Integer, Field(ge=1)] | None, NO_MEMORY] = None
    """Positions that it was trained on. Unset: what its config says."""
    rope_theta: Annotated[_Above0 | None, NO_MEMORY] = None
    """Base of the frequencies. Unset: the model's."""
    attention_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """What `yarn` multiplies cosines and sines by. Unset: 0.1 ln(factor) + 1."""
    beta_fast: Annotated[_Above0 | None, NO_MEMORY] = None
    """Turns within the original length above which `yarn` leaves a frequency. Unset: 32."""
    beta_slow: Annotated[_Above0 | None, NO_MEMORY] = None
    """Turns below which `yarn` stretches it in full. Unset: 1."""
    low_freq_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """Turns within the original length below which `llama3` stretches a frequency in full. Unset: 1."""
    high_freq_factor: Annotated[_Above0 | None, NO_MEMORY] = None
    """Turns above which `llama3` leaves it. Unset: 4."""


def has_limit(scaling: RopeScaling | None) -> bool:
    """Whether positions are stretched to a number of them, not by the rows that come."""
    return scaling is not None and scaling.rope_type is not RopeType.DYNAMIC
