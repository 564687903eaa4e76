"""Keys of work that rehearsals can share: captures of compiled blocks, or whole rehearsals that differ in allocator
settings only. No torch."""

import json
from collections.abc import Mapping
from typing import Any

from framework.memory.search.estimate import DEPTH_KEYS, PER_LAYER

MICRO_BATCH = "per_device_train_batch_size"
_OUTSIDE = {
    "training": (
        *(MICRO_BATCH, "per_device_eval_batch_size", "gradient_accumulation_steps", "global_batch_size"),
        *("enable_gradient_checkpointing", "gradient_checkpointing_every", "eval_steps", "allocator"),
    ),
    "model": ("chunked_loss",),
    "data": ("eval", "eval_fraction"),
}
"""Keys whose effect on a block is visible in its shapes or attributes, or is outside of its call."""


def block_settings(config: Mapping[str, Any]) -> str:
    """Digest of the settings of a config, dumped as JSON, that its blocks may depend on in addition to their inputs."""
    seen = {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in config.items()}
    for section, names in _OUTSIDE.items():
        for name in names:
            seen[section].pop(name)
    seen["model"]["architecture"] = _without_depth(seen["model"]["architecture"])
    return json.dumps(seen, sort_keys=True)


def shared_work(config: Mapping[str, Any]) -> str | None:
    """Digest of the block captures that a rehearsal needs; None without compilation, which captures nothing."""
    training = config["training"]
    return f"{training[MICRO_BATCH]} {block_settings(config)}" if training["compile"] is True else None


def shared_rehearsal(config: Mapping[str, Any]) -> str:
    """Digest of a config without the settings of the allocator, which do not change the recorded events."""
    return json.dumps({**config, "training": {**config["training"], "allocator": None}}, sort_keys=True)


def _without_depth(architecture: Any) -> Any:
    """The architecture, or its language model, without the number of layers."""
    if not isinstance(architecture, Mapping):
        return architecture
    return {
        key: _without_depth(value) if key == "text_config" else value
        for key, value in architecture.items()
        if key not in (*DEPTH_KEYS, *PER_LAYER)
    }
