"""Plans that were made before, in the user's cache folder. A plan depends on its config, on the libraries that are
rehearsed and on our own code: all of them are in its name, so nothing in the folder is ever out of date. No torch."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from framework.caches import cache_folder, our_files, versions
from framework.memory.ledger import Plan
from framework.schema.config import TrainingConfig

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "torchao", "triton")
_NO_MATTER = (
    *(("training", name) for name in ("output_dir", "run_name", "seed", "learning_rate", "trackers")),
    ("data", "train"),
)


def read(config: TrainingConfig) -> Plan | None:
    """The plan that was stored for this config; None where there is none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Plan.from_json(json.loads(_file(config).read_text(encoding="utf-8")))
    return None


def write(config: TrainingConfig, plan: Plan) -> None:
    """Store a plan. A folder that cannot be written costs time the next time, and nothing else."""
    with suppress(OSError):
        file = _file(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(plan.to_json()), encoding="utf-8")
        unfinished.replace(file)


def _file(config: TrainingConfig) -> Path:
    document: dict[str, Any] = config.model_dump(mode="json")
    for section, name in _NO_MATTER:
        document[section].pop(name)
    text = json.dumps([document, _made_with()], sort_keys=True)
    return cache_folder("plans") / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _made_with() -> Mapping[str, Any]:
    """Versions of the libraries, and size and time of each of our own files."""
    return {**versions(_LIBRARIES), "ours": our_files()}
