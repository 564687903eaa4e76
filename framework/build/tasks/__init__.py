"""Training tasks: an objective for each, used by the same training step."""

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
from framework.build.tasks.reference import FirstAdapter, Reference, build_reference, frozen_copy
from framework.build.tasks.rows import build_row_objective
from framework.schema.config import TrainingConfig
from framework.schema.tasks import Task


def build_frozen_model(
    config: TrainingConfig, model: nn.Module, place: Place, computed: torch.dtype | None
) -> nn.Module | None:
    """The frozen teacher or reference model, if the task needs one.

    `model` is the trained model as built; `computed` is autocast's dtype.
    """
    training = config.training
    if training.task.facts.has_teacher:
        return build_teacher(config, place, computed)
    if training.has_reference and not training.use_peft and not training.asks_reference_once:
        return frozen_copy(model)
    return None


def describe_frozen_model(config: TrainingConfig, frozen_model: nn.Module | None) -> tuple[str, ...]:
    """A plan's assumptions about the task's frozen model."""
    training = config.training
    if isinstance(frozen_model, FirstAdapter):
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen_model.parameters())
        what = "the reference is the model with the adapter of peft.adapter_path"
        return (f"{what}: a frozen copy of its {size / 2**20:.1f} MiB, and one more forward pass",)
    if frozen_model is not None:
        size = sum(parameter.numel() * parameter.element_size() for parameter in frozen_model.parameters())
        what = "the teacher" if training.task.facts.has_teacher else "the reference, a frozen copy of the weights,"
        return (f"{what} takes {size / 2**30:.2f} GiB more, and its own forward pass in each step",)
    if training.asks_reference_once:
        return ("the reference is computed once before the first step: its forward passes are not part of a step",)
    return ("the reference is the model without its adapter: one more forward pass",) if training.has_reference else ()


def build_objective(config: TrainingConfig, model: nn.Module, frozen_model: nn.Module | None = None) -> Objective:
    """The objective of `training.task`. Raises RequestError for a model that does not support it."""
    training = config.training
    if training.task.facts.label:
        return build_row_objective(model, training.label_smoothing)
    if training.task is Task.REWARD:
        return BradleyTerry()
    if training.task is Task.DISTILLATION:
        assert frozen_model is not None, "build_frozen_model() makes the teacher"
        if config.model.chunked_loss is None:  # chunks of two heads are compared in float32, which is not faster
            return Distillation(frozen_model, training.distillation, None)
        chunk_size(config.model, frozen_model, "training.teacher.model_name")
        return Distillation(frozen_model, training.distillation, chunk_size(config.model, model))
    loss = build_loss(config.model, model, LossTerms(training.label_smoothing, training.z_loss_coef))
    if training.task is Task.PREFERENCE:
        rule = PairLoss(training.preference) if training.has_pairs else SingleLoss(training.preference)
        return build_preference(loss, build_reference(config, loss, frozen_model), rule)
    return NextToken(loss, build_router_loss(config, model))


def reference_of(objective: Objective) -> Reference | None:
    """The reference of a preference; None for a loss without one, and for other tasks."""
    return objective.asked.reference if isinstance(objective, Pairs | Singles) else None
