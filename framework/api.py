"""The commands as Python functions. Importing this module loads no torch; functions import it when they need it."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import Problem, RequestError
from framework.installation import require_versions
from framework.run.hooks import Hooks
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from framework.build.assembly import Assembly
    from framework.build.sources.python_rows import PythonRows
    from framework.build.tasks.objective import Objective
    from framework.converters import Conversion
    from framework.memory.ledger import Plan
    from framework.memory.search.found import Found
    from framework.run.checkpoints.merge import Merged
    from framework.run.evaluate_saved import Evaluated
    from framework.run.gguf import Exported
    from framework.run.hooks import Metrics, RunResult
    from framework.run.publish import Pushed
    from framework.run.step import StepResult


def check(config: TrainingConfig) -> tuple[Problem, ...]:
    """Return the warnings about a config that is to be trained. Raises RequestError with all its problems at once."""
    from framework.checks import check

    return check(config)


def plan(config: TrainingConfig) -> "Plan":
    """Predict memory per device and the time of a step, without weights, data or a GPU: bytes and seconds.

    `auto` values are searched first; `assumptions` lists what replaced them. Takes seconds, in child processes. Raises
    RequestError for what cannot be built.
    """
    from dataclasses import replace

    from framework.run.planning.fit import decide
    from framework.run.planning.plan_pool import Rehearsals, plan_with_warnings

    require_versions()
    decided = decide(config, runs_here=False)
    with Rehearsals() as rehearsals:
        made = decided.found.plan if decided.found is not None else plan_with_warnings(decided.config, rehearsals)
    return replace(made, assumptions=(*made.assumptions, *(f"auto {line}" for line in decided.reasons)))


def fit(
    config: TrainingConfig,
    *,
    pins: Collection[str] = (),
    inexact: Collection[str] = (),
    measure: bool = False,
) -> "Found":
    """Find the fastest settings that are predicted to fit the card, with the same global batch.

    `pins` are keys or sections to keep, `inexact` keys whose change may alter the training result (for example
    training.optimizer). With `measure` the fastest few run some steps on this machine's card, and the best of them is
    proposed. Raises RequestError for an unknown key, and for a device without memory of its own.
    """
    from framework.run.planning.fit import fit, measured_best

    require_versions()
    judge = measured_best(partial(print, file=sys.stderr)) if measure else None
    return fit(config, pins=pins, inexact=inexact, judge=judge, runs_here=measure or None)


def train(
    config: TrainingConfig,
    name: str = "run",
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    allow: Sequence[str] = (),
    quiet: bool = False,
    plan: bool = True,
    train_rows: "PythonRows | None" = None,
    eval_rows: "PythonRows | None" = None,
    on_step: "Callable[[Metrics], None] | None" = None,
    on_eval: "Callable[[Metrics], None] | None" = None,
    on_save: Callable[[Path], None] | None = None,
    objective: "Callable[[Objective], Objective] | None" = None,
    optimizer: "Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None" = None,
    metrics: Mapping[str, Callable[[Any, Any], float]] | None = None,
) -> "RunResult":
    """Train as a config asks and return where the result is.

    Args:
        name: gives the default folder, `runs/<name>`.
        resume: continue from the newest checkpoint; `allow` names changed keys in which it may differ.
        overwrite: replace the run that is in the folder.
        dry_run: read, build and verify everything, and write nothing.
        plan: predict memory first, and refuse what does not fit.
        train_rows: rows by column, as a list or a function that yields them; `eval_rows` are the held-out ones.
        on_step: called after each optimizer step with its line of `metrics.jsonl` (`step`, `loss`, `grad_norm`, ...).
        on_eval: called after each evaluation with its numbers (`step`, `eval_loss`, ...).
        on_save: called with the folder of each checkpoint, once it is complete.
        objective: given the task's own objective, returns the one to train with.
        optimizer: given parameter groups with `lr` and `weight_decay`, returns the optimizer, as torch's classes do.
        metrics: functions of the model and its tokenizer by name, called at each evaluation; each returns a number,
            higher is better, logged as `python/NAME`. `training.best_metric` may use that name.

    Hooks are called in the main process only, metrics in each process (the main one's numbers are used). When one
    raises, the run saves, ends after its step, and the exception reaches the caller. The plan assumes the task's own
    objective and `training.optimizer` and warns if others are passed here; pass them again to a resumed run. Under
    torchrun every process makes the same call. Raises RequestError, DoesNotFit, TrainingStopped or Interrupted.
    """
    require_versions()
    from framework.build.from_python import FromPython
    from framework.run.planning.plan_pool import plan_in_subprocess
    from framework.run.trainer import train

    return train(
        config,
        name,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        allow=allow,
        quiet=quiet,
        planner=plan_in_subprocess if plan else None,
        train_rows=train_rows,
        eval_rows=eval_rows,
        hooks=Hooks(on_step, on_eval, on_save),
        from_python=FromPython(objective, optimizer, metrics or {}),
    )


def predict(
    run: str | Path,
    file: str | Path,
    *,
    max_new_tokens: int | None = None,
    score: bool = False,
    trust_remote_code: bool = False,
    allow: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the prediction of a run's model for each row of `file`: a completion, a class, or numbers.

    Args:
        run: a run folder, or a folder with a model or an adapter.
        file: a file, a folder or a glob, read as the run read its own rows.
        max_new_tokens: longest completion; 128, or half of fewer positions.
        score: yield how likely the rows' own answers are, instead of generating new ones.
        trust_remote_code: whether Python code that comes with the model may run.
        allow: `model.base`, to accept that an adapter's base has changed since training.

    Raises RequestError before the first answer, with every broken row.
    """
    require_versions()
    from framework.run.predict import Request, predict

    return predict(Path(run), str(file), Request(max_new_tokens, score, trust_remote_code, tuple(allow)))


def merge(
    run: str | Path, output: str | Path | None = None, *, trust_remote_code: bool = False, allow: Sequence[str] = ()
) -> "Merged":
    """Write a trained adapter and its base as one plain Hugging Face folder, `RUN/merged` unless `output` is given.

    Options as in `predict`. Raises RequestError if there is no adapter to merge, or `output` already exists.
    """
    require_versions()
    from framework.run.checkpoints.merge import merge_run

    return merge_run(Path(run), Path(output) if output is not None else None, trust_remote_code, allow)


def evaluate(
    run: str | Path, file: str | Path | None = None, *, trust_remote_code: bool = False, allow: Sequence[str] = ()
) -> "Evaluated":
    """Compute loss and metrics of a trained model on its run's held-out rows, or on those of `file`.

    Options as in `predict`. Raises RequestError if there are no such rows, or the loss needs another model.
    """
    require_versions()
    from framework.run.evaluate_saved import evaluate_saved

    return evaluate_saved(Path(run), str(file) if file is not None else None, trust_remote_code, allow)


def push(
    run: str | Path, repository: str, *, public: bool = False, dry_run: bool = False, endpoint: str | None = None
) -> "Pushed":
    """Upload the trained model of a run to `owner/name` on a Hugging Face hub, private unless `public`.

    With `dry_run` nothing is sent; `endpoint` is another hub's address. Raises RequestError if the hub refuses.
    """
    require_versions()
    from framework.run.publish import push

    return push(Path(run), repository, public=public, dry_run=dry_run, endpoint=endpoint)


def export_gguf(run: str | Path, kind: str, output: str | Path | None = None) -> "Exported":
    """Write the trained model of a run as one GGUF file, `kind` f16 or q8_0, with a Modelfile next to it.

    `output` unset is RUN/gguf/RUN-KIND.gguf. Raises RequestError for a model that llama.cpp would not run correctly.
    """
    require_versions()
    from framework.run.gguf import chosen_kind, export_gguf

    return export_gguf(Path(run), chosen_kind(kind), Path(output) if output is not None else None)


def convert(file: str | Path) -> "Conversion":
    """Translate a recipe of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt.

    Raises RequestError for a file that cannot be read or belongs to none of these.
    """
    from framework.converters import convert

    return convert(Path(file))


def report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write a run as one HTML page, `RUN/report.html` unless `output` is given, and return where it is.

    Raises RequestError for a folder without a run, and if the page cannot be written.
    """
    from framework.cli.saved import write_report

    return write_report(Path(run), Path(output) if output is not None else None)


def assemble(config: TrainingConfig, device: str = "cpu", total_steps: int | None = None) -> "Assembly":
    """Build model, adapter, loss, optimizer and schedule on one device, as `train` does, and verify each option.

    `device` is torch's name (`cuda:0`). `total_steps` is the length of the schedule; unset, `training.max_steps`.
    Nothing is planned and no row is read. Raises RequestError, or VerificationFailed for an option not in effect.
    """
    require_versions()
    import torch
    from transformers import set_seed

    from framework.build.assembly import assemble
    from framework.build.place import real_place
    from framework.build.refuse import refuse_impossible
    from framework.build.resolve_model import settle
    from framework.build.verify import verify

    steps = total_steps or config.training.max_steps
    if steps is None:
        raise RequestError([Problem("total_steps", "the length of the schedule is not known", expected="a number")])
    refuse_impossible(config, devices="one")
    settled, architecture = settle(config)
    set_seed(settled.training.seed)
    assembly = assemble(settled, architecture, real_place(torch.device(device)), steps)
    verify(assembly)
    return assembly


def train_step(assembly: "Assembly", micro_batches: "Sequence[Mapping[str, Tensor]]", step: int) -> "StepResult":
    """Run one optimizer step: forward and backward of each micro-batch, clipping, update.

    Args:
        micro_batches: the global batch in parts, on the assembly's device: `input_ids` and `labels`, int64
            `[rows, tokens]`, -100 for tokens that are not supervised, and an int64 `attention_mask` if rows are padded.
        step: number of the step, from 1, which determines the learning rate.

    Raises NonFinite for a loss or a gradient that is not finite, before any weight changes.
    """
    from framework.run.step import train_step

    return train_step(assembly, micro_batches, step)
