"""What a run reads before any weight is loaded: architecture, tokenizer, rows."""

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from framework.build.data import Data, prepare_data, training_texts
from framework.build.given import NOTHING, Given
from framework.build.model import settle
from framework.build.tokenizer import build_tokenizer
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig


@dataclass(frozen=True)
class Inputs:
    """The config with everything derived written out, the model's own config, its tokenizer, and the tokenised rows."""

    config: TrainingConfig
    architecture: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: Data


def read_inputs(config: TrainingConfig, given: Given = NOTHING) -> Inputs:
    """Read everything a config names, weights excepted; `given` are rows from Python.

    Raises RequestError for what cannot be read, for rows with nothing to learn, and for a tokenizer with more tokens
    than the model has embeddings.
    """
    if not config.data.train:
        raise RequestError([Problem("data.train", "there is nothing to train on", expected="a list of sources")])
    config, architecture = settle(config)
    tokenizer = read_tokenizer(config, architecture, given)
    return Inputs(config, architecture, tokenizer, read_rows_for(config, architecture, tokenizer, given))


def read_tokenizer(
    config: TrainingConfig, architecture: PretrainedConfig, given: Given = NOTHING
) -> PreTrainedTokenizerBase:
    """The tokenizer; RequestError when it cannot be had or has more tokens than the model has embeddings."""
    tokenizer = build_tokenizer(config, training_texts(config, given))
    vocabulary = architecture.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary} embeddings"
        raise RequestError([Problem("model.tokenizer_name", message, expected="the tokenizer of this model")])
    return tokenizer


def read_rows_for(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: Given = NOTHING,
) -> Data:
    """The tokenised rows, their ids checked against the model's vocabulary."""
    return prepare_data(config, tokenizer, architecture.get_text_config().vocab_size, given)
