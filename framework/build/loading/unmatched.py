"""Missing and unexpected weights of a checkpoint: which are refused, and which are harmless."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from framework.build.model.heads import is_new
from framework.errors import Problem, RequestError
from framework.schema.plural import counted

BUFFERS = (".inv_freq", ".position_ids", ".token_type_ids", ".masked_bias", ".attn.bias", ".attention.bias")
"""Name endings of constants that earlier versions of transformers saved and models now compute: rotary frequencies,
positions, and the triangular masks of GPT-2 and GPT-NeoX."""

COMPARED = 16
"""Evenly spaced rows of tied matrices that are compared. Training changes all rows of a head, which has a gradient for
every token of the vocabulary."""


@dataclass(frozen=True)
class Unmatched:
    """Accepted differences between checkpoint and model. `new`: weights of the head that are missing from the
    checkpoint and start random. `left_over`: unused weights of the checkpoint, such as another task's head."""

    new: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()


def sort_unmatched(model: PreTrainedModel, info: Mapping[str, Any], name: str, key: str) -> Unmatched:
    """The accepted part of transformers' loading report. Raises RequestError, under `key`, for the rest: weights that
    would stay random, have another shape, or belong to the model's body but would be unused."""
    new = tuple(sorted(each for each in info["missing_keys"] if is_new(model, each)))
    shapes = {
        key: f"{key} ({_shape(stored)} there, {_shape(own)} here)" for key, stored, own in info["mismatched_keys"]
    }
    absent = sorted({*info["missing_keys"]} - {*new} - shapes.keys())
    needed, left_over = sort_left_over(model, info["unexpected_keys"])
    problems = [
        Problem(key, f"{message}, first {names[0]}", expected=expected)
        for names, message, expected in (
            (absent, f"{_weights(absent, 'the model')} not in {name!r} and would stay random", None),
            (sorted(shapes.values()), f"{_weights(shapes, 'the model')} of another shape in {name!r}", None),
            (
                needed,
                f"{_weights(needed, repr(name))} left over, which the configured model does not have",
                _WHOLE,
            ),
        )
        if names
    ]
    if problems:
        raise RequestError(problems)
    return Unmatched(new, left_over)


_WHOLE = "a config.json, and a model.architecture, that describe all of the checkpoint"


def sort_left_over(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Unexpected weights of a checkpoint: those that belong to the body, and harmless ones, which are constants, heads
    of other tasks and whole parts that this model does not have, such as a vision tower."""
    prefix = f"{model.base_model_prefix}."
    parts = {name for name, _ in model.base_model.named_children()}
    needed, harmless = list[str](), list[str]()
    for name in sorted(names):
        within = name.removeprefix(prefix).partition(".")[0] in parts
        (needed if within and not name.endswith(BUFFERS) else harmless).append(name)
    return needed, tuple(harmless)


def refuse_untied(model: PreTrainedModel, files: Iterable[Path], name: str, key: str) -> None:
    """Raise RequestError, under `key`, if the config ties matrices that the safetensors files store separately with
    different values: transformers would train both, and the plan counts one. Reads `COMPARED` rows of each."""
    holders = dict[str, Any]()
    with ExitStack() as opened:
        for file in files:
            stored = opened.enter_context(safe_open(file, framework="pt"))
            holders.update(dict.fromkeys(stored.keys(), stored))
        for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if not {tied, source} <= holders.keys():
                continue
            one, other = (holders[each].get_slice(each) for each in (tied, source))
            rows = range(0, one.get_shape()[0], max(one.get_shape()[0] // COMPARED, 1))
            if one.get_shape() == other.get_shape() and all(torch.equal(one[row], other[row]) for row in rows):
                continue
            message = f"the config of {name!r} ties {tied} to {source}, and its files store both with different values"
            raise RequestError([Problem(key, message, expected="model.architecture.tie_word_embeddings=false")])


def _weights(names: Iterable[str], owner: str) -> str:
    return counted(len([*names]), f"weight of {owner} is", f"weights of {owner} are")


def _shape(size: Iterable[int]) -> str:
    return f"[{', '.join(map(str, size))}]"
