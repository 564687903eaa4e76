"""The reference of a preference: the model as it was before training, asked for the log-probabilities of answers."""

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
    """The base of an adapted model, which is the model as it was: costs a forward pass and no memory."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model), model.disable_adapter():  # type: ignore[operator]
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


class FirstAdapter(nn.Module):
    """Frozen copies of an adapter's weights as they are now, on their device and in their dtypes."""

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
        """Within the block the model computes with the copies. They are tensors of their own, so that autocast keeps no
        half-precision copy of one for the other."""
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
    """The base with the adapter that the run started from: costs a forward pass and a copy of the adapter."""

    loss: Loss
    first: FirstAdapter

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model), self.first.in_place():
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


@dataclass(frozen=True)
class AsItIs:
    """The model itself, which is its own reference as long as no step was made."""

    loss: Loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad(), _as_evaluated(model):
            return answer_sums(self.loss.log_probabilities(model, batch, ignore_phases))


@dataclass(frozen=True)
class FrozenCopy:
    """A model of its own that is never trained: costs its weights and a forward pass."""

    loss: Loss
    model: nn.Module

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            return answer_sums(self.loss.log_probabilities(self.model, batch, ignore_phases))


@dataclass(frozen=True)
class Precomputed:
    """What `source` has said of each row before the first step, carried by the batch."""

    source: Reference

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return batch["reference"]


def build_reference(config: TrainingConfig, loss: Loss, frozen_model: nn.Module | None) -> Reference | None:
    """The reference that the loss needs, None where it needs none."""
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
    """The model with weights of its own, in the same dtypes, that are not trained; for inference."""
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
    """Within the block nothing drops out."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
