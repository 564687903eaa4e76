"""Rows that make and recognize an optimizer, in the `ROWS` of the module that its facts name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from framework.build.place import Place
from framework.schema.optimizers import FACTS, Optimizer
from framework.schema.training import TrainingParams

Groups = list[dict[str, Any]]
State = tuple[str, str]
"""Name of a state, and its dtype, with `managed` for managed memory."""


@dataclass(frozen=True)
class Trained:
    """Facts of the whole model that some optimizers need, whichever parameters they are given."""

    place: Place
    numbers: Mapping[Tensor, int]
    matrices: frozenset[Tensor]

    @property
    def foreach(self) -> bool:
        return self.place.kind == "cuda"


@dataclass(frozen=True)
class Looked:
    """A trained tensor whose states are inspected."""

    tensor: Tensor
    is_matrix: bool
    on_card: bool

    @property
    def dtype(self) -> str:
        return made_of(self.tensor.dtype)


@dataclass(frozen=True)
class Row:
    """Construction, recognition and expected states of one optimizer."""

    make: Callable[[TrainingParams, Groups, Trained], torch.optim.Optimizer]
    is_one: Callable[[torch.optim.Optimizer], bool]
    """Whether a built optimizer is this one."""
    states: Callable[[TrainingParams, Looked], Iterable[State]]
    """The states that a trained tensor should have after a step."""


def rows_beside(choice: Optimizer) -> Mapping[Optimizer, Row]:
    """The rows of the module that makes `choice`."""
    rows: Mapping[Optimizer, Row] = import_module(f"framework.build.optimizers.{FACTS[choice].module}").ROWS
    return rows


def betas_of(training: TrainingParams) -> tuple[float, float]:
    """The decays of both moments."""
    return training.adam_beta1, training.adam_beta2


def in_its_dtype(*names: str) -> Callable[[TrainingParams, Looked], Iterable[State]]:
    """Expected states with these names in the tensor's dtype."""
    return lambda training, looked: [(name, looked.dtype) for name in names]


def made_of(dtype: torch.dtype, managed: bool = False) -> str:
    """Description of a state: its dtype, and whether it is in managed memory."""
    return str(dtype).removeprefix("torch.") + (" managed" if managed else "")
