"""`tunesmith predict`: a trained model is asked about the rows of a file, many at a time, the answers in file order."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from framework.build.data.batches import collate
from framework.build.data.prediction_rows import read_answered, read_prompts, read_texts
from framework.build.data.rows import Row, join_rows
from framework.build.losses.loss import full_loss, ignore_phases, model_inputs
from framework.build.model.heads import answers
from framework.build.model.parts import causal_model
from framework.build.resolve_model import settle
from framework.build.text.classes import size_of
from framework.build.text.labels import Encoded
from framework.build.text.tokenizer import padding_id
from framework.errors import Problem, RequestError
from framework.run.checkpoints.trained_model import MODEL_FILE, PROMPTS, SavedModel, find_saved_model, load_model
from framework.schema.architecture import position_count
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig
from framework.schema.data import DataParams
from framework.schema.model import ModelParams
from framework.schema.training import TrainingParams

MOST_ROWS, MOST_TOKENS = 64, 16_384
"""Rows of a batch, and its positions with padding: beyond these a batch is no faster, on a card either."""
MOST_LOGITS = 1 << 28
"""Numbers that the logits of a scored batch may have: 1 GiB in float32."""
NEW_TOKENS = 128
"""Of a completion, where nobody says."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """`new_tokens` is how long a completion may be, unset `NEW_TOKENS`, or half of the positions where those are fewer;
    `score`: rows have answers, tell how likely they are; `trusts_code`: Python code that comes with the model
    may run; `allow` may name `model.base`, the base of an adapter, which has changed since."""

    new_tokens: int | None = None
    score: bool = False
    trusts_code: bool = False
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A model, its tokenizer, and how the run that made it read rows."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    config: TrainingConfig

    @property
    def device(self) -> torch.device:
        device: torch.device = causal_model(self.model).get_input_embeddings().weight.device
        return device


def predict(source: Path, file: str, request: Request | None = None) -> Iterator[Answer]:
    """What the trained model in `source` says of each row of `file`, in order.

    Everything is read and checked before the first answer. Raises RequestError for a folder without a model, and with
    every broken row.
    """
    request = request or Request()
    disable_progress_bar()  # results go to a pipe, and a bar is none of them
    saved_model = find_saved_model(source, request.trusts_code, request.allow)
    config = reading_config(saved_model)
    tokenizer = saved_model.tokenizer
    task = config.training.task
    _refuse(saved_model, task, request)
    if request.score or task is Task.REWARD:
        rows = read_answered(file, config, tokenizer)
    elif task.is_of_rows:
        rows = read_texts(file, config, tokenizer)
    else:
        new_tokens, room = _lengths(config, request)
        rows = read_prompts(file, config, tokenizer, room)
    asked = _Asked(load_model(saved_model), tokenizer, config)
    if request.score or task is Task.REWARD:
        answered = [one for row in rows for one in (replace(row, rejected=None), row.rejected) if one is not None]
        if task is Task.REWARD:
            return _paired(rows, _in_order(answered, _judging(asked), MOST_TOKENS))
        vocabulary = causal_model(asked.model).config.get_text_config().vocab_size
        return _paired(rows, _in_order(answered, _scoring(asked), max(1, MOST_LOGITS // vocabulary)))
    if task.is_of_rows:
        return _in_order(rows, _judging(asked), MOST_TOKENS)
    return _in_order(rows, _completing(asked, new_tokens), MOST_TOKENS, new_tokens)


def reading_config(saved_model: SavedModel) -> TrainingConfig:
    """The run's config, about the model that came of it; of a folder alone, what its files say."""
    config = saved_model.config
    if saved_model.adapter_kind is not None:
        return settle(config)[0] if config is not None else TrainingConfig(model=ModelParams(model_max_length=1 << 30))
    model = ModelParams(model_name=str(saved_model.folder), trust_remote_code=saved_model.trusts_code)
    if config is None:
        config = TrainingConfig(training=TrainingParams(task=saved_model.task), data=_labels(saved_model), model=model)
    else:
        kept = {"model_max_length": config.model.model_max_length}
        config = config.model_copy(update={"model": model.model_copy(update=kept)})
        if config.training.use_peft:  # a merged model, or one that was saved merged
            training = config.training.model_copy(update={"use_peft": False})
            config = config.model_copy(update={"training": training})
    return settle(config)[0]


def _labels(saved_model: SavedModel) -> DataParams:
    """The names of the classes that a folder's config has."""
    if not saved_model.task.is_of_rows or saved_model.task is Task.REWARD:
        return DataParams()
    settings = json.loads((saved_model.folder / MODEL_FILE).read_text())
    names = settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(names, dict) or not all(key.isdecimal() and isinstance(names[key], str) for key in names):
        message = f"{saved_model.folder / MODEL_FILE} has no names of classes: its id2label is {names!r}"
        raise RequestError([Problem("RUN", message, expected='{"0": name, "1": name, ...}')])
    several = settings.get("problem_type") == "multi_label_classification"
    labels = tuple(names[key] for key in sorted(names, key=size_of))
    return DataParams(labels=labels, multi_label=several if saved_model.task is Task.CLASSIFICATION else None)


def _refuse(saved_model: SavedModel, task: Task, request: Request) -> None:
    if task.is_of_rows and request.score:
        message = f"a model of the task {task} always tells how sure it is"
        raise RequestError([Problem("--score", message, expected="leave it out")])
    if request.new_tokens is not None and (task.is_of_rows or request.score):
        why = "beside --score" if request.score else f"by a model of the task {task}"
        raise RequestError([Problem("--max-new-tokens", f"nothing is written {why}", expected="leave it out")])
    if saved_model.adapter_kind in PROMPTS and not request.score:
        message = f"peft 0.21 loses a trained {saved_model.adapter_kind} when it writes"
        raise RequestError([Problem("RUN", message, expected="--score")])


def _lengths(config: TrainingConfig, request: Request) -> tuple[int, int | None]:
    """Tokens that a completion may have, and its prompt, so that the new ones have positions; None: any number."""
    positions = None
    if config.model.model_name is not None:
        _, architecture = settle(config)
        positions = position_count(architecture.get_text_config().to_dict())
    if positions is None:
        return request.new_tokens or NEW_TOKENS, None
    new_tokens = request.new_tokens or min(NEW_TOKENS, positions // 2)
    if positions <= new_tokens:
        message = f"{new_tokens} new tokens are all of the model's {positions} positions, or more"
        raise RequestError([Problem("--max-new-tokens", message, expected=f"less than {positions}")])
    return new_tokens, positions - new_tokens


def _in_order(
    rows: Sequence[Encoded], ask: Callable[[list[Row]], list[Answer]], most_tokens: int, more: int = 0
) -> Iterator[Answer]:
    """Answers to all rows in their order; asked with rows of about the same length together, the longest first."""
    table = join_rows(rows)
    order = sorted(range(len(table)), key=lambda index: -int(table.lengths[index]))
    found: dict[int, Answer] = {}
    start, size = 0, MOST_ROWS
    while start < len(order):
        longest = int(table.lengths[order[start]]) + more
        chosen = order[start : start + max(1, min(size, most_tokens // longest))]
        try:
            with torch.inference_mode():
                told = ask([table[index] for index in chosen])
        except torch.OutOfMemoryError:
            if len(chosen) == 1:
                raise
            size = len(chosen) // 2
            torch.cuda.empty_cache()
            continue
        found.update(zip(chosen, told, strict=True))
        start += len(chosen)
    return (found[index] for index in range(len(table)))


def _paired(rows: Sequence[Encoded], told: Iterator[Answer]) -> Iterator[Answer]:
    """Of a pair of answers both, which `told` has one after the other."""
    for row in rows:
        yield next(told) if row.rejected is None else {"chosen": next(told), "rejected": next(told)}


def _judging(asked: _Asked) -> Callable[[list[Row]], list[Answer]]:
    """The class of each row and how sure the model is, or its numbers; of an answer its reward."""
    names, kind = answers(asked.config), asked.model.config.problem_type
    called = "reward" if asked.config.training.task is Task.REWARD else "value"

    def ask(rows: list[Row]) -> list[Answer]:
        told = asked.model(**model_inputs(asked.model, _moved(asked, rows)), use_cache=False).logits.float()
        if kind == "regression":
            return [_numbers(names, row, called) for row in told.tolist()]
        if kind == "multi_label_classification":
            return [_several(names, row) for row in told.sigmoid().tolist()]
        return [_one(names, row) for row in told.softmax(1).tolist()]

    return ask


def _one(names: Sequence[str], shares: list[float]) -> Answer:
    best = max(range(len(shares)), key=shares.__getitem__)
    return {"label": names[best], "probabilities": dict(zip(names, shares, strict=True))}


def _several(names: Sequence[str], shares: list[float]) -> Answer:
    chosen = [name for name, share in zip(names, shares, strict=True) if share > 0.5]
    return {"labels": chosen, "probabilities": dict(zip(names, shares, strict=True))}


def _numbers(names: Sequence[str], values: list[float], called: str) -> Answer:
    return {called: values[0]} if len(values) == 1 else {"values": dict(zip(names, values, strict=True))}


def _scoring(asked: _Asked) -> Callable[[list[Row]], list[Answer]]:
    """The log-probability of each row's supervised tokens, and how many they are."""

    def ask(rows: list[Row]) -> list[Answer]:
        batch = _moved(asked, rows)
        told = full_loss.log_probabilities(asked.model, batch, ignore_phases).sum(1).tolist()
        counts = (batch["labels"][:, 1:] >= 0).sum(1).tolist()
        return [{"log_likelihood": told, "tokens": count} for told, count in zip(told, counts, strict=True)]

    return ask


def _completing(asked: _Asked, new_tokens: int) -> Callable[[list[Row]], list[Answer]]:
    """What the model writes, always its likeliest token, until its end token or `new_tokens`."""
    pad, tokenizer = padding_id(asked.tokenizer), asked.tokenizer
    # Where a completion ends: the tokenizer's end token, and those that the model's own settings name
    named = getattr(causal_model(asked.model).generation_config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    ends = sorted({token for token in (asked.tokenizer.eos_token_id, *listed) if isinstance(token, int)})

    def ask(rows: list[Row]) -> list[Answer]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):  # on the left, so that every row goes on at the same place
            ids[index, longest - len(row["input_ids"]) :] = torch.tensor(row["input_ids"])
            mask[index, longest - len(row["input_ids"]) :] = 1
        written = asked.model.generate(
            input_ids=ids.to(asked.device),
            attention_mask=mask.to(asked.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad,
            eos_token_id=ends or None,
        )
        return [_completion(tokenizer, tokens, ends) for tokens in written[:, longest:].tolist()]

    return ask


def _completion(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: Sequence[int]) -> Answer:
    end = next((at for at, token in enumerate(tokens) if token in ends), None)
    kept = tokens if end is None else tokens[:end]
    return {
        "completion": tokenizer.decode(kept, skip_special_tokens=True),
        "tokens": len(kept),
        "finished": end is not None,
    }


def _moved(asked: _Asked, rows: list[Row]) -> dict[str, Tensor]:
    batch = collate(rows, padding_id(asked.tokenizer))
    return {name: tensor.to(asked.device) for name, tensor in batch.items()}
