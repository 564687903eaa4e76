"""Task heads: a language model's logits for each token, or one output for a row.

For a task of rows the model is transformers' `...ForSequenceClassification` of its family. An encoder is pooled as its
family does it; a decoder at the last token that is not padding, which it finds by `pad_token_id`.
"""

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from framework.build.model.convolutions import CONVOLUTIONAL
from framework.build.text.tokenizer import padding_id
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted
from framework.schema.tasks import Task

_KEY = "model.architecture"
_OURS = ("num_labels", "id2label", "label2id", "problem_type")
"""Keys of a Hugging Face config that `data.labels` and the task decide."""


def model_class(task: Task) -> Any:
    """The transformers class that builds and loads the model of a task."""
    return AutoModelForSequenceClassification if task.facts.is_of_rows else AutoModelForCausalLM


def answers(config: TrainingConfig) -> tuple[str, ...]:
    """Names of the outputs of a model for a task of rows."""
    facts = config.training.task.facts
    return (config.data.labels if facts.label else None) or facts.outputs


def describe_answers(config: TrainingConfig, architecture: PretrainedConfig) -> tuple[str, ...]:
    """Assumptions of a plan about the head and convolutions."""
    assumptions = []
    if config.training.task.facts.label and not config.data.labels:
        assumed = len(answers(config))
        assumptions.append(f"data.labels is unset, and a plan reads no rows: the head has {counted(assumed, 'output')}")
    if type(architecture) in CONVOLUTIONAL and config.gpu.name != "cpu":
        assumptions.append("cuDNN's workspaces for convolutions are not known in advance: they come on top")
    return tuple(assumptions)


def fit_head(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Set the head's size, names and problem type in the model's own config. Raises RequestError for a model that
    cannot have the head of this task."""
    task = config.training.task
    if not task.facts.is_of_rows:
        # Tasks of tokens predict the next one, which a bidirectional model would see.
        if not _has_causal_model(architecture):
            message = f"{architecture.model_type} is not a causal language model"
            expected = "a decoder, such as llama; or training.task=classification"
            raise RequestError([Problem(f"{_KEY}.model_type", message, expected=expected)])
        if reads_both_ways(architecture):
            message = f"{architecture.model_type} is bidirectional here, so it would see the next token"
            raise RequestError(
                [Problem(f"{_KEY}.is_decoder", message, expected="true; or training.task=classification")]
            )
        return
    _refuse_without_classifier(config, architecture)
    names = answers(config)
    architecture.num_labels = len(names)
    architecture.id2label = dict(enumerate(names))
    architecture.label2id = {name: index for index, name in enumerate(names)}
    kinds = {True: "multi_label_classification", False: "single_label_classification"}
    is_class = task.facts.label == "class"
    architecture.problem_type = kinds[config.data.multi_label is True] if is_class else "regression"
    text = architecture.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = 0  # replaced by `pad_like`, which knows the tokenizer


def refuse_without_attention(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError for options that do not apply to a convolutional model."""
    if type(architecture) not in CONVOLUTIONAL:
        return
    kind, model = architecture.model_type, config.model
    asked = {"model.attn_implementation": model.attn_implementation, "model.sdpa_backend": model.sdpa_backend}
    problems = [
        Problem(key, f"{kind} has no attention", expected="unset") for key, value in asked.items() if value is not None
    ]
    if config.training.use_peft:
        message = f"an adapter saves no memory with {kind}, which has few weights and no pretrained ones"
        problems.append(Problem("training.use_peft", message, expected="false"))
    if problems:
        raise RequestError(problems)


def pad_like(architecture: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the config's pad token to the id that rows are padded with, by which a decoder finds the last token."""
    architecture.get_text_config().pad_token_id = padding_id(tokenizer)


def answers_for_rows(model: nn.Module) -> bool:
    """Whether a transformers model has the head of a task of rows."""
    return type(model).__name__.endswith("ForSequenceClassification")


def head_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the head, by name.

    For a language model the output embedding. For a task of rows everything but the body, and an encoder's pooler,
    which masked language models do not have in their checkpoints.
    """
    if answers_for_rows(model):
        body = model.base_model_prefix
        tops = {name: module for name, module in model.named_children() if name != body}
        pooler = getattr(model.base_model, "pooler", None)
        tops |= {f"{body}.pooler": pooler} if pooler is not None else {}
        return {name: module for name, module in tops.items() if any(True for _ in module.parameters())}
    head = model.get_output_embeddings()
    return {name: module for name, module in model.named_modules() if module is head} if head is not None else {}


def head_layers(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of the head, including nested ones."""
    return {inner for module in head_modules(model).values() for inner in module.modules()}


def is_new(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight missing from the checkpoint belongs to the head of a task of rows, so that it may start
    random."""
    return answers_for_rows(model) and name.startswith(tuple(f"{top}." for top in head_modules(model)))


def reads_both_ways(architecture: PretrainedConfig) -> bool:
    """Whether attention is bidirectional, so that padding needs a mask."""
    if not _has_causal_model(architecture):
        return True
    return getattr(architecture, "is_decoder", None) is False and read_by_model(architecture, "is_decoder")


def _has_causal_model(architecture: PretrainedConfig) -> bool:
    """Whether transformers has a causal model for the architecture, or the model brings its own code for one."""
    brought = getattr(architecture, "auto_map", None) or {}
    return AutoModelForCausalLM._model_mapping.get(type(architecture), None) or "AutoModelForCausalLM" in brought


def read_by_model(architecture: PretrainedConfig, key: str) -> bool:
    """Whether the model's code uses a key that its config class does not declare, as Qwen3-MoE does with `head_dim`."""
    kind: Any = type(architecture)
    return _reads(kind, key)


@cache
def _reads(kind: Any, key: str) -> bool:
    classes = (AutoModelForCausalLM, AutoModelForSequenceClassification)
    built = next((mapped for auto in classes if (mapped := auto._model_mapping.get(kind, None))), None)
    try:
        code = inspect.getsource(sys.modules[built.__module__]) if built else ""
    except (KeyError, OSError):
        return False
    name = re.escape(key)  # excludes examples in docstrings that set it
    return re.search(rf'config\.{name}\b(?!\s*=[^=])|getattr\((?:self\.)?config, "{name}"', code) is not None


def _refuse_without_classifier(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    task, kind = config.training.task, architecture.model_type
    mapped = AutoModelForSequenceClassification._model_mapping.get(type(architecture), None)
    problems = [
        Problem(f"{_KEY}.{key}", "is decided by training.task and data.labels", expected="leave it out")
        for key in _OURS
        if key in (config.model.architecture or {})
    ]
    if mapped is None or architecture.is_encoder_decoder:
        why = "is an encoder with a decoder" if architecture.is_encoder_decoder else "has no classifier in transformers"
        expected = "bert, modernbert, llama, qwen3 and most other encoders and decoders"
        problems.append(Problem(f"{_KEY}.model_type", f"{kind} {why}, and the task is {task}", expected=expected))
    elif getattr(architecture, "is_decoder", False) and read_by_model(architecture, "is_decoder"):
        message = f"{kind} is pooled at its first token, which sees no other token in a decoder"
        problems.append(Problem(f"{_KEY}.is_decoder", message, expected="false"))
    if problems:
        raise RequestError(problems)
