"""`training.optimizer` becomes a torch optimizer over the trained parameters."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from framework.build.place import Place
from framework.schema.choices import Optimizer
from framework.schema.config import TrainingConfig

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+(?:$|\.)")
"""Parameters that weight decay passes over: biases and norms, as transformers.Trainer names them, and GPT-2's `ln_`."""


def build_optimizer(config: TrainingConfig, model: nn.Module, place: Place) -> torch.optim.Optimizer:
    """The optimizer that was asked for, its implementation stated rather than left to torch's default.

    `adamw_torch` is the foreach implementation on CUDA (fast; temporaries as large as the parameters) and the plain
    loop on CPU. Two groups: weights that decay, and biases and norms that do not.
    """
    training = config.training
    groups = _groups(model, training.weight_decay)
    if config.training.use_peft and config.peft.lora_plus_lr_ratio is not None:
        groups = list(with_faster_b(groups, model, config.peft.lora_plus_lr_ratio))
    rate, foreach = training.learning_rate, place.kind == "cuda"
    betas, epsilon = (training.adam_beta1, training.adam_beta2), training.adam_epsilon
    match training.optimizer:
        case Optimizer.ADAMW_TORCH:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, foreach=foreach)
        case Optimizer.ADAMW_TORCH_FUSED:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)
        case Optimizer.SGD:
            return torch.optim.SGD(groups, lr=rate, foreach=foreach)
        case Optimizer.ADAFACTOR:
            adafactor: torch.optim.Optimizer = Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
            return adafactor
        case other:
            raise ValueError(f"{other} is not built: `check` refuses it before it comes here")


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
