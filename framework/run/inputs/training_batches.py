"""The batches that a run trains on, of rows that are held or of a stream."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from framework.build.data.batches import GlobalBatches
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.text.tokenizer import padding_id
from framework.errors import Problem, RequestError
from framework.run.inputs.inputs import Inputs
from framework.schema.config import TrainingConfig
from framework.schema.rules.evaluation import last_save_conflicts

TrainingBatches: TypeAlias = GlobalBatches | StreamedBatches


def training_batches(
    config: TrainingConfig, inputs: Inputs, state: Mapping[str, Any] | None, rank: int = 0
) -> TrainingBatches:
    """The batches of a config, for one rank; `state` is that of the checkpoint to go on from."""
    data, pad, rank = config.data, padding_id(inputs.tokenizer), rank // config.sharing
    if inputs.data.stream is None:
        return GlobalBatches(
            inputs.data.train,
            config.batch,
            seed=config.training.seed,
            pad_token_id=pad,
            rank=rank,
            workers=data.workers,
            by_length=data.group_by_length,
            padding_free=data.padding_free,
            multiple=config.padded(1),
        )
    streamed = StreamedBatches(
        inputs.data.stream,
        config.batch,
        pad,
        rank=rank,
        workers=data.workers,
        padding_free=data.padding_free,
        multiple=config.padded(1),
    )
    if state is not None and state.get("stream"):
        streamed.go_on(int(state["step"]), state["stream"])
    return streamed


def total_steps(config: TrainingConfig, batches: TrainingBatches) -> int:
    """Optimizer steps of the run: `max_steps`, else the epochs' worth, at least one.

    Raises RequestError where something asked for has no effect in so many.
    """
    training = config.training
    if training.max_steps is not None or isinstance(batches, StreamedBatches):
        total = training.max_steps or 1
    else:
        total = max(1, round(training.num_train_epochs * batches.steps_per_epoch))
    found = last_save_conflicts(config, total)
    if problems := [Problem(each.keys[0], each.message, expected=each.expected) for each in found]:
        raise RequestError(problems)
    return total


def stream_state(batches: TrainingBatches, step: int) -> dict[str, Any] | None:
    """Where `step` (0 is the first) begins in a stream, for a checkpoint; None for rows that are held."""
    return batches.state_at(step) if isinstance(batches, StreamedBatches) else None
