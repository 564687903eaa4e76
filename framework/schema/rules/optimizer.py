"""Rules about the optimizer, its states and its updates."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import EmaDevice, MixedPrecision, OptimizerOffload, PeftMethod, Scheduler, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import Optimizer, facts_of
from framework.schema.rules.conflict import Conflict


def matrix_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Adapters without a matrix for the optimizer, which would then be plain AdamW. Other models without one are found
    when they are built (framework/build/optimizers/build.py)."""
    choice, peft, key = config.training.optimizer, config.peft, "training.optimizer"
    facts = facts_of(choice)
    if not facts.of_matrices or not config.training.use_peft or peft.lora_modules_to_save:
        return
    works, projects = str(Optimizer.ADAMW_TORCH_FUSED), facts.projects
    is_vectors = peft.peft_method is PeftMethod.IA3 and not projects  # of shape (n, 1): matrices for muon
    if not ADAPTERS[peft.peft_method].has_factors and not is_vectors:
        message = f"{peft.peft_method} trains no matrix inside the blocks, which {choice} is for"
        yield Conflict((key, "peft.peft_method"), message, works)
    elif projects and (projected := config.training.projection_rank) >= (rank := peft.lora_r):
        message = f"{choice} projects matrices whose smaller side is above {projected}, and the adapter's have {rank}"
        below = f"training.projection_rank of at most {rank - 1}, or {works}" if rank > 1 else works
        yield Conflict(("training.projection_rank", "peft.lora_r", key), message, below)


def optimizer_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Weights and learning rates that do not fit the optimizer."""
    training, choice = config.training, config.training.optimizer
    key = "training.optimizer"
    if training.learning_rate == 0:
        yield Conflict(("training.learning_rate",), "is 0: no weight will change", "a rate above 0", is_warning=True)
    is_trained_in_float32 = config.model.torch_dtype_str == TorchDtype.FLOAT32 and not training.use_peft
    # Parameter groups without effect, or with a rate that would scale a schedule of 0.
    for index, group in enumerate(config.training.parameter_groups):
        where = f"training.parameter_groups[{index}]"
        if group.learning_rate is None and group.weight_decay is None:
            yield Conflict((where,), "sets no learning rate or weight decay", "learning_rate, weight_decay or both")
        if group.learning_rate is not None and config.training.learning_rate == 0:
            why = "a schedule with rate 0 cannot be scaled"
            keys = (f"{where}.learning_rate", "training.learning_rate")
            yield Conflict(keys, why, "a rate above 0; model.freeze_layers for weights that are not trained")
    if facts_of(choice).keeps_small_updates and is_trained_in_float32:
        message = f"{choice} is for bfloat16 weights: float32 weights need no rounding"
        works = "model.torch_dtype_str=bfloat16 with training.mixed_precision_dtype=none, or adamw_torch_fused"
        yield Conflict(("model.torch_dtype_str", key), message, works)
    if choice is Optimizer.SCHEDULE_FREE_ADAMW and training.lr_scheduler_type is not Scheduler.CONSTANT:
        message = f"schedule_free_adamw averages instead of decaying: a {training.lr_scheduler_type} rate undoes that"
        yield Conflict(("training.lr_scheduler_type", key), message, "constant", is_warning=True)


def update_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Updates in backward, and states off the device."""
    training = config.training
    keys: tuple[str, ...]
    choice, offload, key = training.optimizer, training.optimizer_offload, "training.optimizer_in_backward"
    if training.optimizer_in_backward is True:
        if training.gradient_accumulation_steps != "auto" and _accumulation(config) > 1:
            keys = (key, "training.gradient_accumulation_steps", "training.global_batch_size")
            message = f"a gradient is freed after one micro-batch, and {_accumulation(config)} are accumulated"
            yield Conflict(keys, message, "one micro-batch a step, or optimizer_in_backward: false")
        if training.max_grad_norm:
            message = "the global norm needs all gradients, and each is freed before"
            yield Conflict((key, "training.max_grad_norm"), message, "training.max_grad_norm=0")
        if training.mixed_precision_dtype is MixedPrecision.FP16:
            message = "an overflow of scaled gradients is known only after weights have changed"
            yield Conflict(("training.mixed_precision_dtype", key), message, config.gpu.instead_of_float16)
        if facts_of(choice).package == "torchao":
            yield Conflict((key, "training.optimizer"), f"{choice} compiles its step, not in backward", "adamw_8bit")
    if offload in (OptimizerOffload.HOST, OptimizerOffload.NVME) and facts_of(choice).package:
        message = f"the states of {choice} are small or paged already, and are not offloaded"
        yield Conflict(("training.optimizer_offload", "training.optimizer"), message, "none, or adamw_torch_fused")
    if offload is OptimizerOffload.NVME and not training.optimizer_offload_folder:
        keys = ("training.optimizer_offload_folder", "training.optimizer_offload")
        yield Conflict(keys, "nvme needs a folder on that disk", "a folder, or optimizer_offload: host")


def average_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """A moving average with weights that are already averaged, updated in backward, or split."""
    training, key = config.training, "training.ema_decay"
    if training.ema_decay is None:
        return
    if training.optimizer is Optimizer.SCHEDULE_FREE_ADAMW:
        message = "schedule_free_adamw evaluates and exports an average of its own"
        yield Conflict((key, "training.optimizer"), message, "unset, or adamw_torch_fused")
    if training.optimizer_in_backward is True:
        message = "the average needs a complete update, and weights are updated one by one in backward"
        yield Conflict((key, "training.optimizer_in_backward"), message, "unset, or optimizer_in_backward: false")
    if training.ema_device is EmaDevice.HOST and (config.fsdp.is_sharded or config.fsdp.tensor_parallel_size > 1):
        other = "fsdp.enable_fsdp" if config.fsdp.is_sharded else "fsdp.tensor_parallel_size"
        message = "the average of split weights is split and stays on the device"
        yield Conflict(("training.ema_device", other), message, "device")


def _accumulation(config: TrainingConfig) -> int:
    try:
        return config.batch.accumulation
    except ValueError:  # reported by batch_conflicts
        return 1
