"""`model.rope_scaling`: rotary positions beyond those that a model was trained on."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from framework.schema.choices import Choice
from framework.schema.facts import NO_MEMORY
from framework.schema.params import Integer, Number, Params


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
