"""The reference of a preference: log-probabilities of answers under the model before training."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from framework.build.losses.loss import Batch, Loss, ignore_phases
from framework.build.text.labels import IGNORED
from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig


class Reference(Protocol):
    """Log-probabilities of whole answers under the reference, float32 of shape `[sequences]`, without gradients."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class WithoutAdapter:
    """The base of an adapted model, with the adapter disabled: costs a forward pass and no memory."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model), model.disable_adapter():  # type: ignore[operator]
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


class FirstAdapter(nn.Module):
    """Frozen copies of an adapter's current weights, on the same device and in the same dtypes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        copies = [nn.Parameter(parameter.detach().clone(), requires_grad=False) for parameter in trained]
        self.copies = nn.ParameterList(copies)
        number = {id(parameter): index for index, parameter in enumerate(trained)}
        self._places = [
            (module, name, number[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in number
        ]
        self.eval()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model computes with the copies. They are separate tensors, so that autocast's cache of
        half-precision copies does not mix them up."""
        own = [module._parameters[name] for module, name, _ in self._places]
        try:
            for module, name, index in self._places:
                module._parameters[name] = self.copies[index]
            yield
        finally:
            for (module, name, _), parameter in zip(self._places, own, strict=True):
                module._parameters[name] = parameter


@dataclass(frozen=True)
class WithFirstAdapter:
    """The base with the run's initial adapter: costs a forward pass and a copy of the adapter."""

    loss: Loss
    first: FirstAdapter

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model), self.first.in_place():
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


@dataclass(frozen=True)
class AsItIs:
    """The model itself, which is its own reference before the first step."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model):
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


@dataclass(frozen=True)
class FrozenCopy:
    """A separate frozen model: costs its weights and a forward pass."""

    loss: Loss
    model: nn.Module

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return answer_sums(self.loss.log_probabilities(self.model, batch, ignore_phases))


@dataclass(frozen=True)
class Precomputed:
    """Log-probabilities that `source` computed before the first step, taken from the batch."""

    source: Reference

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return batch["reference"]


def build_reference(config: TrainingConfig, loss: Loss, frozen_model: nn.Module | None) -> Reference | None:
    """The reference of the loss, or None if it needs none."""
    training = config.training
    if not training.has_reference:
        return None
    if isinstance(frozen_model, FirstAdapter):
        return WithFirstAdapter(loss, frozen_model)
    if frozen_model is not None:
        return FrozenCopy(loss, frozen_model)
    starts_elsewhere = ADAPTERS[config.peft.peft_method].moves_base or config.peft.adapter_path is not None
    source = WithoutAdapter(loss) if training.use_peft and not starts_elsewhere else AsItIs(loss)
    return Precomputed(source) if training.asks_reference_once else source


def frozen_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of the model in eval mode, in the same dtypes."""
    copied = copy.deepcopy(model)
    copied.requires_grad_(False)
    copied.eval()
    return copied


def answer_sums(log_probabilities: Tensor) -> Tensor:
    """`[rows, tokens] -> [rows]`, float32."""
    return log_probabilities.sum(1)


def answer_tokens(batch: Batch) -> Tensor:
    """Supervised tokens of each sequence, int64 of shape `[rows]`."""
    return (batch["labels"][:, 1:] != IGNORED).sum(1)


@contextlib.contextmanager
def _as_evaluated(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode, without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
