"""Groups of trained parameters with a rate and a decay: biases and norms, LoRA+'s B matrices, and those of a recipe."""

import re
from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from framework.build.model.freeze import matches, nearest_modules
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig
from framework.schema.training import ParameterGroup, TrainingParams

RATE_FACTOR = "rate_factor"
"""Key of a parameter group that learns at a multiple of the schedule's rate. `train_step` reads it."""

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+(?:$|\.)")
"""Parameters that weight decay passes over: biases and norms, as transformers.Trainer names them, and GPT-2's `ln_`."""


def parameter_groups(config: TrainingConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The trained parameters by rate and decay, biases and norms last.

    Raises RequestError for each item of `training.parameter_groups` that matches no trained parameter, or one that
    another matches.
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
    """Whether weight decay is for this parameter, which is neither a bias nor of a norm."""
    return _NOT_DECAYED.search(name.lower()) is None


def rate_and_decay(training: TrainingParams, name: str) -> tuple[float, float]:
    """The multiple of the schedule's rate that a recipe gives a parameter, and its decay."""
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
