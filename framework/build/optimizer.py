"""`training.optimizer` becomes a torch optimizer over the trained parameters."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.optimizers.matrices import matrix_parameters
from framework.build.optimizers.parameter_wise import ParameterWise, StateStore
from framework.build.optimizers.row import Trained, rows_beside
from framework.build.place import Place
from framework.schema.choices import OptimizerOffload
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Optimizer

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+(?:$|\.)")
"""Parameters that weight decay passes over: biases and norms, as transformers.Trainer names them, and GPT-2's `ln_`."""


def build_optimizer(
    config: TrainingConfig, model: nn.Module, place: Place, from_python: FromPython = TASKS_OWN
) -> torch.optim.Optimizer:
    """The optimizer that was asked for, its implementation stated rather than left to torch's default.

    Two groups: weights that decay, and biases and norms that do not. When updates come during backward or
    states live off the device, each parameter has an optimizer of its own. Raises RequestError for an optimizer of
    matrices where none is trained that it is for.
    """
    training = config.training
    groups = _groups(model, training.weight_decay)
    if config.training.use_peft and config.peft.lora_plus_lr_ratio is not None:
        groups = list(with_faster_b(groups, model, config.peft.lora_plus_lr_ratio))
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


RATE_FACTOR = "rate_factor"
"""Key of a parameter group that learns at a multiple of the schedule's rate. `train_step` reads it."""


def with_faster_b(groups: Iterable[dict[str, Any]], model: nn.Module, ratio: float) -> Iterator[dict[str, Any]]:
    """The groups with LoRA's B matrices in ones of their own, at `ratio` x the rate (LoRA+, arXiv 2402.12354)."""
    faster = {id(parameter) for name, parameter in model.named_parameters() if "lora_B" in name}
    for group in groups:
        for factor in (1.0, ratio):
            chosen = [item for item in group["params"] if (id(item) in faster) == (factor is ratio)]
            if chosen:
                yield {**group, "params": chosen, RATE_FACTOR: factor}


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in trained if not _NOT_DECAYED.search(name.lower())]
    others = [parameter for name, parameter in trained if _NOT_DECAYED.search(name.lower())]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
