"""Conversion of a rehearsal's record to a `Plan`: replay, terms, time, host and disk. Arithmetic only; no torch."""

from collections.abc import Iterator, Sequence, Set

from framework.memory.allocator import CachingAllocator, Peak, SystemAllocator, replay
from framework.memory.bands import UNCERTAINTY, Band
from framework.memory.cards import assumptions as card_assumptions
from framework.memory.cards import context_of
from framework.memory.host_use import host_use
from framework.memory.ledger import (
    PHASES,
    STEP_PHASES,
    BatchUse,
    Device,
    PeakUse,
    Plan,
    ShardDtypes,
    peak_use,
    phase_uses,
)
from framework.memory.requirements import decomposes
from framework.memory.step_time import batch_use, step_cost, tokens_of
from framework.memory.trace import Footprint, Kind, Rehearsal, Space, Trace
from framework.memory.workspace import CUSOLVER_CONTEXT
from framework.schema.choices import (
    CheckpointingPolicy,
    EmaDevice,
    Fp8,
    MixedPrecision,
    OptimizerOffload,
    TorchDtype,
)
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import steps_between
from framework.schema.heads import DEFAULT_CHUNK
from framework.schema.optimizers import facts_of
from framework.schema.plural import counted

MIB, GIB = 1 << 20, 1 << 30
NCCL_BYTES = 842 * MIB
"""Memory of NCCL outside torch's allocator: two H200 over NVLink, torch 2.11, 2026-11-28 (benchmarks/results/
sharded_h200.json). Buffers of further communicators (a mesh of two dimensions) were not measured."""
PACKAGED_ATTENTION = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Kernels that a rehearsal replaces by another with equal memory (framework/run/rehearsal/fake_functions.py)."""
_MATHEMATICAL = "_safe_softmax"
"""The operator that occurs if sdpa found no fused kernel."""
UNATTRIBUTED_LIMIT = 0.01
"""Unattributed share of the peak above which the plan warns."""

_MEASURED_CAPABILITY = "9.0"


def replayed(rehearsal: Rehearsal) -> list[Peak]:
    """Peaks of each phase in torch's allocator, which are equal on all cards that run the same kernels."""
    traces = (rehearsal.trace, resume_trace(rehearsal.footprint))
    return [peak for trace in traces for peak in replay(trace, new_allocator(rehearsal.config)) if peak.phase in PHASES]


def make_plan(rehearsal: Rehearsal) -> Plan:
    """The plan of a rehearsed run on its card, per device."""
    return plan_of_peaks(rehearsal, replayed(rehearsal))


def plan_of_peaks(rehearsal: Rehearsal, peaks: Sequence[Peak]) -> Plan:
    """The plan from peaks that were `replayed` before, possibly for another card."""
    config, footprint = rehearsal.config, rehearsal.footprint
    card = config.gpu
    # NCCL holds one communicator of all devices and one for context parallelism; with several tensor-parallel groups
    # also one per group and one across groups.
    tensor, is_alone = config.fsdp.tensor_parallel_size, config.gpu.count == 1 or config.gpu.name == "cpu"
    communicators = 1 + (config.context_size > 1) + 2 * (1 < tensor < config.gpu.count)
    nccl = 0 if is_alone else NCCL_BYTES * communicators
    operators = {operation.name for operation in rehearsal.trace.operations}
    context = context_of(card) + nccl + (CUSOLVER_CONTEXT if decomposes(config, operators) else 0)
    band = choose_band(config, operators)
    uncertainty = UNCERTAINTY[band]
    step_peaks = [peak for peak in peaks if peak.phase in STEP_PHASES]
    peak = peak_use(peaks, context, uncertainty)
    step = step_cost(rehearsal)
    steps = config.training.max_steps
    first, host = host_use(rehearsal, peaks)
    return Plan(
        device=Device(card.name, card.count, card.capacity_bytes, card.usable_bytes),
        peak=peak,
        step_peak=peak_use(step_peaks, context, uncertainty),
        phases=phase_uses(peaks, context),
        host_bytes=first,
        disk_bytes=_disk_bytes(config, footprint),
        checkpoint_bytes=footprint.checkpoint_bytes,
        step=step,
        run_hours=step.seconds * steps / 3600 if step is not None and steps else None,
        batch=batch_use(config),
        total_parameters=footprint.total_parameters,
        trainable_parameters=footprint.trainable_parameters,
        assumptions=_assumptions(rehearsal, band, operators),
        warnings=(*rehearsal.warnings, *_warnings(config, peak)),
        host=host,
        shards=shard_dtypes(config),
    )


def new_allocator(config: TrainingConfig) -> CachingAllocator:
    """An empty allocator as configured for the run's card."""
    if config.gpu.name == "cpu":
        return SystemAllocator()
    settings = config.training.allocator
    largest = settings.max_split_size_mb
    return CachingAllocator(
        expandable_segments=settings.expandable_segments is True,
        max_split_size=largest * MIB if isinstance(largest, int) else None,
    )


def resume_trace(footprint: Footprint) -> Trace:
    """Trace of loading a checkpoint: its weights arrive in addition to the model's, are copied, then the states arrive.

    Follows `load_checkpoint` in framework/run/checkpoints/checkpoint.py. Shards are read on the host directly into
    place.
    """
    trace = Trace()
    trace.enter("resume")
    for size in footprint.weight_sizes:
        trace.bear(size, Kind.WEIGHTS)
    for size in footprint.home_sizes:
        trace.bear(size, Kind.WEIGHTS, Space.HOST)
    stored = [trace.bear(size, Kind.TEMPORARIES) for size in footprint.trained_sizes if footprint.shards == 1]
    for block in stored:
        trace.bury(block)
    for size, space in zip(footprint.state_sizes, footprint.state_spaces, strict=True):
        trace.bear(size, Kind.OPTIMIZER, space)
    return trace


def choose_band(config: TrainingConfig, operators: Set[str]) -> Band:
    """The run's uncertainty class, by its settings and the names of its operators."""
    if "convolution" in operators:
        return Band.CONVOLUTION
    if config.training.compile:
        return Band.COMPILED
    if facts_of(config.training.optimizer).package:
        return Band.LOW_BIT_OPTIMIZER
    if _has_int8_weights(config):
        return Band.INT8_BASE
    if config.gpu.capability != _MEASURED_CAPABILITY:
        return Band.UNMEASURED
    if config.context_size > 1:
        return Band.CONTEXT
    if config.fsdp.tensor_parallel_size > 1:
        return Band.TENSOR
    if config.fsdp.is_sharded:
        return Band.SHARDED
    return Band.MATHEMATICAL if _MATHEMATICAL in operators else Band.PLAIN


def _has_int8_weights(config: TrainingConfig) -> bool:
    teacher = config.training.teacher
    is_quantized = config.training.use_peft and config.peft.q_lora and config.peft.q_lora_bits == 8
    return is_quantized or (teacher is not None and teacher.bits == 8)


def _disk_bytes(config: TrainingConfig, footprint: Footprint) -> int:
    """Maximum disk use: the kept checkpoints, one more while the newest is written, and the export."""
    training = config.training
    saves = 1
    if training.save_steps:
        saves = training.save_total_limit + 1
        steps = steps_between(training.save_steps, training.max_steps or 0)
        if training.max_steps and steps:
            saves = min(saves, -(-training.max_steps // steps) + training.save_first)
    if training.best_metric:
        saves = training.save_total_limit + 2
    states = zip(footprint.state_sizes, footprint.state_spaces, strict=True)
    offloaded = sum(size for size, space in states if space is Space.DISK)
    return saves * footprint.checkpoint_bytes + footprint.export_bytes + offloaded


def _precision(config: TrainingConfig) -> str:
    """The dtypes of weights and computation, including derived ones."""
    held, adapter = config.model.torch_dtype_str, config.peft.adapter_dtype
    if not config.training.use_peft:
        weights = f"weights {held}"
    else:
        packed = f"quantized to {config.peft.q_lora_bits} bits, others " if config.peft.q_lora else ""
        dtype = "float32" if adapter is None else held if adapter is TorchDtype.AUTO else adapter
        weights = f"frozen weights {packed}{held}, adapter {dtype}"
    return f"precision: {weights}, autocast {config.training.mixed_precision_dtype}"


def _assumptions(rehearsal: Rehearsal, band: Band, operators: Set[str]) -> tuple[str, ...]:
    config, batch = rehearsal.config, batch_use(rehearsal.config)
    lines = [
        f"every {'answer' if config.training.has_pairs else 'row'} is {batch.sequence_length} tokens long, "
        + counted(batch.per_device, "pair" if config.training.has_pairs else "row")
        + " a forward pass: nothing is padded",
        *_packing(config),
        _precision(config),
        f"band ({band}): {UNCERTAINTY[band].source}",
        *card_assumptions(config.gpu),
    ]
    if config.gpu.name == "cpu":
        lines.append("cpu: bytes are those of tensors in the process's resident memory; libraries come in addition")
    lines += _among_devices(config, batch)
    lines += rehearsal.notes
    kernels = (name for name in operators if "attention" in name and not name.endswith("backward"))
    forward = sorted(name.strip("_") for name in kernels)
    forward += ["math"] if _MATHEMATICAL in operators else []
    lines += [f"attention runs as {name}" for name in forward]
    if config.training.sample_prompts:
        lines.append(
            f"samples are written one at a time, at most {batch.sequence_length:,} tokens long with their prompts"
        )
    if config.training.ema_decay is not None and config.training.ema_device is EmaDevice.HOST:
        lines.append("step time: the host updates the average after each step, at the rate of two threads")
    if config.model.attn_implementation in PACKAGED_ATTENTION:
        lines.append(
            f"{config.model.attn_implementation} is planned as torch's flash kernel, which saves the same tensors"
        )
    if config.training.gradient_checkpointing_policy is not CheckpointingPolicy.FULL:
        lines.append("step time: the Python cost of a checkpointing policy is not included; the step takes longer")
    if config.training.optimizer_offload is OptimizerOffload.NVME:
        lines.append("step time: the disk's own time is not included; the step takes longer")
    if _has_int8_weights(config):
        lines.append("step time: LLM.int8's search for outliers is not included; steps took 1.7 and 1.9 times as long")
    if config.training.fp8 is not Fp8.NONE:
        lines.append("fp8: the run's own layers are rehearsed; the rate of their products is the data sheet's")
    if config.gpu.fp32_flops is not None and config.gpu.capability not in (None, _MEASURED_CAPABILITY):
        lines.append("step time: shares of the data sheet's rates as measured on an H100 and an H200")
    if config.gpu.host is None and config.gpu.fp32_flops is not None:
        lines.append("step time: the mean over hosts of three speeds; `tunesmith doctor --calibrate` measures this one")
    if (steps := config.training.empty_device_cache_steps) is not None and config.gpu.name != "cpu":
        every = "step" if steps == 1 else f"{steps} steps"
        lines.append(f"the cache is emptied every {every}: allocated memory at the peak is the same")
    if config.model.load_pretrained_weights and config.gpu.name != "cpu":
        lines.append("files are mapped while they load: the system can reclaim their pages, host bytes exclude them")
    if streamed := rehearsal.footprint.streamed_bytes:
        lines.append(f"{streamed / GIB:.2f} GiB of blocks cross the link per micro-batch, overlapped with computation")
        if config.gpu.host_link_bytes_per_second is None:
            lines.append("the rate of the link is not known: step time does not include it")
    if config.training.allocator.garbage_collection_threshold is not None:
        lines.append("garbage collection of cached blocks is not replayed: reserved is an upper bound")
    if rehearsal.read_values:
        documents = "for several documents in a row" if config.data.joins_rows else "without padding"
        case = "for padded rows" if config.training.task.facts.is_of_rows else documents
        lines.append(f"values read on the host are assumed to be those {case}: {', '.join(rehearsal.read_values)}")
    return tuple(lines)


def _among_devices(config: TrainingConfig, batch: BatchUse) -> Iterator[str]:
    """Assumptions about several devices."""
    if config.gpu.count == 1:
        return
    yield f"equal shares on {config.gpu.count} devices; {config.gpu.name} is the limit"
    if config.is_replicated:
        yield (
            f"each of the {config.gpu.count} devices holds all weights, gradients and states: data parallelism splits "
            "the rows of a step only; fsdp.enable_fsdp=true shards the rest"
        )
    if config.adds_up_after_backward:
        yield "gradients stay in buckets, and are all-reduced after backward (training.on_oom: shrink)"
    elif config.is_replicated:
        yield "gradients stay in torch's DDP buckets, and are all-reduced during backward"
    if config.context_size > 1:
        tokens = f"{batch.sequence_length // config.context_size:,} of {batch.sequence_length:,} tokens"
        yield f"each device has {tokens} of a row, and gathers keys and values of all of them in each layer"
    if (tensor := config.fsdp.tensor_parallel_size) > 1:
        yield "all-reduces of tensor parallelism block the step; steps of two H200 were planned within 10 %"
    if config.gpu.name != "cpu":
        yield f"NCCL takes {NCCL_BYTES / MIB:,.0f} MiB, as on two H200 with one communicator"
        if config.context_size > 1:
            yield "context parallelism has a communicator of its own, assumed to need as much again"
        if 1 < tensor < config.gpu.count:
            yield "each tensor-parallel group, and each group across them, has one too, assumed to be equal"
    if config.fsdp.is_on_host:
        yield "step time: the host's update uses two threads per rank"
    if config.gpu.link_bytes_per_second is None:
        yield "the rate between two cards is not known: step time does not include communication"


def shard_dtypes(config: TrainingConfig) -> tuple[ShardDtypes, ...]:
    """Dtypes of sharded weights, as `framework.build.parallel.fsdp.precision` sets them."""
    if not config.fsdp.is_sharded:
        return ()
    held, adapter, peft = str(config.model.torch_dtype_str), config.peft.adapter_dtype, config.training.use_peft
    trained = held
    if peft:
        trained = held if adapter is TorchDtype.AUTO else str(adapter or TorchDtype.FLOAT32)
    names = {MixedPrecision.BF16: "bfloat16", MixedPrecision.FP16: "float16"}
    lower = names.get(MixedPrecision(config.training.mixed_precision_dtype or "none"))
    found = [ShardDtypes("trained", trained, lower or trained, "float32" if lower else trained, trained)]
    if peft and config.peft.q_lora:
        kind = f"{config.peft.q_lora_bits} bits"
        found.append(ShardDtypes("frozen, quantized", f"{kind} in {lower or held}", lower or held))
    if peft:
        found.append(ShardDtypes("frozen", held, lower or held))
    return tuple(found)


def _packing(config: TrainingConfig) -> Iterator[str]:
    """Assumptions about packed rows, which are the worst case for memory and time."""
    kernel = config.model.attn_implementation or "sdpa"
    has_mask = kernel not in PACKAGED_ATTENTION
    if config.data.packing:
        cost = "a mask of rows x tokens x tokens, whatever their number" if has_mask else "no mask"
        yield f"each row is a pack, planned as one long document and one of a single token: {cost} ({kernel})"
    if config.data.padding_free:
        cost = "a mask of all their tokens x all their tokens" if has_mask else "no mask"
        yield f"the rows of a forward pass are concatenated documents: {cost} ({kernel})"


def _warnings(config: TrainingConfig, peak: PeakUse) -> tuple[str, ...]:
    """Warnings for the reader, most useful first."""
    lines: list[str] = []
    terms = peak.terms.to_json()
    tokens, logits = tokens_of(config), peak.terms.logits_and_loss
    in_chunks = config.model.chunked_loss is not False or tokens <= DEFAULT_CHUNK
    saved = 0 if in_chunks else logits - logits * DEFAULT_CHUNK // tokens
    if saved and max(terms, key=lambda name: terms[name]) == "logits_and_loss":
        lines.append(
            f"logits are the largest term of the peak: model.chunked_loss=true saves about {saved / GIB:.1f} GiB"
        )
    if peak.terms.unattributed > UNATTRIBUTED_LIMIT * peak.device_bytes:
        lines.append(f"the purpose of {peak.terms.unattributed / MIB:,.0f} MiB at the peak is not known")
    return tuple(lines)
