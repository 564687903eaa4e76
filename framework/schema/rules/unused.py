"""Keys that do nothing beside others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from framework.schema.choices import Optimizer, OptimizerOffload, Task
from framework.schema.config import TrainingConfig
from framework.schema.fsdp import FSDPParams
from framework.schema.keys import dotted, values, written_keys
from framework.schema.rules.adapter import NO_MATRICES, NOT_LORA, PROMPTS
from framework.schema.rules.conflict import Conflict


@dataclass(frozen=True)
class Idle:
    """Keys that do nothing under a condition on another key."""

    keys: tuple[str, ...]
    """Dotted keys; one that ends in a dot stands for its whole section."""
    cause: str
    is_idle: Callable[[TrainingConfig], bool]
    reason: str


_LIONS = (Optimizer.LION, Optimizer.LION_8BIT, Optimizer.PAGED_LION_8BIT)


_WITHOUT_SHARDS = ("enable_fsdp", "context_parallel_size", "tensor_parallel_size")


def _is_none_of(names: str) -> Callable[[TrainingConfig], bool]:
    return lambda c: str(c.training.optimizer) not in names.split(" and ")


def _has_other_schedule(names: str) -> Callable[[TrainingConfig], bool]:
    return lambda c: str(c.training.lr_scheduler_type) not in names.split(" and ")


IDLE = (
    Idle(("peft.",), "training.use_peft", lambda c: not c.training.use_peft, "training.use_peft is false"),
    Idle(
        ("model.freeze_layers", "model.freeze_first_blocks"),
        "training.use_peft",
        lambda c: c.training.use_peft,
        "an adapter leaves the whole model frozen; peft.lora_target_modules says where it is",
    ),
    Idle(
        tuple(f"fsdp.{name}" for name in FSDPParams.model_fields if name not in _WITHOUT_SHARDS),
        "fsdp.enable_fsdp",
        lambda c: c.fsdp.enable_fsdp is False,
        "fsdp.enable_fsdp is false",
    ),
    Idle(
        ("training.compile_scope",),
        "training.compile",
        lambda c: c.training.compile is False,
        "training.compile is false",
    ),
    Idle(
        (
            "training.gradient_checkpointing_every",
            "training.gradient_checkpointing_policy",
            "training.gradient_checkpointing_kwargs.use_reentrant",
        ),
        "training.enable_gradient_checkpointing",
        lambda c: c.training.enable_gradient_checkpointing is False,
        "training.enable_gradient_checkpointing is false",
    ),
    Idle(
        ("peft.q_lora_bits", "peft.bnb_4bit_quant_type", "peft.use_bnb_nested_quant"),
        "peft.q_lora",
        lambda c: not c.peft.q_lora,
        "peft.q_lora is false",
    ),
    Idle(
        ("peft.lora_alpha", "peft.lora_plus_lr_ratio"),
        "peft.peft_method",
        lambda c: c.peft.peft_method in NOT_LORA,
        "this method has no B matrices",
    ),
    Idle(
        ("peft.lora_r", "peft.lora_dropout"),
        "peft.peft_method",
        lambda c: c.peft.peft_method in NO_MATRICES,
        "this method has no matrices",
    ),
    Idle(
        ("peft.lora_target_modules",),
        "peft.peft_method",
        lambda c: c.peft.peft_method in PROMPTS,
        "this method is on no module",
    ),
    Idle(
        ("peft.num_virtual_tokens",),
        "peft.peft_method",
        lambda c: c.peft.peft_method not in PROMPTS,
        "peft.peft_method is neither prefix nor prompt",
    ),
    *(
        Idle((f"training.{key}",), "training.lr_scheduler_type", _has_other_schedule(used), f"only {used} use it")
        for key, used in (
            ("min_learning_rate", "cosine_with_min_lr and polynomial and warmup_stable_decay"),
            ("lr_cycles", "cosine_with_restarts"),
            ("lr_power", "polynomial"),
            ("lr_decay_ratio", "warmup_stable_decay"),
        )
    ),
    Idle(
        ("training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"),
        "training.optimizer",
        lambda c: c.training.optimizer in (Optimizer.SGD, Optimizer.ADAFACTOR),
        "training.optimizer is not of the Adam family",
    ),
    Idle(
        ("training.adam_epsilon",),
        "training.optimizer",
        lambda c: c.training.optimizer in (*_LIONS, Optimizer.SOPHIA),
        "training.optimizer divides by no root",
    ),
    *(
        Idle(tuple(f"training.{key}" for key in keys), "training.optimizer", _is_none_of(used), f"only {used} use it")
        for keys, used in (
            (("rounding",), "anyprecision_adamw and anyprecision_adamw_8bit"),
            (("sgd_momentum",), "sgd"),
            (("muon_momentum",), "muon"),
            (("sophia_rho", "sophia_hessian_steps"), "sophia"),
            (("projection_rank", "projection_update_steps", "projection_scale"), "galore_adamw and apollo_adamw"),
        )
    ),
    Idle(
        ("training.optimizer_offload_folder",),
        "training.optimizer_offload",
        lambda c: c.training.optimizer_offload is not OptimizerOffload.NVME,
        "training.optimizer_offload is not nvme",
    ),
    Idle(
        ("training.warmup_ratio",),
        "training.warmup_steps",
        lambda c: c.training.warmup_steps is not None,
        "training.warmup_steps wins",
    ),
    Idle(
        ("training.num_train_epochs",),
        "training.max_steps",
        lambda c: c.training.max_steps is not None,
        "training.max_steps wins",
    ),
    Idle(
        ("data.labels",),
        "training.task",
        lambda c: c.training.task is not Task.CLASSIFICATION,
        "only classification has classes",
    ),
    Idle(
        ("data.truncation",),
        "training.task",
        lambda c: c.training.task is Task.PRETRAIN,
        "pretrain splits a long document into consecutive rows and loses nothing of it",
    ),
    Idle(("data.shuffle_buffer",), "data.streaming", lambda c: not c.data.streaming, "data.streaming is off"),
    Idle(("data.eval_fraction",), "data.eval", lambda c: bool(c.data.eval), "data.eval is given"),
    Idle(
        ("model.model_revision",),
        "model.model_name",
        lambda c: c.model.model_name is None,
        "there is no model.model_name",
    ),
)


def idle_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Warnings about keys that were written and do nothing: other than by default, or in so many words while their
    cause is nowhere written, so that whoever wrote them thinks they are in effect."""
    defaults = dict(values(TrainingConfig()))
    changed = [dotted(path) for path, value in values(config) if path not in defaults or value != defaults[path]]
    written = dict.fromkeys(written_keys(config))
    for idle in IDLE:
        if not idle.is_idle(config):
            continue
        for key in changed if idle.cause in written else dict.fromkeys((*changed, *written)):
            in_section = any(section.endswith(".") and key.startswith(section) for section in idle.keys)
            if key in idle.keys or (in_section and key != idle.cause):
                yield Conflict((key, idle.cause), f"has no effect: {idle.reason}", is_warning=True)
