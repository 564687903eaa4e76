"""`training.optimizer`: parameter groups, matrices with separate treatment, and the torch optimizer."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.model.freeze import matches, nearest_modules
from framework.build.model.heads import head_layers
from framework.build.model.parts import causal_model
from framework.build.optimizers.parameter_wise import ParameterWise, StateStore
from framework.build.optimizers.row import Trained, rows_beside
from framework.build.place import Place
from framework.errors import Problem, RequestError
from framework.schema.choices import OptimizerOffload
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Optimizer, facts_of
from framework.schema.training import ParameterGroup, TrainingParams


def hidden_matrices(model: nn.Module) -> frozenset[Tensor]:
    """The trained matrices inside the blocks: two-dimensional, neither an embedding nor the head."""
    ends = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    ends |= {parameter for layer in head_layers(causal_model(model)) for parameter in layer.parameters()}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 2)
    return frozenset(parameter for parameter in trained if parameter not in ends)


def matrix_parameters(training: TrainingParams, model: nn.Module) -> frozenset[Tensor]:
    """Matrices that `training.optimizer` orthogonalizes or projects; empty for an optimizer without special treatment.

    Raises RequestError if there are none, so that it would be plain AdamW.
    """
    choice = training.optimizer
    if not facts_of(choice).of_matrices:
        return frozenset()
    hidden = hidden_matrices(model)
    if not hidden:
        message = f"{choice} is for matrices inside the blocks, and none is trained: AdamW would train everything"
        raise RequestError([Problem("training.optimizer", message, expected=str(Optimizer.ADAMW_TORCH_FUSED))])
    if not facts_of(choice).projects:
        return hidden
    rank = training.projection_rank
    projected = frozenset(matrix for matrix in hidden if min(matrix.shape) > rank)
    if not projected:
        widest = max(min(matrix.shape) for matrix in hidden)
        message = (
            f"{choice} projects matrices whose smaller side is above {rank}, and the widest that is trained has "
            f"{widest}: AdamW would train everything"
        )
        works = f"training.optimizer={Optimizer.ADAMW_TORCH_FUSED}"
        expected = f"at most {widest - 1}, or {works}" if widest > 1 else works
        raise RequestError([Problem("training.projection_rank", message, expected=expected)])
    return projected


RATE_FACTOR = "rate_factor"
"""Key of a parameter group with the factor on the schedule's rate, used by `train_step`."""

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+(?:$|\.)")
"""Parameters without weight decay: biases and norms, as in transformers.Trainer, and GPT-2's `ln_`."""


def parameter_groups(config: TrainingConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters grouped by rate and decay, biases and norms last.

    Raises RequestError for items of `training.parameter_groups` that match no trained parameter, or the same one.
    """
    training = config.training
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    _refuse_patterns(training, [name for name, _ in trained], model)
    ratio = config.peft.lora_plus_lr_ratio if training.use_peft else None
    groups = defaultdict[tuple[bool, float, float], list[Tensor]](list)
    for is_decayed in (True, False):
        for name, parameter in trained:
            if decays(name) is is_decayed:
                factor, decay = rate_and_decay(training, name)
                faster = ratio if ratio is not None and "lora_B" in name else 1.0
                groups[is_decayed, factor * faster, decay].append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, **({} if factor == 1.0 else {RATE_FACTOR: factor})}
        for (_, factor, decay), parameters in groups.items()
    ]


def decays(name: str) -> bool:
    """Whether the parameter has weight decay: neither a bias nor part of a norm."""
    return _NOT_DECAYED.search(name.lower()) is None


def rate_and_decay(training: TrainingParams, name: str) -> tuple[float, float]:
    """The factor on the schedule's rate for a parameter, and its decay."""
    own = next((group for group in training.parameter_groups if matches(group.match, name)), ParameterGroup(match=name))
    factor = 1.0 if own.learning_rate is None else own.learning_rate / training.learning_rate
    decay = training.weight_decay if own.weight_decay is None else own.weight_decay
    return factor, decay if decays(name) else 0.0


def _refuse_patterns(training: TrainingParams, trained: list[str], model: nn.Module) -> None:
    problems, taken = list[Problem](), dict[str, str]()
    for index, group in enumerate(training.parameter_groups):
        key, found = (
            f"training.parameter_groups[{index}].match",
            [name for name in trained if matches(group.match, name)],
        )
        if not found and any(matches(group.match, name) for name, _ in model.named_parameters()):
            problems.append(Problem(key, f"{group.match!r} matches only weights that are not trained"))
        elif not found:
            near, expected = nearest_modules(group.match, model), "the name of a trained weight, or of a module"
            problems.append(Problem(key, f"{group.match!r} matches no weight of this model", None, expected, near))
        if twice := next((name for name in found if name in taken), None):
            message = f"{group.match!r} and {taken[twice]!r} both match {twice}"
            problems.append(Problem(key, message, expected="patterns that share no weight"))
        taken |= dict.fromkeys(found, group.match)
    if problems:
        raise RequestError(problems)


def build_optimizer(
    config: TrainingConfig, model: nn.Module, place: Place, from_python: FromPython = TASKS_OWN
) -> torch.optim.Optimizer:
    """Build the optimizer, with an explicit implementation rather than torch's default.

    For updates in backward or offloaded states each parameter has its own optimizer. Raises RequestError for an
    optimizer of matrices without a matrix to train, and as `parameter_groups` does.
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
