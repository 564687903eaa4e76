"""`tunesmith predict`: batched predictions of a trained model for the rows of a file, in file order."""

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
from framework.run.checkpoints.saved_model import MODEL_FILE, PROMPTS, SavedModel, find_saved_model
from framework.run.checkpoints.trained_model import load_model
from framework.schema.architecture import position_count
from framework.schema.config import TrainingConfig
from framework.schema.data import DataParams
from framework.schema.model import ModelParams
from framework.schema.tasks import Task
from framework.schema.training import TrainingParams

MOST_ROWS, MOST_TOKENS = 64, 16_384
"""Most rows of a batch, and most tokens with padding: larger batches are no faster, not even on a card."""
MOST_LOGITS = 1 << 28
"""Most elements in the logits of a scored batch: 1 GiB in float32."""
NEW_TOKENS = 128
"""Default length of a completion in tokens."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """Options of a prediction. `new_tokens` is the maximum length of a completion (unset: `NEW_TOKENS`, at most half
    the model's positions); `score` asks for the likelihood of the rows' own answers; `trusts_code` lets Python code of
    the model run; `allow` may name `model.base`, for an adapter whose base has changed since training."""

    new_tokens: int | None = None
    score: bool = False
    trusts_code: bool = False
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Loaded:
    """A model, its tokenizer, and the config with which its run read rows."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    config: TrainingConfig

    @property
    def device(self) -> torch.device:
        device: torch.device = causal_model(self.model).get_input_embeddings().weight.device
        return device


def predict(source: Path, file: str, request: Request | None = None) -> Iterator[Answer]:
    """Yield the trained model's answer for each row of `file`, in order.

    Everything is read and checked before the first answer. Raises RequestError for a folder without a model, and
    listing every broken row.
    """
    request = request or Request()
    disable_progress_bar()  # results may go to a pipe
    saved_model = find_saved_model(source, request.trusts_code, request.allow)
    config = reading_config(saved_model)
    tokenizer = saved_model.tokenizer
    task = config.training.task
    _refuse(saved_model, task, request)
    if request.score or task is Task.REWARD:
        rows = read_answered(file, config, tokenizer)
    elif task.facts.is_of_rows:
        rows = read_texts(file, config, tokenizer)
    else:
        new_tokens, room = _lengths(config, request)
        rows = read_prompts(file, config, tokenizer, room)
    loaded = _Loaded(load_model(saved_model), tokenizer, config)
    if request.score or task is Task.REWARD:
        answered = [one for row in rows for one in (replace(row, rejected=None), row.rejected) if one is not None]
        if task is Task.REWARD:
            return _paired(rows, _in_order(answered, _judging(loaded), MOST_TOKENS))
        vocabulary = causal_model(loaded.model).config.get_text_config().vocab_size
        return _paired(rows, _in_order(answered, _scoring(loaded), max(1, MOST_LOGITS // vocabulary)))
    if task.facts.is_of_rows:
        return _in_order(rows, _judging(loaded), MOST_TOKENS)
    return _in_order(rows, _completing(loaded, new_tokens), MOST_TOKENS, new_tokens)


def reading_config(saved_model: SavedModel) -> TrainingConfig:
    """The run's config with the trained model as its model; for a folder without a run, a config from its files."""
    config = saved_model.config
    if saved_model.adapter_kind is not None:
        return settle(config)[0] if config is not None else TrainingConfig(model=ModelParams(model_max_length=1 << 30))
    model = ModelParams(model_name=str(saved_model.folder), trust_remote_code=saved_model.trusts_code)
    if config is None:
        config = TrainingConfig(training=TrainingParams(task=saved_model.task), data=_labels(saved_model), model=model)
    else:
        kept = {"model_max_length": config.model.model_max_length}
        config = config.model_copy(update={"model": model.model_copy(update=kept)})
        if config.training.use_peft:  # a merged model
            training = config.training.model_copy(update={"use_peft": False})
            config = config.model_copy(update={"training": training})
    return settle(config)[0]


def _labels(saved_model: SavedModel) -> DataParams:
    """The class names in a folder's model config."""
    if not saved_model.task.facts.label:
        return DataParams()
    settings = json.loads((saved_model.folder / MODEL_FILE).read_text())
    names = settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(names, dict) or not all(key.isdecimal() and isinstance(names[key], str) for key in names):
        message = f"{saved_model.folder / MODEL_FILE} has no names of classes: its id2label is {names!r}"
        raise RequestError([Problem("RUN", message, expected='{"0": name, "1": name, ...}')])
    several = settings.get("problem_type") == "multi_label_classification"
    labels = tuple(names[key] for key in sorted(names, key=size_of))
    return DataParams(labels=labels, multi_label=several if saved_model.task.facts.label == "class" else None)


def _refuse(saved_model: SavedModel, task: Task, request: Request) -> None:
    if task.facts.is_of_rows and request.score:
        message = f"a model of the task {task} always gives its confidence"
        raise RequestError([Problem("--score", message, expected="leave it out")])
    if request.new_tokens is not None and (task.facts.is_of_rows or request.score):
        why = "with --score" if request.score else f"by a model of the task {task}"
        raise RequestError([Problem("--max-new-tokens", f"no text is generated {why}", expected="leave it out")])
    if saved_model.adapter_kind in PROMPTS and not request.score:
        message = f"peft 0.21 loses a trained {saved_model.adapter_kind} when it generates text"
        raise RequestError([Problem("RUN", message, expected="--score")])


def _lengths(config: TrainingConfig, request: Request) -> tuple[int, int | None]:
    """Most new tokens, and most prompt tokens so that the new ones still have positions (None: no limit)."""
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
    """Answers to all rows in their order, computed in batches of similar length, longest first."""
    table = join_rows(rows)
    order = sorted(range(len(table)), key=lambda index: -int(table.lengths[index]))
    found: dict[int, Answer] = {}
    start, size = 0, MOST_ROWS
    while start < len(order):
        longest = int(table.lengths[order[start]]) + more
        chosen = order[start : start + max(1, min(size, most_tokens // longest))]
        try:
            with torch.inference_mode():
                answered = ask([table[index] for index in chosen])
        except torch.OutOfMemoryError:
            if len(chosen) == 1:
                raise
            size = len(chosen) // 2
            torch.cuda.empty_cache()
            continue
        found.update(zip(chosen, answered, strict=True))
        start += len(chosen)
    return (found[index] for index in range(len(table)))


def _paired(rows: Sequence[Encoded], found: Iterator[Answer]) -> Iterator[Answer]:
    """Join the two answers of a preference pair, which `found` has one after the other."""
    for row in rows:
        yield next(found) if row.rejected is None else {"chosen": next(found), "rejected": next(found)}


def _judging(loaded: _Loaded) -> Callable[[list[Row]], list[Answer]]:
    """Answers of a model with a head: class and confidence, regression values, or a reward."""
    names, kind = answers(loaded.config), loaded.model.config.problem_type
    called = "reward" if loaded.config.training.task is Task.REWARD else "value"

    def ask(rows: list[Row]) -> list[Answer]:
        logits = loaded.model(**model_inputs(loaded.model, _moved(loaded, rows)), use_cache=False).logits.float()
        if kind == "regression":
            return [_numbers(names, row, called) for row in logits.tolist()]
        if kind == "multi_label_classification":
            return [_several(names, row) for row in logits.sigmoid().tolist()]
        return [_one(names, row) for row in logits.softmax(1).tolist()]

    return ask


def _one(names: Sequence[str], shares: list[float]) -> Answer:
    best = max(range(len(shares)), key=shares.__getitem__)
    return {"label": names[best], "probabilities": dict(zip(names, shares, strict=True))}


def _several(names: Sequence[str], shares: list[float]) -> Answer:
    chosen = [name for name, share in zip(names, shares, strict=True) if share > 0.5]
    return {"labels": chosen, "probabilities": dict(zip(names, shares, strict=True))}


def _numbers(names: Sequence[str], values: list[float], called: str) -> Answer:
    return {called: values[0]} if len(values) == 1 else {"values": dict(zip(names, values, strict=True))}


def _scoring(loaded: _Loaded) -> Callable[[list[Row]], list[Answer]]:
    """Log-probability and number of each row's supervised tokens."""

    def ask(rows: list[Row]) -> list[Answer]:
        batch = _moved(loaded, rows)
        likelihoods = full_loss.log_probabilities(loaded.model, batch, ignore_phases).sum(1).tolist()
        counts = (batch["labels"][:, 1:] >= 0).sum(1).tolist()
        return [
            {"log_likelihood": likelihood, "tokens": count}
            for likelihood, count in zip(likelihoods, counts, strict=True)
        ]

    return ask


def _completing(loaded: _Loaded, new_tokens: int) -> Callable[[list[Row]], list[Answer]]:
    """Greedy completions up to an end token or `new_tokens`."""
    pad, tokenizer = padding_id(loaded.tokenizer), loaded.tokenizer
    # Where a completion ends: the tokenizer's end token, and those that the model's own settings name
    named = getattr(causal_model(loaded.model).generation_config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    ends = sorted({token for token in (loaded.tokenizer.eos_token_id, *listed) if isinstance(token, int)})

    def ask(rows: list[Row]) -> list[Answer]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):  # padded on the left, so that every row continues at the same position
            ids[index, longest - len(row["input_ids"]) :] = torch.tensor(row["input_ids"])
            mask[index, longest - len(row["input_ids"]) :] = 1
        written = loaded.model.generate(
            input_ids=ids.to(loaded.device),
            attention_mask=mask.to(loaded.device),
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


def _moved(loaded: _Loaded, rows: list[Row]) -> dict[str, Tensor]:
    batch = collate(rows, padding_id(loaded.tokenizer))
    return {name: tensor.to(loaded.device) for name, tensor in batch.items()}
