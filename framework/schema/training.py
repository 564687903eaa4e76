"""`training`: task, batch, optimizer, precision, memory settings, evaluation and checkpoints."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from framework.schema.choices import (
    CheckpointingPolicy,
    CompileScope,
    EmaDevice,
    Fp8,
    MixedPrecision,
    OnOutOfMemory,
    OptimizerOffload,
    PreferenceLoss,
    Rounding,
    Scheduler,
    Tracker,
)
from framework.schema.evaluation import Interval
from framework.schema.facts import FREE, NO_MEMORY, STEERING, Facts, Resume, UsedUnless, UsedWith
from framework.schema.objectives import WITHOUT_REFERENCE, DistillationParams, PreferenceParams, TeacherParams
from framework.schema.optimizers import Optimizer
from framework.schema.params import Auto, Integer, Number, Params, Strings, parse_sequence
from framework.schema.tasks import Task, used_by_tasks_with
from framework.schema.urls import NoURL

Positive = Annotated[Integer, Field(ge=1)]
Count = Annotated[Integer, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
_CHECKPOINTED = UsedWith("training.enable_gradient_checkpointing")
_SCHEDULE = "training.lr_scheduler_type"
_OF_TOKENS = used_by_tasks_with(lambda facts: facts.is_next_token)
_OF_TOKENS_OR_CLASSES = used_by_tasks_with(lambda facts: facts.is_next_token or facts.label == "class")
_WITH_LAST_RATE = UsedWith(
    _SCHEDULE, (Scheduler.COSINE_WITH_MIN_LR, Scheduler.POLYNOMIAL, Scheduler.WARMUP_STABLE_DECAY)
)


class GradientCheckpointingKwargs(Params):
    """The options of `torch.utils.checkpoint` that a recipe may set."""

    use_reentrant: Annotated[bool, Facts(resume=Resume.ROUNDING)] = False
    """torch's older variant (true) recomputes under an inner backward pass and supports no policy. Memory is the
    same."""


class AllocatorParams(Params):
    """Settings of torch's CUDA caching allocator, by their names in `PYTORCH_CUDA_ALLOC_CONF`. They change reserved
    memory, never allocated memory. Unset: the value in that variable, else torch's default."""

    expandable_segments: bool | Auto | None = None
    """One growing segment per pool instead of many of fixed sizes: less memory is reserved and unused."""
    max_split_size_mb: Annotated[Integer, Field(ge=20)] | None = None
    """Blocks of this many MiB or more are not split, so that small tensors cannot pin a large block."""
    garbage_collection_threshold: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Share of the card above which cached blocks that were not used recently are returned to the driver."""


class ParameterGroup(Params):
    """Trained weights with their own learning rate or weight decay. No memory."""

    match: Annotated[str, Field(min_length=1)]
    """Weights by name, or by the name of a module around them, as in `model.freeze_layers`: `layers.0`, `layers.*.mlp`,
    `lm_head`, `lora_B`."""
    learning_rate: Annotated[Number, Field(gt=0)] | None = None
    """Peak rate of these weights; the schedule scales with it. Unset: `training.learning_rate`."""
    weight_decay: Annotated[Number, Field(ge=0)] | None = None
    """Decay of these weights, except biases and norms. Unset: `training.weight_decay`."""


ParameterGroups = Annotated[tuple[ParameterGroup, ...], BeforeValidator(parse_sequence)]


class TrainingParams(Params):
    """How to train. Levers that a search decides also take `auto`."""

    task: Task = Task.SFT
    """The training task. `sft` supervises the assistant's turns of a chat, `pretrain` every token; `preference` trains
    on pairs of a better and a worse answer, two sequences a row, and `reward` trains a reward model on them;
    `classification` and `regression` train one output per row. The last three have no logits of tokens. `distillation`
    trains on a teacher's next-token distribution."""
    preference: Annotated[PreferenceParams, UsedWith("training.task", (Task.PREFERENCE,), refused=True)] = (
        PreferenceParams()
    )
    """The loss of `task: preference`."""
    teacher: TeacherParams | None = None
    """The teacher of `task: distillation`; its weights stay on the device in addition to the trained ones."""
    distillation: Annotated[DistillationParams, used_by_tasks_with(lambda facts: facts.has_teacher)] = (
        DistillationParams()
    )
    """The loss of `task: distillation`."""
    router_aux_loss_coef: Annotated[Annotated[Number, Field(ge=0)] | None, Facts(resume=Resume.STEERING)] = None
    """Coefficient of the router auxiliary loss of a mixture of experts; 0 trains without it. Unset: the model's own
    coefficient if its config has `output_router_logits: true`, else 0, as in transformers. Keeps the router logits for
    backward: 4 bytes per token, expert and layer."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=1), Facts(resume=Resume.STEERING), _OF_TOKENS_OR_CLASSES] = 0.0
    """Share of the target that is spread evenly over the vocabulary or the classes in training, not in evaluation. A
    few bytes a token; none with `model.chunked_loss`."""
    z_loss_coef: Annotated[Number, Field(ge=0), Facts(resume=Resume.STEERING), _OF_TOKENS] = 0.0
    """Coefficient of the z-loss, the squared log of the softmax denominator of each supervised token, which keeps
    logits from drifting (PaLM: 1e-4); not in evaluation. No memory with `model.chunked_loss`, else two tensors like the
    float32 logits."""
    neftune_noise_alpha: Annotated[Annotated[Number, Field(gt=0)] | None, Facts(resume=Resume.STEERING)] = None
    """NEFTune: uniform noise of at most alpha / sqrt(tokens of a row x width) on the input embeddings, only in training
    (usually 5 to 15). Briefly two more tensors like the embeddings of a micro-batch."""
    ema_decay: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the trained weights (usually 0.999). 4 bytes a trained weight, in
    checkpoints too."""
    ema_device: Annotated[EmaDevice, UsedUnless("training.ema_decay", (None,))] = EmaDevice.DEVICE
    """Where the average is kept: on the `device`, or in `host` memory, which frees its bytes on the device and costs a
    copy of the trained weights over the link in each step."""
    export_ema: Annotated[bool, STEERING, UsedUnless("training.ema_decay", (None,))] = True
    """Evaluate and export the average; false: the last weights, with the average only in checkpoints. An evaluation
    also keeps the trained weights, in memory that gradients leave free."""
    max_steps: Annotated[Positive | None, STEERING] = None
    """Number of optimizer steps; overrides `num_train_epochs`. No memory."""
    num_train_epochs: Annotated[Number, Field(gt=0), STEERING, UsedWith("training.max_steps", (None,))] = 3.0
    """Passes over the training rows when `max_steps` is unset. No memory."""
    per_device_train_batch_size: Positive | Auto = 8
    """Rows per forward pass on one device. Activations and logits grow in proportion; weights do not change."""
    per_device_eval_batch_size: Positive | Auto | None = None
    """Rows per forward pass of evaluation, which keeps no activations but the logits of one batch. Unset: as in
    training, at most 8."""
    gradient_accumulation_steps: Annotated[Positive | Auto | None, Facts(resume=Resume.STEERING)] = None
    """Micro-batches per optimizer step (1 when unset). Costs no memory, only time; the loss stays the exact mean over
    all supervised tokens of the global batch."""
    global_batch_size: Positive | None = None
    """Rows per optimizer step over all devices. `gradient_accumulation_steps` is then derived from it: global / (per
    device x devices) must be an integer."""
    learning_rate: Annotated[Number, Field(ge=0), STEERING] = 5e-5
    """Peak rate, reached at the end of warm-up. No memory."""
    lr_scheduler_type: Annotated[Scheduler, STEERING] = Scheduler.LINEAR
    """Shape of the learning rate after warm-up, over optimizer steps. No memory."""
    min_learning_rate: Annotated[Number, Field(ge=0), STEERING, _WITH_LAST_RATE] = 0.0
    """Last rate of `cosine_with_min_lr`, `polynomial` and `warmup_stable_decay`. No memory."""
    lr_cycles: Annotated[Positive, STEERING, UsedWith(_SCHEDULE, (Scheduler.COSINE_WITH_RESTARTS,))] = 1
    """Cycles of `cosine_with_restarts`, each from the peak to 0. No memory."""
    lr_power: Annotated[Number, Field(gt=0), STEERING, UsedWith(_SCHEDULE, (Scheduler.POLYNOMIAL,))] = 1.0
    """Exponent of `polynomial`; 1 is linear. No memory."""
    lr_decay_ratio: Annotated[
        Number, Field(gt=0, le=1), STEERING, UsedWith(_SCHEDULE, (Scheduler.WARMUP_STABLE_DECAY,))
    ] = 0.1
    """Share of all optimizer steps over which `warmup_stable_decay` decays, along a cosine. No memory."""
    warmup_steps: Annotated[Count | None, STEERING] = None
    """Optimizer steps of linear warm-up; overrides `warmup_ratio`. No memory."""
    warmup_ratio: Annotated[Fraction, STEERING, UsedWith("training.warmup_steps", (None,))] = 0.0
    """Share of all optimizer steps used for warm-up. No memory."""
    weight_decay: Annotated[Number, Field(ge=0), Facts(resume=Resume.STEERING)] = 0.0
    """Decoupled decay, not applied to biases and norms. Costs one temporary the size of the gradients with `sgd`."""
    parameter_groups: Annotated[ParameterGroups, Facts(resume=Resume.STEERING)] = ()
    """Learning rate or weight decay for weights by name: `[{match: lm_head, learning_rate: 1e-5}]`. At most one item
    may match a weight. Memory as for `weight_decay`, if an item has one."""
    adam_beta1: Annotated[Beta, NO_MEMORY] = 0.9
    """Decay of the first moment. No memory."""
    adam_beta2: Annotated[Beta, NO_MEMORY] = 0.999
    """Decay of the second moment. No memory."""
    adam_epsilon: Annotated[Number, Field(gt=0), NO_MEMORY] = 1e-8
    """Added to the root of the second moment. No memory."""
    max_grad_norm: Annotated[Number, Field(ge=0), Facts(resume=Resume.STEERING)] = 1.0
    """Global norm to which gradients are clipped; 0 disables clipping and saves one pass over the gradients."""
    optimizer: Optimizer | Auto = Optimizer.ADAMW_TORCH
    """The optimizer. Its states are the second largest item of full fine-tuning (AdamW: two copies of the trained
    weights). `adamw_torch` makes temporaries as large as the trained weights on a GPU; `adamw_torch_fused` makes
    none."""
    rounding: Rounding | None = None
    """How `anyprecision_adamw` and `anyprecision_adamw_8bit` keep small updates in bf16: `kahan` costs 2 bytes a
    parameter, `stochastic` none. Unset: stochastic."""
    sgd_momentum: Beta = 0.0
    """Momentum of `sgd`; above 0 it keeps one state per trained weight."""
    muon_momentum: Annotated[Beta, NO_MEMORY] = 0.95
    """Nesterov momentum of `muon` on matrices; other weights follow `adam_beta1`. No memory."""
    sophia_rho: Annotated[Number, Field(gt=0), NO_MEMORY] = 2e4
    """Weight of the curvature in `sophia`: the paper's gamma (0.04) times the tokens of a global batch. No memory."""
    sophia_hessian_steps: Annotated[Positive, NO_MEMORY] = 10
    """Optimizer steps between estimates of `sophia`'s curvature. No memory."""
    projection_rank: Positive = 128
    """Rank of `galore_adamw` and `apollo_adamw`: an m x n matrix, m >= n, has states of 2 m x rank."""
    projection_update_steps: Annotated[Positive, NO_MEMORY] = 200
    """Optimizer steps between two projections. `galore_adamw` takes time for each; no memory."""
    projection_scale: Annotated[Annotated[Number, Field(gt=0)] | None, NO_MEMORY] = None
    """Factor on projected updates. Unset: 0.25 for `galore_adamw`, 1 for `apollo_adamw`. No memory."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is computed, and free the gradient: gradients take the memory of one
    weight instead of all. Excludes accumulation and `max_grad_norm`."""
    optimizer_offload: OptimizerOffload | Auto = OptimizerOffload.NONE
    """Keep optimizer states in host memory (pinned on a GPU) or in a file on NVMe; each weight's states are copied to
    the device for its update. Saves their bytes on the device, costs two copies over the link a step."""
    optimizer_offload_folder: Annotated[
        str | None, FREE, UsedWith("training.optimizer_offload", (OptimizerOffload.NVME,))
    ] = None
    """Folder on the NVMe disk for `optimizer_offload: nvme`; its files are deleted at the end of the run. Costs
    disk."""
    mixed_precision_dtype: Annotated[MixedPrecision | None, Facts(resume=Resume.STEERING)] = None
    """dtype of autocast: matrix products run in it while the weights stay float32. Halves most activations and adds a
    half-precision copy of the weights in forward. `fp16` scales the loss and skips the steps that overflow. Unset: the
    card's best if weights are trained in float32 or a base is frozen (bf16, else fp16; none on the CPU). Instead of
    fp16, float32 without autocast is used for sharded weights and for model families that are known to overflow in it;
    activations then take twice the memory."""
    tf32: Annotated[bool | None, STEERING] = None
    """Let the card compute float32 matrix products in tf32 (10 mantissa bits), many times faster. No memory. Unset:
    false."""
    fp8: Annotated[Fp8, Facts(resume=Resume.STEERING)] = Fp8.NONE
    """Matrix products of the blocks' linear layers in 8-bit floats (cards from capability 8.9). Faster if the model is
    compiled; operands are rounded to 3 mantissa bits, with one scale per operand (`tensorwise`) or row (`rowwise`, more
    accurate). Trained weights (torchao) and their states keep their size; the frozen base of an adapter is stored in 8
    bits, one byte a weight instead of two."""
    enable_gradient_checkpointing: bool | Auto = False
    """Keep only each block's input and recompute the rest in backward: frees most activations, for 15-42 % of speed."""
    gradient_checkpointing_every: Annotated[Positive | Auto, _CHECKPOINTED] = 1
    """Checkpoint every n-th block: 1 is all, 2 every second one. The others keep their activations and are not
    recomputed."""
    gradient_checkpointing_policy: Annotated[CheckpointingPolicy, _CHECKPOINTED] = CheckpointingPolicy.FULL
    """What a checkpointed block keeps: `full` only its input, `save_attention` also the output of attention,
    `save_matmuls` the outputs of its linear layers and attention, so that only cheap operators run twice."""
    gradient_checkpointing_kwargs: Annotated[GradientCheckpointingKwargs, _CHECKPOINTED] = GradientCheckpointingKwargs()
    """Options of checkpointing."""
    activation_memory_budget: Annotated[Number, Field(gt=0, le=1)] | Auto | None = None
    """Share of a compiled block's activations that may be kept; the rest is recomputed, cheapest first. Unset: 1,
    Inductor's default. Needs `compile`."""
    activation_offload: bool | Auto = False
    """Move the tensors that blocks keep for backward to pinned host memory while others compute: with checkpointing
    their inputs, without it all activations of 1 MiB or more. Costs host memory, rounded up to powers of two, and link
    time."""
    compile: bool | Auto = False
    """torch.compile: fuses elementwise operations and keeps fewer activations; compiling takes 8-40 s for the first
    step and for each new batch shape. Evaluation and samples run uncompiled."""
    compile_scope: Annotated[CompileScope, UsedWith("training.compile")] = CompileScope.BLOCK
    """`block` compiles one transformer block and reuses it; `model` compiles everything below the head, with a slower
    start."""
    cuda_graphs: Annotated[bool, UsedWith("training.compile")] = False
    """Record the kernels of compiled blocks as CUDA graphs, once for each batch shape, and replay them, so that a small
    model does not wait for the host. Activations and gradients are held in a separate pool, which evaluation cannot
    use: up to that much more is reserved. Needs `compile` and `data.pad_to_multiple_of`."""
    empty_device_cache_steps: Positive | None = None
    """Return unused cached blocks to the driver every n steps. Does not lower the allocated peak; a small n costs
    time."""
    allocator: AllocatorParams = AllocatorParams()
    """Settings of torch's CUDA allocator, applied before the card is used."""
    use_peft: bool = False
    """Train an adapter instead of the weights: gradients and optimizer states only for the adapter."""
    eval_steps: Annotated[Interval | None, FREE] = None
    """Optimizer steps between evaluations, a share of the run if below 1, or `epoch`; the last is at the end. Unset:
    only at the end, if there is eval data."""
    eval_first: Annotated[bool, FREE] = True
    """Evaluate before the first step as well, as a baseline."""
    save_steps: Annotated[Interval | None, FREE] = None
    """Optimizer steps between checkpoints, a share of the run if below 1, or `epoch`. Unset: one checkpoint at the end.
    Costs disk, not GPU memory."""
    save_first: Annotated[bool, FREE] = False
    """Write a checkpoint before the first step as well. Costs disk."""
    save_total_limit: Annotated[Positive, FREE] = 2
    """Number of checkpoints to keep; older ones are deleted after a newer one is complete."""
    sample_prompts: Annotated[
        Strings, Facts(resume=Resume.FREE), used_by_tasks_with(lambda facts: not facts.is_of_rows)
    ] = ()
    """Prompts that the model completes greedily at each evaluation; completions go to the progress output, to
    `samples.jsonl` in the run folder and to trackers that take text. They are users' turns if the training rows are
    chats. Costs a forward pass of one row of `model.model_max_length` tokens with its keys and values, which is
    planned."""
    sample_new_tokens: Annotated[Positive, FREE, UsedUnless("training.sample_prompts", ((),))] = 64
    """Maximum tokens of such a completion; with its prompt it has to fit `model.model_max_length`."""
    best_metric: Annotated[str | None, FREE] = None
    """Evaluation metric by which the best checkpoint is kept in addition to the newest, such as `eval_loss` or
    `accuracy`. A checkpoint is written whenever it improves. Costs the disk space of one more."""
    early_stopping_patience: Annotated[Positive | None, FREE] = None
    """Number of evaluations in a row without a better `best_metric` (unset: `eval_loss`) after which the run ends. No
    memory."""
    export_best: Annotated[bool, FREE] = False
    """Export the weights of the best checkpoint instead of the last. Needs `best_metric`."""
    async_save: Annotated[bool, Facts(resume=Resume.FREE)] = False
    """Write checkpoints during training: a save copies weights and optimizer states to host memory, and training
    continues while the copies are written. Costs that host memory (on each rank its shard) from the first save to the
    last; training waits for the copy, and for the writer if it is not done by the next save. Needs `save_steps`."""
    logging_steps: Annotated[Positive, FREE] = 1
    """Optimizer steps between progress lines; `metrics.jsonl` gets every step."""
    seed: Annotated[Count, NO_MEMORY] = 42
    """Seed of initial weights, data order and dropout."""
    output_dir: Annotated[NoURL | None, FREE] = None
    """Run folder. Unset: `runs/<recipe>`, numbered when taken."""
    fallback_dir: Annotated[str | None, FREE] = None
    """Folder on another disk for checkpoints and the export if they cannot be written to the run folder, for example on
    a full disk. Unset: the run ends in that case. Costs disk, no memory."""
    run_name: Annotated[str | None, FREE] = None
    """Name shown by trackers. Unset: the run folder's name."""
    tracker_project: Annotated[str | None, FREE, UsedUnless("training.trackers", ((),))] = None
    """Project (experiment, in MLflow) that trackers put the run into. Unset: its name."""
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(parse_sequence), FREE] = ()
    """Metric trackers in addition to `metrics.jsonl` (docs/trackers.md); each needs its package."""
    on_oom: Annotated[OnOutOfMemory, Facts(resume=Resume.FREE)] = OnOutOfMemory.STOP
    """`shrink` undoes a step that ran out of memory, halves the micro-batch and continues with the same global batch;
    costs a copy of the trained weights in host memory during the first update, and on several devices the overlap of
    the gradient reduction with backward. `stop` undoes the step, saves, and ends the run."""

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a pair of answers, two sequences of a batch."""
        return self.task.facts.compares_answers and self.preference.loss_type is not PreferenceLoss.KTO

    @property
    def sequences_per_row(self) -> int:
        """Sequences of a batch per row."""
        return 2 if self.has_pairs else 1

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs a reference model."""
        return self.task is Task.PREFERENCE and self.preference.loss_type not in WITHOUT_REFERENCE

    @property
    def asks_reference_once(self) -> bool:
        """Whether the reference's log-probabilities are computed once, before the first step."""
        return self.has_reference and self.preference.precompute_reference

    @property
    def exports_average(self) -> bool:
        """Whether averaged weights are evaluated and exported in place of the trained ones."""
        is_followed = self.ema_decay is not None and self.export_ema
        return is_followed or self.optimizer is Optimizer.SCHEDULE_FREE_ADAMW
