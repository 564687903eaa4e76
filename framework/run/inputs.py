"""What a run reads before any weight is loaded, the batches that it trains on, and whether a run that goes on reads the
same: a config names files, not what is in them, and a tokenizer that is built on the rows is another one when they
change, so that the weights of a checkpoint would stand for other words."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from framework.build.data.batches import GlobalBatches, MicroBatch, WorkersDied
from framework.build.data.packing import Packs
from framework.build.data.prediction_rows import encode_sample_prompts
from framework.build.data.prepare import Data, prepare_data, training_texts
from framework.build.data.rows import Rows
from framework.build.data.streamed_batches import StreamedBatches
from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.loading.bases import BASE, TEACHER, Base, differences, read_bases, refuse_other_words
from framework.build.model.heads import fit_head, pad_like
from framework.build.resolve_model import settle
from framework.build.sources.python_rows import NO_ROWS, RowsFromPython
from framework.build.text.classes import Targets
from framework.build.text.tokenizer import build_tokenizer, padding_id
from framework.compose.own_adapter import BASE_RECORD, find_adapter
from framework.compose.trained_folders import read_json
from framework.errors import Problem, RequestError
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted
from framework.schema.rules.evaluation import last_save_conflicts


@dataclass(frozen=True)
class Inputs:
    """The config with everything derived written out, the model's own config, its tokenizer, the tokenised rows, and
    what a program hands over."""

    config: TrainingConfig
    architecture: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: Data
    sample_prompts: tuple[tuple[int, ...], ...] = ()
    """Tokens of `training.sample_prompts`."""
    from_python: FromPython = TASKS_OWN


def read_inputs(config: TrainingConfig, given: RowsFromPython = NO_ROWS, console: Console | None = None) -> Inputs:
    """Read everything a config names, weights excepted; `given` are rows from Python, `console` is for a bar.

    Raises RequestError for what cannot be read, for rows with nothing to learn, and for a tokenizer with more tokens
    than the model has embeddings.
    """
    if not config.data.train:
        raise RequestError([Problem("data.train", "there is nothing to train on", expected="a list of sources")])
    config, architecture = settle(config)
    tokenizer = read_tokenizer(config, architecture, given)
    data = read_rows_for(config, architecture, tokenizer, given, console)
    if config.training.task.is_of_rows:
        config = with_labels(config, data.targets)
        fit_head(config, architecture)
        pad_like(architecture, tokenizer)
    prompts = encode_sample_prompts(config, tokenizer, data.form) if config.training.sample_prompts else ()
    return Inputs(config, architecture, tokenizer, data, prompts)


def with_labels(config: TrainingConfig, targets: Targets | None) -> TrainingConfig:
    """The config with what the rows' labels mean, so that it makes the same head again.

    Raises RequestError where that is not what was asked for, or nothing can be told apart.
    """
    if targets is None:
        return config
    labels, several = config.data.labels, config.data.multi_label
    if config.training.task is Task.REGRESSION:
        if labels and len(labels) != targets.size:
            message = f"names {counted(len(labels), 'number')}, and each row has {targets.size}"
            raise RequestError([Problem("data.labels", message, expected=f"{counted(targets.size, 'name')}, or unset")])
        values = ("value",) if targets.size == 1 else tuple(f"value_{index}" for index in range(targets.size))
        return _with(config, labels=labels or values)
    if several is not None and several != targets.several:
        message = f"is {str(several).lower()}, and the first label is {'a list' if targets.several else 'one class'}"
        expected = "labels that are lists of classes" if several else "true, or unset"
        raise RequestError([Problem("data.multi_label", message, expected=expected)])
    if len(targets.names) < 2 and not targets.several:
        message = f"every row is of the class {targets.names[0]}: there is nothing to tell apart"
        raise RequestError([Problem("data.train", message, expected="rows of two classes or more")])
    return _with(config, labels=targets.names, multi_label=targets.several)


def _with(config: TrainingConfig, **data: object) -> TrainingConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def read_tokenizer(
    config: TrainingConfig, architecture: PretrainedConfig, given: RowsFromPython = NO_ROWS
) -> PreTrainedTokenizerBase:
    """The tokenizer; RequestError when it cannot be had or has more tokens than the model has embeddings."""
    tokenizer = build_tokenizer(config, training_texts(config, given))
    vocabulary = architecture.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        message = (
            f"the tokenizer has {counted(len(tokenizer), 'token')}, the model only {counted(vocabulary, 'embedding')}"
        )
        expected = "the tokenizer of this model, or model.resize_embeddings: true"
        raise RequestError([Problem("model.tokenizer_name", message, expected=expected)])
    if config.training.teacher is not None and config.training.teacher.model_name is not None:
        refuse_other_words(config, tokenizer)
    return tokenizer


def read_rows_for(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: RowsFromPython = NO_ROWS,
    console: Console | None = None,
) -> Data:
    """The tokenised rows, their ids checked against the model's vocabulary."""
    return prepare_data(config, tokenizer, architecture.get_text_config().vocab_size, given, console)


TrainingBatches: TypeAlias = GlobalBatches | StreamedBatches
RESTARTS = 2
"""How often in a row processes that prepare batches are started again for the same step."""


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


class Supply:
    """Micro batches of one optimizer step after the other; where processes that prepare them die, those of new ones."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stream: Iterator[list[MicroBatch]] | None = None

    def forget(self) -> None:
        """Let the next step be of batches that are begun anew."""
        self._stream = None

    def take(self, batches: TrainingBatches, step: int) -> list[MicroBatch]:
        """The micro batches of a step. Raises WorkersDied when processes that were started again die too."""
        found = ""
        for restarts in range(RESTARTS + 1):
            if self._stream is None:
                self._stream = batches.start(step - 1)
            try:
                return next(self._stream)
            except WorkersDied as error:
                self._stream, found = None, str(error)
                if restarts < RESTARTS:
                    self._say(f"warning   step {step}: {found}; data.workers are started again")
        raise WorkersDied(f"step {step}: {found}, {counted(RESTARTS + 1, 'time')} in a row")


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


WHAT = {"model.tokenizer": "the tokenizer has other tokens", "data.train": "the training rows are others"}
"""What is compared, by the key that lets it differ."""
MOST = 6
"""Differences of a model that a message lists."""
MODELS = {BASE: "model", TEACHER: "training.teacher"}
"""Models that are compared, by the word that lets them differ, with the section that names them."""


def read_digests(inputs: Inputs) -> dict[str, Any]:
    """Of the tokenizer's vocabulary, of the training rows (of a stream its first block stands for all of it), and of
    each model that is read, as `Base.to_json` has it."""
    vocabulary = json.dumps(sorted(inputs.tokenizer.get_vocab().items()))
    train = inputs.data.train
    plain = train.rows if isinstance(train, Packs) else train
    found: dict[str, Any] = {"model.tokenizer": f"{zlib.crc32(vocabulary.encode()):08x}"}
    found |= {"data.train": f"{rows_checksum(plain):08x}"} if isinstance(plain, Rows) else {}
    models = read_bases(inputs.config, inputs.architecture)
    return found | {name: base.to_json() for name, base in models.items()}


def rows_checksum(rows: Rows, found: int = 0) -> int:
    """Of all that is trained on from the rows, in their order before they are mixed."""
    for array in (rows.tokens, rows.labels, rows.offsets, rows.targets):
        if array is not None:
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found if rows.rejected is None else rows_checksum(rows.rejected, found)


def needed_models(config: TrainingConfig) -> set[str]:
    """Those of `MODELS` whose weights a run needs in addition to those in its checkpoint: an adapter's base, what a
    preference is measured against, a teacher."""
    needs_base = config.training.use_peft or config.training.has_reference
    return {TEACHER, *([BASE] if needs_base else [])}


def check_read(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str], needed: Set[str] = frozenset(MODELS)
) -> list[str]:
    """One line for each allowed difference; an older checkpoint that says nothing passes. `needed` are the models whose
    weights matter.

    Raises RequestError for the others.
    """
    found = [
        (key, f"{WHAT[key]} than those that the run began with", "the same files")
        for key in WHAT
        if key in saved and key in now and saved[key] != now[key]
    ]
    for name, section in MODELS.items():
        if name in saved and name in now:
            before, after = Base.from_json(saved[name]), Base.from_json(now[name])
            if changed := differences(before, after, name in needed):
                message = f"{after.name or section} is not what the run began with: {'; '.join(changed[:MOST])}"
                found.append((name, message, "the model as it was"))
    problems = [
        Problem(key, message, expected=f"{expected}, or --allow {key}")
        for key, message, expected in found
        if key not in allow
    ]
    if problems:
        raise RequestError(problems)
    return [f"{key}: {message}" for key, message, _ in found]


def check_adapters_base(config: TrainingConfig, now: Mapping[str, Any], allow: Sequence[str]) -> list[str]:
    """One line for each allowed difference between the model and what the adapter of `peft.adapter_path` was trained
    on, as far as that was recorded next to it. Raises RequestError for others."""
    found = find_adapter(config.peft.adapter_path) if config.peft.adapter_path is not None else None
    if not isinstance(found, tuple) or (before := read_json(found[0] / BASE_RECORD)) is None:
        return []
    try:
        changed = differences(Base.from_json(before), Base.from_json(now[BASE]))
    except ValueError as error:
        raise RequestError([Problem("peft.adapter_path", f"{found[0] / BASE_RECORD} {error}")]) from None
    if not changed:
        return []
    message = f"it is not what the adapter in {found[0]} was trained on: {'; '.join(changed[:MOST])}"
    if BASE not in allow:
        expected = f"{before.get('name') or 'the base as it was'}, or --allow {BASE}"
        raise RequestError([Problem("model.model_name", message, expected=expected)])
    return [f"{BASE}: {message}"]


def moved(saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str]) -> set[str]:
    """Keys that say where a model or tokenizer lies, of those that are what they were, or may differ."""
    keys = set[str]()
    for name, section in MODELS.items():
        before, after = (items[name]["weights"] if name in items else None for items in (saved, now))
        if name in allow or (before is not None and before == after):
            keys |= {f"{section}.model_name", f"{section}.model_revision"}
    if "model.tokenizer" in saved and saved["model.tokenizer"] == now.get("model.tokenizer"):
        keys.add("model.tokenizer_name")
    return keys
