"""New rows of the embedding and the head, for added tokens or a longer tokenizer."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.build.text.tokenizer import Vocabulary, vocabulary_of
from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.rules.model import trains_embedding


def changes_rows(model: ModelParams) -> bool:
    """Whether rows may be added or changed after loading."""
    return bool(model.added_tokens) or model.resize_embeddings is not False


def fit_vocabulary(config: TrainingConfig, architecture: PretrainedConfig) -> TrainingConfig:
    """Set the number of embedding rows in the model's own config, and in ours the token ids that an adapter trains by
    default. Raises RequestError as `vocabulary_of` does."""
    if not changes_rows(config.model):
        return config
    text, peft = architecture.get_text_config(), config.peft
    text.vocab_size = rows_for(config.model, text.vocab_size)
    can = config.training.use_peft and ADAPTERS[peft.peft_method].trains_tokens
    if not can or peft.trainable_token_indices is not None or trains_embedding(peft):
        return config
    ids = vocabulary_of(config.model).ids
    return config.model_copy(update={"peft": peft.model_copy(update={"trainable_token_indices": ids})})


def rows_for(model: ModelParams, stored: int) -> int:
    """Number of embedding rows, given `stored` in the checkpoint."""
    tokens, multiple = vocabulary_of(model).tokens, int(model.resize_embeddings)
    if tokens <= stored:
        return stored
    return -(-tokens // max(1, multiple)) * max(1, multiple)


def as_stored(architecture: PretrainedConfig, rows: int) -> PretrainedConfig:
    """The config with the checkpoint's number of embedding rows."""
    stored = deepcopy(architecture)
    stored.get_text_config().vocab_size = rows
    return stored


def fill_rows(model: PreTrainedModel, config: TrainingConfig, rows: int) -> None:
    """Resize a loaded model to `rows` embedding rows and initialize new ones: an added token as the mean of the tokens
    that it was split into, others as the mean of all rows, computed in float32."""
    found, stored = vocabulary_of(config.model), model.get_input_embeddings().weight.shape[0]
    if rows != stored:
        model.resize_token_embeddings(rows, mean_resizing=False)
    for matrix in token_matrices(model):
        with torch.no_grad():
            for index, values in new_rows(matrix, found, stored).items():
                matrix[index] = values.to(matrix.dtype)


def new_rows(matrix: Tensor, found: Vocabulary, stored: int) -> dict[int, Tensor]:
    """Row index -> float32 values, for each row that is not among the checkpoint's `stored` rows, and each added
    token."""
    mean = matrix[:stored].mean(0, dtype=torch.float32) if matrix.shape[0] > stored else matrix.new_empty(0)
    values = dict.fromkeys(range(stored, matrix.shape[0]), mean)
    for number, parts in found.added:
        known = [part for part in parts if part < stored]
        values[number] = matrix[known or slice(stored)].mean(0, dtype=torch.float32)
    return values


def token_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """The matrices with a row for every token: the embedding, an untied head, and its bias."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = [embedding.weight]
    if head is not None:
        found += [item for item in (head.weight, getattr(head, "bias", None)) if item is not None]
    return list({id(item): item for item in found}.values())
