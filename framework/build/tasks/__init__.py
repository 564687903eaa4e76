"""Tasks: each is a loss and a form of batch behind the same step."""

import torch
from torch import nn

from framework.build.loading.bases import build_teacher
from framework.build.losses.cross_entropy import LossTerms
from framework.build.losses.loss import build_loss, chunk_size
from framework.build.losses.router_loss import build_router_loss
from framework.build.place import Place
from framework.build.tasks.next_token import Distillation, NextToken
from framework.build.tasks.objective import Objective
from framework.build.tasks.preference import BradleyTerry, PairLoss, Pairs, SingleLoss, Singles, build_preference
from framework.build.tasks.reference import (
    FirstAdapter,
    Precomputed,
    Reference,
    WithFirstAdapter,
    WithoutAdapter,
    build_reference,
    frozen_copy,
)
from framework.build.tasks.rows import build_row_objective
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig

__all__ = [
    "Precomputed",
    "WithFirstAdapter",
    "WithoutAdapter",
    "build_frozen_model",
    "build_objective",
    "describe_frozen_model",
    "reference_of",
]


def build_frozen_model(
    config: TrainingConfig, model: nn.Module, place: Place, computed: torch.dtype | None
) -> nn.Module | None:
    """The frozen model next to the one that is trained, where the task needs one.

    `model` is the one that is trained, as it was built; `computed` is autocast's dtype.
    """
    training = config.training
    if training.task is Task.DISTILLATION:
        return build_teacher(config, place, computed)
    if training.has_reference and not training.use_peft and not training.asks_reference_once:
        return frozen_copy(model)
    return None


def describe_frozen_model(config: TrainingConfig, frozen_model: nn.Module | None) -> tuple[str, ...]:
    """What a plan has taken the task to need next to the model."""
    training = config.training
    if isinstance(frozen_model, FirstAdapter):
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen_model.parameters())
        what = "the reference is the model with the adapter of peft.adapter_path"
        return (f"{what}: a frozen copy of its {size / 2**20:.1f} MiB, and one more forward pass",)
    if frozen_model is not None:
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen_model.parameters())
        what = "the teacher" if training.task is Task.DISTILLATION else "the reference, a frozen copy of the weights,"
        return (f"{what} takes {size / 2**30:.2f} GiB next to them, and a forward pass of its own in each step",)
    if training.asks_reference_once:
        return ("the reference is asked once before the first step: its forward passes are in no step",)
    return ("the reference is the model without its adapter: one more forward pass",) if training.has_reference else ()


def build_objective(config: TrainingConfig, model: nn.Module, frozen_model: nn.Module | None = None) -> Objective:
    """What `training.task` minimises. Raises RequestError for a model that it cannot be asked of."""
    training = config.training
    if training.task in (Task.CLASSIFICATION, Task.REGRESSION):
        return build_row_objective(model, training.label_smoothing)
    if training.task is Task.REWARD:
        return BradleyTerry()
    if training.task is Task.DISTILLATION:
        assert frozen_model is not None, "build_companion() makes the teacher"
        if config.model.chunked_loss is None:  # two heads' chunks are compared in float32, which is no faster
            return Distillation(frozen_model, training.distillation, None)
        chunk_size(config.model, frozen_model, "training.teacher.model_name")
        return Distillation(frozen_model, training.distillation, chunk_size(config.model, model))
    loss = build_loss(config.model, model, LossTerms(training.label_smoothing, training.z_loss_coef))
    if training.task is Task.PREFERENCE:
        rule = PairLoss(training.preference) if training.has_pairs else SingleLoss(training.preference)
        return build_preference(loss, build_reference(config, loss, frozen_model), rule)
    return NextToken(loss, build_router_loss(config, model))


def reference_of(objective: Objective) -> Reference | None:
    """What a preference is measured against; None for a loss without a reference, and for other tasks."""
    return objective.asked.reference if isinstance(objective, Pairs | Singles) else None
