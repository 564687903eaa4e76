"""`peft.lora_init: eva`: LoRA's A matrices from the principal components of the adapted modules' inputs."""

import time
from itertools import islice

import torch
from torch import Tensor

from framework import activity
from framework.build.data.batches import eval_batches
from framework.build.data.packing import on_device
from framework.build.losses.loss import Batch
from framework.build.text.labels import IGNORED
from framework.errors import Problem, RequestError, VerificationFailed
from framework.run.components import MOST_BATCHES, Input, components_pass, distinct_inputs
from framework.run.session import Session
from framework.schema.peft import EVA_PASSES
from framework.schema.plural import counted

KEY = "peft.lora_init"
WORK = "the components of the adapted modules' inputs"
ORTHONORMAL = 1e-3
"""Tolerance of A A^T's distance from the identity, for peft's incremental decomposition in float32. Matrices of a
shorter dtype are rounded to it in addition: twice its epsilon."""


def start_from_rows(session: Session) -> None:
    """Initialize the A matrices of a new run from its training rows, with `peft.lora_init: eva`.

    Raises RequestError if rows have too few supervised tokens, VerificationFailed if the matrices are not orthonormal.
    """
    if not session.config.starts_from_rows or session.step:
        return
    from framework.build.adapters.first_adapter import matrices_from_rows  # peft: seconds to import

    matrices, began = matrices_from_rows(session.assembly.model), time.perf_counter()
    batches = _batches_for_start(session, max(map(len, matrices.values())))
    used = counted(len(batches), "micro-batch", "micro-batches")
    session.progress.say(f"start     eva uses {used} in at most {EVA_PASSES} passes, most often ten")
    session.meter.observe("start")
    with activity.doing(WORK):
        inputs, passes = _components(session, batches)
    changed = _take(inputs)
    session.meter.observe("end")
    found, seconds = counted(changed, "A matrix", "A matrices"), time.perf_counter() - began
    made = f"{found} from the inputs of their modules: {counted(passes, 'pass', 'passes')} in {seconds:.1f} s"
    session.progress.say(f"start     {made}")
    if rest := len(matrices) - changed:
        which = "their modules had fewer tokens than their rank"
        session.progress.say(f"start     {counted(rest, 'A matrix', 'A matrices')} drawn as kaiming: {which}")
    if moving := sum(not item.is_settled for item in inputs):
        session.progress.say(
            f"warning   {KEY}: the components of {moving} of {len(inputs)} inputs still moved "
            f"after {EVA_PASSES} passes, and are taken as they are"
        )


def _components(session: Session, batches: list[Batch]) -> tuple[list[Input], int]:
    """The inputs with their components, and the number of forward passes. The first one finds equal inputs."""
    assembly, began = session.assembly, time.perf_counter()
    inputs, passes = distinct_inputs(assembly, batches[0]), 1
    while passes < EVA_PASSES and not all(item.is_settled for item in inputs):
        settled, pace = sum(item.is_settled for item in inputs), (time.perf_counter() - began) / passes
        known = f"{settled} of {len(inputs)} inputs settled, {pace:.1f} s a pass"
        activity.now(f"{WORK}: pass {passes} of at most {EVA_PASSES}, {known}")
        batch = batches[(passes - 1) % len(batches)]
        tokens = _token_mask(session, batch).flatten().nonzero()[:, 0]
        components_pass(assembly, batch, tokens, inputs)
        passes += 1
    return inputs, passes


@torch.no_grad()
def _take(inputs: list[Input]) -> int:
    """Copy the components into the A matrices. Returns the number of matrices.

    Raises VerificationFailed if the rows of one are not orthonormal afterwards.
    """
    pairs = [(matrix, item.components) for item in inputs for matrix in item.matrices.values()]
    changed = [(matrix, components) for matrix, components in pairs if components is not None]
    for matrix, components in changed:
        matrix.copy_(components[: len(matrix)])
        rows = matrix.float()
        distance = float((rows @ rows.T - torch.eye(len(rows)).to(rows)).abs().max())
        if distance > max(ORTHONORMAL, 2 * torch.finfo(matrix.dtype).eps):
            raise VerificationFailed(
                f"{KEY}: asked eva, in effect A matrices whose rows are not orthonormal ({distance:.2g})"
            )
    return len(changed)


def _batches_for_start(session: Session, least: int) -> list[Batch]:
    """Micro-batches of the first training rows with at least as many usable tokens as the highest rank, `least`."""
    config = session.config
    made = eval_batches(
        session.inputs.data.train,
        config.batch.per_device,
        session.batches.pad_token_id,
        padding_free=config.data.padding_free,
        multiple=config.padded(1),
    )
    placed = (on_device(session.assembly.place.device, batch) for batch in made)
    wanted = (batch for batch in placed if int(_token_mask(session, batch).sum()) >= least)
    found: list[Batch] = list(islice(wanted, MOST_BATCHES))
    if not found:
        message = f"no micro-batch has as many supervised tokens as the rank ({least})"
        raise RequestError([Problem(KEY, message, expected="gaussian, more rows a micro-batch, or a lower rank")])
    return found


def _token_mask(session: Session, batch: Batch) -> Tensor:
    """Tokens used for the components: the supervised ones, or for labels of rows all except padding; bool
    `[rows, tokens]`."""
    if "labels" in batch and session.config.training.task.facts.label is None:
        return batch["labels"] != IGNORED
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
