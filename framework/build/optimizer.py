"""`training.optimizer` becomes a torch optimizer over the trained parameters."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.from_python import TASKS_OWN, FromPython
from framework.build.optimizers.any_precision import AnyPrecisionAdamW, Kernel, note_only
from framework.build.optimizers.lion import Lion
from framework.build.optimizers.low_bit import LOW_BIT, RehearsedLowBit, low_bit_class
from framework.build.optimizers.low_rank import LowRankAdamW
from framework.build.optimizers.matrices import matrices_apart
from framework.build.optimizers.muon import MuonWithAdamW
from framework.build.optimizers.parameter_wise import ParameterWise, StateStore
from framework.build.optimizers.schedule_free import ScheduleFreeAdamW
from framework.build.optimizers.sophia import SophiaG
from framework.build.place import Place
from framework.schema.choices import OptimizerOffload, Rounding
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+(?:$|\.)")
"""Parameters that weight decay passes over: biases and norms, as transformers.Trainer names them, and GPT-2's `ln_`."""

GALORE_SCALE, APOLLO_SCALE = 0.25, 1.0
"""`training.projection_scale` where it is unset: the defaults of both papers' code."""


@dataclass(frozen=True)
class _Facts:
    """What some optimizers must know of the whole model, whichever of its parameters they are given."""

    place: Place
    numbers: Mapping[Tensor, int]
    matrices: frozenset[Tensor]


def build_optimizer(
    config: TrainingConfig, model: nn.Module, place: Place, from_python: FromPython = TASKS_OWN
) -> torch.optim.Optimizer:
    """The optimizer that was asked for, its implementation stated rather than left to torch's default.

    `adamw_torch` is the foreach implementation on CUDA (fast; temporaries as large as the parameters) and the plain
    loop on CPU. Two groups: weights that decay, and biases and norms that do not. When updates come during backward or
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
    facts = _Facts(place, numbers, matrices_apart(training, model))
    offload = training.optimizer_offload
    if training.optimizer_in_backward is not True and offload is OptimizerOffload.NONE:
        return _make(training, groups, facts)
    parts = [
        _make(training, [{**group, "params": [parameter]}], facts) for group in groups for parameter in group["params"]
    ]
    folder = Path(training.optimizer_offload_folder or ".") if offload is OptimizerOffload.NVME else None
    return ParameterWise(parts, None if offload is OptimizerOffload.NONE else StateStore(place, folder))


def _make(training: TrainingParams, groups: list[dict[str, Any]], facts: _Facts) -> torch.optim.Optimizer:
    rate, foreach = training.learning_rate, facts.place.kind == "cuda"
    betas, epsilon = (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    match training.optimizer:
        case Optimizer.ADAMW_TORCH:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, foreach=foreach)
        case Optimizer.ADAMW_TORCH_FUSED:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)
        case Optimizer.SGD:
            return torch.optim.SGD(groups, lr=rate, momentum=training.sgd_momentum, foreach=foreach)
        case Optimizer.ADAFACTOR:
            from transformers.optimization import Adafactor  # behind it, peft: seconds to import

            adafactor: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
            return adafactor
        case Optimizer.LION:
            return Lion(groups, rate, betas)
        case Optimizer.SOPHIA:
            return SophiaG(groups, rate, betas, rho=training.sophia_rho, hessian_steps=training.sophia_hessian_steps)
        case Optimizer.SCHEDULE_FREE_ADAMW:
            return ScheduleFreeAdamW(groups, rate, betas, epsilon)
        case Optimizer.MUON:
            return MuonWithAdamW(
                groups,
                rate,
                betas,
                epsilon,
                momentum=training.muon_momentum,
                matrices=facts.matrices,
                foreach=foreach,
            )
        case Optimizer.ANYPRECISION_ADAMW | Optimizer.ANYPRECISION_ADAMW_8BIT:
            return _any_precision(training, groups, facts)
        case Optimizer.GALORE_ADAMW | Optimizer.APOLLO_ADAMW:
            return _low_rank(training, groups, facts)
        case _:
            return _low_bit(training, groups, facts)


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


def _any_precision(training: TrainingParams, groups: list[dict[str, Any]], facts: _Facts) -> AnyPrecisionAdamW:
    return AnyPrecisionAdamW(
        groups,
        training.learning_rate,
        (training.adam_beta1, training.adam_beta2),
        training.adam_epsilon,
        rounding=training.rounding or Rounding.STOCHASTIC,
        state_bits=8 if training.optimizer is Optimizer.ANYPRECISION_ADAMW_8BIT else 16,
        seed=training.seed,
        numbers=facts.numbers,
        kernel=_kernel(facts.place),
    )


def _kernel(place: Place) -> Kernel | None:
    """The launch over many parameters on a CUDA card, by triton, which torch for CUDA brings on Linux; else None."""
    if place.kind != "cuda":
        return None
    if place.rehearsed:
        return Kernel(note_only)
    try:
        from framework.build.optimizers.any_precision_kernel import launch
    except ImportError:
        return None
    return Kernel(launch)


def _generator(place: Place) -> torch.Generator:
    return torch.Generator("cpu" if place.rehearsed else place.device)


def _low_rank(training: TrainingParams, groups: list[dict[str, Any]], facts: _Facts) -> LowRankAdamW:
    apollo, scale = training.optimizer is Optimizer.APOLLO_ADAMW, training.projection_scale
    if scale is None:
        scale = APOLLO_SCALE if apollo else GALORE_SCALE
    return LowRankAdamW(
        groups,
        training.learning_rate,
        (training.adam_beta1, training.adam_beta2),
        training.adam_epsilon,
        apollo=apollo,
        rank=training.projection_rank,
        update_steps=training.projection_update_steps,
        scale=scale,
        seed=training.seed,
        numbers=facts.numbers,
        matrices=facts.matrices,
        generator=_generator(facts.place),
    )


def _low_bit(training: TrainingParams, groups: list[dict[str, Any]], facts: _Facts) -> torch.optim.Optimizer:
    choice = Optimizer(training.optimizer)
    row = LOW_BIT[choice]
    if facts.place.rehearsed:
        return RehearsedLowBit(groups, training.learning_rate, row)
    betas = (training.adam_beta1, training.adam_beta2)
    epsilon = {"eps": training.adam_epsilon} if row.states == 2 else {}
    made: torch.optim.Optimizer = low_bit_class(choice)(groups, lr=training.learning_rate, betas=betas, **epsilon)
    return made


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [parameter for name, parameter in trained if not _NOT_DECAYED.search(name.lower())]
    others = [parameter for name, parameter in trained if _NOT_DECAYED.search(name.lower())]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
