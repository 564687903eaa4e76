"""How many tokens a row may have."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from framework.build.hub import hub_is_reachable, one_line
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams

DEFAULT_LENGTH = 2048
"""Used when `model.model_max_length` is unset and the model has more positions than this (CONTRACT.md)."""

POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Where Hugging Face configs keep the number of positions. `max_seq_len` is MPT's word, `seq_length` ChatGLM's."""


def effective_length(config: TrainingConfig) -> int:
    """The longest row in tokens: `model.model_max_length`, or the smaller of 2048 and the model's positions.

    Raises RequestError when the value is over the model's positions without a scaling of them, or still `auto`.
    """
    written = config.model.model_max_length
    if written == "auto":
        raise RequestError([Problem("model.model_max_length", "`auto` has to be resolved before rows are made")])
    settings = architecture_settings(config.model)
    positions = position_count(settings)
    if written is None:
        return min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    if positions is not None and written > positions and not _scales_positions(settings):
        raise RequestError(
            [
                Problem(
                    "model.model_max_length",
                    f"{written} tokens is more than the model has positions for ({positions})",
                    expected=f"at most {positions}, or a `rope_scaling` in model.architecture",
                )
            ]
        )
    return written


def architecture_settings(model: ModelParams) -> Mapping[str, Any]:
    """The model's Hugging Face config as written: `model.architecture`, else the config.json of `model.model_name`.

    Empty when neither is set. Raises RequestError when the config.json cannot be read.
    """
    if model.architecture is not None:
        settings = model.architecture.thaw()
    elif model.model_name is None:
        return {}
    else:
        settings = _read_config(model.model_name, model.model_revision)
    # Models that also see or hear keep the language model's part one level down.
    text = settings.get("text_config")
    return text if isinstance(text, dict) else settings


def position_count(settings: Mapping[str, Any]) -> int | None:
    """Positions that the architecture was made for; None when it has no limit (ALiBi, relative) or is not known."""
    for key in POSITION_KEYS:
        if isinstance(settings.get(key), int):
            return int(settings[key])
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    default = CONFIG_MAPPING[model_type]().get_text_config()
    return getattr(default, "max_position_embeddings", None)


def _scales_positions(settings: Mapping[str, Any]) -> bool:
    # transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`; both may stand there saying "default".
    for key in ("rope_scaling", "rope_parameters"):
        scaling = settings.get(key)
        if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
            return True
    return False


def _read_config(name: str, revision: str | None) -> dict[str, Any]:
    settings: dict[str, Any]
    try:
        settings, _ = PretrainedConfig.get_config_dict(name, revision=revision, local_files_only=not hub_is_reachable())
    except Exception as error:  # the hub client and its cache raise many kinds, of which none is a fault of ours
        message = f"the config.json of {name!r} could not be read: {one_line(error)}"
        raise RequestError([Problem("model.model_name", message)]) from error
    return settings
