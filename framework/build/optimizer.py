"""`training.optimizer` becomes a torch optimizer over the trained parameters."""

from pathlib import Path

import torch
from torch import Tensor, nn

from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.optimizers.groups import parameter_groups
from framework.build.optimizers.matrices import matrix_parameters
from framework.build.optimizers.parameter_wise import ParameterWise, StateStore
from framework.build.optimizers.row import Trained, rows_beside
from framework.build.place import Place
from framework.schema.choices import OptimizerOffload
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Optimizer


def build_optimizer(
    config: TrainingConfig, model: nn.Module, place: Place, from_python: FromPython = TASKS_OWN
) -> torch.optim.Optimizer:
    """The optimizer that was asked for, its implementation stated rather than left to torch's default.

    When updates come during backward or states live off the device, each parameter has an optimizer of its own. Raises
    RequestError for an optimizer of matrices where none is trained that it is for, and as `parameter_groups` does.
    """
    training = config.training
    groups = parameter_groups(config, model)
    if from_python.optimizer is not None:
        return from_python.made_optimizer(groups, training.learning_rate)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(trained)}
    known = Trained(place, numbers, matrix_parameters(training, model))
    choice = Optimizer(training.optimizer)
    make = rows_beside(choice)[choice].make
    offload = training.optimizer_offload
    if training.optimizer_in_backward is not True and offload is OptimizerOffload.NONE:
        return make(training, groups, known)
    parts = [
        make(training, [{**group, "params": [parameter]}], known) for group in groups for parameter in group["params"]
    ]
    folder = Path(training.optimizer_offload_folder or ".") if offload is OptimizerOffload.NVME else None
    return ParameterWise(parts, None if offload is OptimizerOffload.NONE else StateStore(place, folder))
