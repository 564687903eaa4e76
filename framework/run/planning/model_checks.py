"""Tier B of `check`: checks that need the tokenizer, the model's shape and the rows. Loads no weights."""

import contextlib
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from framework.build.assembly import Assembly, assemble
from framework.build.loading.bases import check_all_weights
from framework.build.place import rehearsal_place
from framework.build.resolve_model import settle
from framework.errors import Problem, RequestError
from framework.memory.cards import detect
from framework.memory.search.free_keys import opened
from framework.run.inputs import Inputs, read_rows_for, read_tokenizer, total_steps, training_batches, with_labels
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.record.run_folder import unusable_folders
from framework.schema.choices import Attention, CheckpointingPolicy
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key
from framework.schema.plural import counted

T = TypeVar("T")


@dataclass(frozen=True)
class Findings:
    """Findings of tier B."""

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    """Warnings that training would print about the adapter and the rows."""
    rows: str
    """Description of the rows that were read."""


def inspect(config: TrainingConfig) -> Findings:
    """Find the problems that show when the model is built without storage and tokenizer and rows are read.

    Rows are read and tokenized as for training: all of them, or a stream's first block. A lever that is `auto` is
    checked with its plain value.
    """
    key = "model.architecture" if config.model.model_name is None else "model.model_name"
    with _log_of_transformers() as log:
        found = _inspect(config)
    logged = (Problem(key, f"transformers says: {text}") for text in log)
    return replace(found, warnings=(*found.warnings, *logged))


class _Messages(logging.Handler):
    """Collects each warning once, on one line, without those on a base's sampling settings, which training does not
    read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found = dict[str, None]()

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("transformers.generation"):
            self.found[textwrap.shorten(record.getMessage(), 300)] = None


@contextlib.contextmanager
def _log_of_transformers() -> Iterator[dict[str, None]]:
    """Collect the log of transformers within the block instead of printing it."""
    logger, messages = logging.getLogger("transformers"), _Messages()
    before, logger.handlers = logger.handlers, [messages]
    try:
        yield messages.found
    finally:
        logger.handlers = before


def _inspect(config: TrainingConfig) -> Findings:
    problems, warnings = list[Problem](), list[Problem]()

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except RequestError as error:
            problems.extend(error.problems)
            return None

    data, settled = None, attempt(lambda: settle(opened(config)))
    if settled is not None:
        config, architecture = settled
        place = rehearsal_place("cpu" if config.gpu.name == "cpu" else "cuda")
        warnings.extend(attempt(lambda: [*check_all_weights(config, architecture, in_folders=True)]) or ())
        assembly = attempt(lambda: assemble(config, architecture, place, total_steps=1))
        if assembly is not None:
            attempt(lambda: _refuse_for_ranks(config, assembly))
            if not problems and _shows_in_forward(config):
                attempt(lambda: plan_in_subprocess(config))
        if assembly is not None and assembly.adapter is not None:
            warnings.extend(_about(warning, "peft") for warning in assembly.adapter.warnings)
        if config.data.train:
            tokenizer = attempt(lambda: read_tokenizer(config, architecture))
            if tokenizer is not None:
                data = attempt(lambda: read_rows_for(config, architecture, tokenizer))
            if tokenizer is not None and data is not None:
                inputs = Inputs(config, architecture, tokenizer, data)
                attempt(lambda: _refuse_for_rows(inputs))
    is_here = config.gpu.name in ("cpu", detect())
    (problems if is_here else warnings).extend(unusable_folders(config))
    if data is None:
        return Findings(tuple(dict.fromkeys(problems)), tuple(warnings), "no rows")
    read = data.report.train.read
    rows = (
        f"the first {counted(read, 'row')} of a stream"
        if data.stream is not None
        else f"all {counted(read, 'training row')}"
    )
    unread = dict.fromkeys(name for names in data.report.train.unread.values() for name in names)
    notes = [*data.report.warnings, *([f"not read: {', '.join(unread)}"] if unread else [])]
    warnings += [_about(note, "data.train") for note in notes]
    return Findings(tuple(dict.fromkeys(problems)), tuple(warnings), rows)


def _refuse_for_rows(inputs: Inputs) -> None:
    """Raise RequestError for labels that leave nothing to learn, and for settings without effect in so few steps."""
    if inputs.config.training.task.facts.is_of_rows:
        with_labels(inputs.config, inputs.data.targets)
    total_steps(inputs.config, training_batches(inputs.config, inputs, None))


def _refuse_for_ranks(config: TrainingConfig, assembly: Assembly) -> None:
    """Raise RequestError if ranks could not share the weights of this model."""
    if config.fsdp.is_sharded:
        from framework.build.parallel.fsdp import refuse_unsharded  # torch's sharding takes seconds to import

        refuse_unsharded(config, assembly.model, assembly.model)
    if config.fsdp.tensor_parallel_size > 1:
        from framework.build.parallel.tensor_parallel import TensorParallel

        TensorParallel(0, config.fsdp.tensor_parallel_size).arrange(assembly.model)


def _shows_in_forward(config: TrainingConfig) -> bool:
    """Whether a setting can only be checked by a rehearsed forward pass: an attention kernel, or a checkpointing policy
    that keeps results of operators which this card may not use."""
    model, training = config.model, config.training
    keeps_some = training.gradient_checkpointing_policy is not CheckpointingPolicy.FULL
    policy = training.enable_gradient_checkpointing is True and keeps_some
    return policy or model.sdpa_backend is not None or model.attn_implementation == Attention.RING_ATTENTION


def _about(warning: str, section: str) -> Problem:
    """Turn a warning into a Problem; most begin with their key."""
    key, _, message = warning.partition(": ")
    return Problem(key, message) if key in every_key() else Problem(section, warning)
