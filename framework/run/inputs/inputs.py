"""What a run reads before any weight is loaded: architecture, tokenizer, rows."""

from dataclasses import dataclass

from rich.console import Console
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from framework.build.data.prediction_rows import encode_sample_prompts
from framework.build.data.prepare import Data, prepare_data, training_texts
from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.loading.bases import refuse_other_words
from framework.build.model.heads import fit_head, pad_like
from framework.build.resolve_model import settle
from framework.build.sources.python_rows import NO_ROWS, RowsFromPython
from framework.build.text.classes import Targets
from framework.build.text.tokenizer import build_tokenizer
from framework.errors import Problem, RequestError
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted


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
