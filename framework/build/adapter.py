"""`peft` becomes an adapter on the frozen model."""

import warnings
from collections import Counter

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.hub import nearest
from framework.errors import Problem, RequestError
from framework.schema.peft import PeftParams

ALL_LINEAR = "all-linear"


def attach_adapter(params: PeftParams, model: PreTrainedModel) -> PeftModel:
    """The model with its weights frozen and LoRA matrices in float32 beside the targets.

    Raises RequestError naming the linear layers there are when a target matches none of them.
    """
    targets = _targets(params, model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=params.lora_r,
        lora_alpha=params.lora_alpha,
        lora_dropout=params.lora_dropout,
        target_modules=targets,
        modules_to_save=list(params.lora_modules_to_save) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with warnings.catch_warnings():
        # peft reads a property that transformers 5.20 renamed; nothing a user could change
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=True)
    return adapted


def hold_float32_masters(model: PeftModel) -> None:
    """Cast what is trained to float32, as autocast wants it: peft leaves copies of modules in the base's dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _targets(params: PeftParams, model: PreTrainedModel) -> str | list[str]:
    """The target names for peft: what was written, else peft's own choice for this kind of model."""
    key = "peft.lora_target_modules"
    suffixes = linear_suffixes(model)
    listed = ", ".join(f"{name} ({count})" for name, count in suffixes.most_common())
    if params.lora_target_modules is None:
        known = DEFAULT_TARGETS.get(model.config.model_type)
        if known is None:
            message = f"peft has no default for {model.config.model_type}: name the targets"
            raise RequestError([Problem(key, message, expected=f"[{ALL_LINEAR}], or some of {listed}")])
        return list(known)
    if params.lora_target_modules == (ALL_LINEAR,):
        return ALL_LINEAR
    names = [name for name, _ in model.named_modules()]
    problems = [
        Problem(
            f"{key}[{index}]",
            f"{target!r} names no module of this model",
            expected=f"[{ALL_LINEAR}], or some of {listed}",
            nearest=nearest(target, suffixes),
        )
        for index, target in enumerate(params.lora_target_modules)
        if not any(name == target or name.endswith(f".{target}") for name in names)
    ]
    if problems:
        raise RequestError(problems)
    return list(params.lora_target_modules)


def linear_suffixes(model: nn.Module) -> Counter[str]:
    """Last name of every linear layer, with how many there are."""
    linear = (nn.Linear, Conv1D)
    return Counter(name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, linear))
