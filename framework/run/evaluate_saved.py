"""`tunesmith evaluate`: a trained model on its run's own held-out rows, on a file, or on tasks of lm-eval."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from framework.activity import doing
from framework.build.data.batches import eval_batches
from framework.build.data.packing import on_device
from framework.build.data.prepare import Data, prepare_data
from framework.build.model.parts import causal_model
from framework.build.place import autocast_dtype
from framework.build.tasks import build_objective
from framework.build.text.tokenizer import padding_id
from framework.errors import Problem, RequestError
from framework.run.checkpoints.saved_model import SavedModel, find_saved_model
from framework.run.checkpoints.trained_model import load_model
from framework.run.evaluate import Sums, add_up, metrics_of_sets
from framework.run.predict import reading_config
from framework.schema.config import TrainingConfig
from framework.schema.data import DatasetParams

_AS_THEY_ARE: dict[str, Any] = {"packing": False, "padding_free": False, "streaming": False, "group_by_length": False}
"""How rows are batched does not change the loss, and a plainly loaded model is not prepared for packing."""


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation: `metrics` over `rows` rows. The loss is a mean over `terms` terms, named by `unit`."""

    metrics: dict[str, float]
    rows: int
    terms: int
    unit: str


def evaluate_saved(
    source: Path, file: str | None = None, trusts_code: bool = False, allow: Sequence[str] = ()
) -> Evaluated:
    """Compute loss and metrics of the trained model in `source` on its run's held-out rows, or on those of `file`, read
    the way the run read its own.

    The exported weights are evaluated as in the run, so the numbers are the same if the export has the dtype of
    training. Raises RequestError for a folder without a model, a task whose loss needs another model, rows that cannot
    be read, and a run without held-out rows.
    """
    disable_progress_bar()
    saved = find_saved_model(source, trusts_code, allow)
    config = _config(saved, file)
    tokenizer = saved.tokenizer
    model = load_model(saved)
    vocabulary = causal_model(model).config.get_text_config().vocab_size
    data = prepare_data(config, tokenizer, vocabulary)
    if data.eval is None:
        message = f"the run of {saved.folder} has held out no rows"
        raise RequestError([Problem("FILE", message, expected="a file of rows")])
    objective = build_objective(config, model, None)
    sets = data.eval_sets or {"": range(len(data.eval))}
    sums = {name: _sums(config, model, objective, data, chosen, padding_id(tokenizer)) for name, chosen in sets.items()}
    terms = int(add_up(sums.values())["terms"])
    return Evaluated(metrics_of_sets(objective, sums), len(data.eval), terms, objective.unit)


def _config(saved: SavedModel, file: str | None) -> TrainingConfig:
    """Config for reading the rows. Raises RequestError if it is not known, or the task cannot be evaluated so."""
    run = saved.config
    if run is None and file is None:
        message = f"{saved.folder} is not the export of a run, so its held-out rows are not known"
        raise RequestError([Problem("FILE", message, expected="a file of rows, or a run folder")])
    if saved.task.facts.compares_models:
        message = f"the loss of {saved.task} needs another model, which the export does not contain"
        raise RequestError([Problem("RUN", message, expected="`tunesmith predict RUN FILE --score`")])
    config = reading_config(saved)
    data: dict[str, Any] = dict(_AS_THEY_ARE)
    if file is not None:
        first = next(iter((*config.data.eval, *config.data.train)), DatasetParams(path=file))
        rows = (DatasetParams(path=file, columns=first.columns, format=first.format),)
        data |= {"train": rows, "eval": rows, "eval_fraction": 0.0}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def _sums(
    config: TrainingConfig, model: Any, objective: Any, data: Data, chosen: Sequence[int], pad_token_id: int
) -> Sums:
    """The objective's sums over some of the held-out rows."""
    device, dtype = causal_model(model).get_input_embeddings().weight.device, autocast_dtype(config.training)
    autocast = torch.autocast(device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext()
    assert data.eval is not None
    made = eval_batches(data.eval, config.eval_rows, pad_token_id, multiple=config.padded(1), chosen=chosen)
    with torch.no_grad(), autocast, doing("evaluating"):
        found = [
            {name: value.double().cpu() for name, value in objective.sums(model, on_device(device, batch)).items()}
            for batch in made
        ]
    return add_up(found)


def evaluate_tasks(
    source: Path, tasks: Sequence[str], limit: int | None, trusts_code: bool = False, allow: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Run tasks of lm-eval and return its results by task. `limit` is the number of rows of each task, unset all.

    Raises RequestError if lm-eval is not installed, and for a task that it does not have.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise RequestError([Problem("--tasks", "lm-eval is not installed", expected="pip install lm-eval")]) from None
    saved = find_saved_model(source, trusts_code, allow)
    if saved.task.facts.is_of_rows:
        message = f"a model of the task {saved.task} generates no text, which lm-eval needs"
        raise RequestError([Problem("--tasks", message, expected="evaluate without --tasks")])
    manager = TaskManager()
    known: Sequence[str] = manager.all_tasks
    problems = [
        Problem("--tasks", f"lm-eval has no task {task}", nearest=next(iter(get_close_matches(task, known, 1)), None))
        for task in tasks
        if task not in known
    ]
    if problems:
        raise RequestError(problems)
    model = HFLM(pretrained=load_model(saved), tokenizer=saved.tokenizer, batch_size="auto")
    found = lm_eval.simple_evaluate(model=model, tasks=[*tasks], limit=limit, task_manager=manager)
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    return {task: dict(figures) for task, figures in results.items()}
