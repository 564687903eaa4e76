"""Inputs of a run: what is read before any weight is loaded, the training batches, and the check that a resumed run
reads the same. A config names files, not their content, and a tokenizer built on the rows changes with them: the
weights of a checkpoint would then belong to other tokens."""

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
from framework.build.loading.bases import BASE, TEACHER, Base, differences, read_bases, refuse_other_vocabulary
from framework.build.model.heads import fit_head, pad_like
from framework.build.resolve_model import settle
from framework.build.sources.python_rows import NO_ROWS, RowsFromPython
from framework.build.text.classes import Targets
from framework.build.text.tokenizer import build_tokenizer, padding_id
from framework.compose.own_adapter import BASE_RECORD, find_adapter
from framework.compose.trained_folders import read_json
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted
from framework.schema.rules.evaluation import last_save_conflicts


@dataclass(frozen=True)
class Inputs:
    """The config with all derived values, the model's own config, its tokenizer, the tokenized rows, and rows passed
    from Python."""

    config: TrainingConfig
    architecture: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: Data
    sample_prompts: tuple[tuple[int, ...], ...] = ()
    """Tokens of `training.sample_prompts`."""
    from_python: FromPython = TASKS_OWN


def read_inputs(config: TrainingConfig, given: RowsFromPython = NO_ROWS, console: Console | None = None) -> Inputs:
    """Read everything a config names except weights; `given` are rows from Python, `console` shows a progress bar.

    Raises RequestError for anything unreadable, for rows without supervised tokens, and for a tokenizer with more
    tokens than the model has embeddings.
    """
    if not config.data.train:
        raise RequestError([Problem("data.train", "there is nothing to train on", expected="a list of sources")])
    config, architecture = settle(config)
    tokenizer = read_tokenizer(config, architecture, given)
    data = read_rows_for(config, architecture, tokenizer, given, console)
    if config.training.task.facts.is_of_rows:
        config = with_labels(config, data.targets)
        fit_head(config, architecture)
        pad_like(architecture, tokenizer)
    prompts = encode_sample_prompts(config, tokenizer, data.row_format) if config.training.sample_prompts else ()
    return Inputs(config, architecture, tokenizer, data, prompts)


def with_labels(config: TrainingConfig, targets: Targets | None) -> TrainingConfig:
    """Add the meaning of the rows' labels to the config, so that it builds the same head again.

    Raises RequestError if they contradict the config, or all rows have the same class.
    """
    if targets is None:
        return config
    labels, several = config.data.labels, config.data.multi_label
    if config.training.task.facts.label == "value":
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
    """Load the tokenizer. Raises RequestError if that fails, or it has more tokens than the model has embeddings."""
    tokenizer = build_tokenizer(config, training_texts(config, given))
    vocabulary = architecture.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        message = (
            f"the tokenizer has {counted(len(tokenizer), 'token')}, the model only {counted(vocabulary, 'embedding')}"
        )
        expected = "the tokenizer of this model, or model.resize_embeddings: true"
        raise RequestError([Problem("model.tokenizer_name", message, expected=expected)])
    if config.training.teacher is not None and config.training.teacher.model_name is not None:
        refuse_other_vocabulary(config, tokenizer)
    return tokenizer


def read_rows_for(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: RowsFromPython = NO_ROWS,
    console: Console | None = None,
) -> Data:
    """Read and tokenize the rows, and check their ids against the model's vocabulary."""
    return prepare_data(config, tokenizer, architecture.get_text_config().vocab_size, given, console)


TrainingBatches: TypeAlias = GlobalBatches | StreamedBatches
RESTARTS = 2
"""How often worker processes are restarted for the same step."""


def training_batches(
    config: TrainingConfig, inputs: Inputs, state: Mapping[str, Any] | None, rank: int = 0
) -> TrainingBatches:
    """The training batches of one rank; `state` is that of the checkpoint to resume from."""
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
    """Supplies the micro-batches of consecutive optimizer steps, and restarts worker processes that die."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stream: Iterator[list[MicroBatch]] | None = None

    def forget(self) -> None:
        """Drop prepared batches and their workers; the next step starts new ones."""
        self._stream = None

    def take(self, batches: TrainingBatches, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step. Raises WorkersDied if restarted workers die too."""
        found = ""
        for restarts in range(RESTARTS + 1):
            if self._stream is None:
                self._stream = batches.start(step - 1)
            try:
                return next(self._stream)
            except WorkersDied as error:
                self._stream, found = None, str(error)
                if restarts < RESTARTS:
                    self._say(f"warning   step {step}: {found}; data.workers are restarted")
        raise WorkersDied(f"step {step}: {found}, {counted(RESTARTS + 1, 'time')} in a row")


def total_steps(config: TrainingConfig, batches: TrainingBatches) -> int:
    """Optimizer steps of the run: `max_steps`, or as many as the epochs need, at least one.

    Raises RequestError if a setting has no effect in so few steps.
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
    """Position in a stream at which `step` (0 is the first) begins, for a checkpoint; None for rows in memory."""
    return batches.state_at(step) if isinstance(batches, StreamedBatches) else None


WHAT = {"model.tokenizer": "the tokenizer has other tokens", "data.train": "the training rows are others"}
"""Inputs that are compared at a resume, by the key that allows them to differ."""
MOST = 6
"""Most differences of a model that a message lists."""
MODELS = {BASE: "model", TEACHER: "training.teacher"}
"""Models that are compared, by the key that allows them to differ, with their section."""


def read_digests(inputs: Inputs) -> dict[str, Any]:
    """Digests of the tokenizer's vocabulary, the training rows (for a stream, of its first block), and each model that
    is read (`Base.to_json`)."""
    vocabulary = json.dumps(sorted(inputs.tokenizer.get_vocab().items()))
    train = inputs.data.train
    plain = train.rows if isinstance(train, Packs) else train
    found: dict[str, Any] = {"model.tokenizer": f"{zlib.crc32(vocabulary.encode()):08x}"}
    found |= {"data.train": f"{rows_checksum(plain):08x}"} if isinstance(plain, Rows) else {}
    models = read_bases(inputs.config, inputs.architecture)
    return found | {name: base.to_json() for name, base in models.items()}


def rows_checksum(rows: Rows, found: int = 0) -> int:
    """Checksum of everything trained on, in the order before rows are mixed. `found` continues an earlier one."""
    for array in (rows.tokens, rows.labels, rows.offsets, rows.targets):
        if array is not None:
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found if rows.rejected is None else rows_checksum(rows.rejected, found)


def needed_models(config: TrainingConfig) -> set[str]:
    """Members of `MODELS` whose weights are not in the run's checkpoint: an adapter's base, a reference model, a
    teacher."""
    needs_base = config.training.use_peft or config.training.has_reference
    return {TEACHER, *([BASE] if needs_base else [])}


def check_read(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Sequence[str], needed: Set[str] = frozenset(MODELS)
) -> list[str]:
    """Compare inputs with those of a checkpoint. Returns one line for each allowed difference; an older checkpoint
    without digests passes. `needed` are the models whose weights matter.

    Raises RequestError for differences that are not allowed.
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
    """Compare the model with the recorded base of the adapter in `peft.adapter_path`. Returns one line for each allowed
    difference. Raises RequestError for others."""
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
    """Keys with the path of a model or tokenizer whose content is unchanged or allowed to differ."""
    keys = set[str]()
    for name, section in MODELS.items():
        before, after = (items[name]["weights"] if name in items else None for items in (saved, now))
        if name in allow or (before is not None and before == after):
            keys |= {f"{section}.model_name", f"{section}.model_revision"}
    if "model.tokenizer" in saved and saved["model.tokenizer"] == now.get("model.tokenizer"):
        keys.add("model.tokenizer_name")
    return keys
