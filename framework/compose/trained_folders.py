"""Folders that a run or peft has left: which one holds what was trained, and what to write for it."""

import json
from pathlib import Path
from typing import Any

from framework.regular_files import read_regular

FINAL, ADAPTER_FILE, MODEL_FILE, RUN_FILE = "final", "adapter_config.json", "config.json", "config.yaml"


def trained_folder(folder: Path) -> Path:
    """`final/` of a run's folder where a model or an adapter is in it, else the folder itself."""
    final = folder / FINAL
    is_trained = (final / ADAPTER_FILE).exists() or (final / MODEL_FILE).exists()
    return final if is_trained and not holds_model(folder) else folder


def holds_model(folder: Path) -> bool:
    """Whether a model or an adapter lies in the folder itself."""
    return (folder / ADAPTER_FILE).exists() or (folder / MODEL_FILE).exists()


def describe_trained(folder: Path) -> tuple[str, str] | None:
    """What a folder is that holds no model to load, and what to write instead; None for what no run has made.

    Understands a run's folder, one of its checkpoints, and an adapter's folder.
    """
    found = trained_folder(folder)
    if (found / ADAPTER_FILE).exists():
        base = (read_json(found / ADAPTER_FILE) or {}).get("base_model_name_or_path")
        model = f"model.model_name={base}" if base else "the model it was trained on as model.model_name"
        merge = f"`tunesmith merge {folder} --output MERGED` makes one model of both"
        message = f"{folder} holds an adapter of {base or 'a base that it does not name'}, and no model"
        return message, f"peft.adapter_path={found} with {model}; {merge}"
    if found != folder:
        return f"{folder} is a run's folder; its trained model is in {FINAL}/", str(found)
    run = next((place for place in (folder, *folder.parents[:2]) if (place / RUN_FILE).exists()), None)
    if run is None:
        return None
    resume = f"`tunesmith train {run / RUN_FILE} --resume` goes on from it"
    if run == folder:
        return f"{folder} is a run that has not finished: it has no {FINAL}/", resume
    holds = "holds a checkpoint, which has trained weights and optimizer states and no model that loads elsewhere"
    trained = describe_trained(run) if holds_model(run / FINAL) else None
    return f"{folder} {holds}", f"{trained[1]}; or {resume}" if trained else resume


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none that can be read."""
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
