"""Tasks: each is a loss and a form of batch behind the same step."""

from torch import nn

from framework.build.loss import build_loss
from framework.build.tasks.next_token import NextToken
from framework.build.tasks.objective import Objective
from framework.schema.config import TrainingConfig


def build_objective(config: TrainingConfig, model: nn.Module) -> Objective:
    """What `training.task` minimises. Raises RequestError for a model that it cannot be asked of."""
    return NextToken(build_loss(config.model, model))
