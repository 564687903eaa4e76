"""From the record of a rehearsal to its `Plan`: replay, terms, time, host and disk. Arithmetic only; no torch."""

from collections.abc import Iterator, Sequence, Set

from framework.memory.allocator import CachingAllocator, Peak, SystemAllocator, replay
from framework.memory.cards import assumptions as card_assumptions
from framework.memory.cards import context_of
from framework.memory.ledger import (
    PHASES,
    STEP_PHASES,
    UNCERTAINTY,
    Band,
    BatchUse,
    Device,
    HostUse,
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
    LoraInit,
    MixedPrecision,
    OptimizerOffload,
    StateDictType,
    TorchDtype,
)
from framework.schema.config import TrainingConfig
from framework.schema.evaluation import steps_between
from framework.schema.optimizers import facts_of
from framework.schema.peft import EVA_PASSES
from framework.schema.plural import counted

MIB, GIB = 1 << 20, 1 << 30
HOST_BASE_BYTES = 2500 * MIB
"""Resident memory of a process with torch, transformers and a CUDA context, before any model. An upper estimate; not
measured on a GPU machine yet."""
NCCL_BYTES = 842 * MIB
"""What NCCL holds next to torch's allocator: two H200 over NVLink, torch 2.11, 2026-11-28 (benchmarks/results/
sharded_h200.json). Each further communicator (a mesh of two dimensions) has buffers of its own, which are not known."""
WORKER_BYTES = 200 * MIB
"""What a process of `data.workers` adds: it shares all with its parent until it is touched. 11 MiB at first, 146 after
its garbage collector ran (torch 2.13, transformers 5.24, Linux, 2026-11); a block of a stream comes on top."""
CARDS_A_MACHINE = 8
"""How many cards of a plan are taken to share a machine: its host memory, and what a hybrid strategy splits over."""
CHUNK = 1024
"""Tokens of a chunk of the loss unless stated otherwise (DEFAULT_CHUNK in framework/build/losses/loss.py; a test
compares)."""
PACKAGED_ATTENTION = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Kernels that a rehearsal carries out with another of the same memory (framework/run/rehearsal/fake_functions.py)."""
_MATHEMATICAL = "_safe_softmax"
"""The operator that shows that sdpa has found no fused kernel."""
LARGEST_FILE = 5 * 10**9
"""What the first rank's host gathers of a sharded export at a time (framework/run/checkpoints/sharded_export.py)."""
UNATTRIBUTED_LIMIT = 0.01
"""Share of the peak that may be of unknown purpose before the plan warns."""

_MEASURED_CAPABILITY = "9.0"


def replayed(rehearsal: Rehearsal) -> list[Peak]:
    """The peaks of each phase in torch's allocator: the same on every card that runs the same kernels."""
    traces = (rehearsal.trace, resume_trace(rehearsal.footprint))
    return [peak for trace in traces for peak in replay(trace, new_allocator(rehearsal.config)) if peak.phase in PHASES]


def make_plan(rehearsal: Rehearsal) -> Plan:
    """What the rehearsed run costs on its card, per device."""
    return plan_of_peaks(rehearsal, replayed(rehearsal))


def plan_of_peaks(rehearsal: Rehearsal, peaks: Sequence[Peak]) -> Plan:
    """The same, from peaks that were `replayed` before, perhaps for another card."""
    config, footprint = rehearsal.config, rehearsal.footprint
    card = config.gpu
    # NCCL holds a communicator of all devices and one of those that share rows; and where there are several groups
    # that share matrices, one of each group and one of those with the same parts.
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
    first, host = _host_use(rehearsal, peaks)
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
        warnings=(*rehearsal.cautions, *_warnings(config, peak)),
        host=host,
        shards=shard_dtypes(config),
    )


def new_allocator(config: TrainingConfig) -> CachingAllocator:
    """The allocator that serves a run on its card, empty."""
    if config.gpu.name == "cpu":
        return SystemAllocator()
    settings = config.training.allocator
    largest = settings.max_split_size_mb
    return CachingAllocator(
        expandable_segments=settings.expandable_segments is True,
        max_split_size=largest * MIB if isinstance(largest, int) else None,
    )


def resume_trace(footprint: Footprint) -> Trace:
    """The load of a checkpoint: its weights arrive whole next to the model's, are copied, and then the states arrive.

    Follows `load_checkpoint` in framework/run/checkpoints/checkpoint.py. Parts of weights are read on the host, into
    their place.
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
    """The class of uncertainty that the run falls in, by its settings and by the names of the operators that run."""
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
    is_packed = config.training.use_peft and config.peft.q_lora and config.peft.q_lora_bits == 8
    return is_packed or (teacher is not None and teacher.bits == 8)


def _host_use(rehearsal: Rehearsal, peaks: Sequence[Peak]) -> tuple[int, HostUse]:
    """Host memory of the first process, and of all of a machine.

    A load streams one tensor at a time, unless something is made of the whole model first or the first process sends it
    to all. A save holds what it writes, next to a base that stays there; one during training holds copies during steps,
    which on the CPU are in the peaks.
    """
    config, footprint = rehearsal.config, rehearsal.footprint
    process, processes = HOST_BASE_BYTES + config.data.workers * WORKER_BYTES, min(config.gpu.count, CARDS_A_MACHINE)
    on_cpu = config.gpu.name == "cpu"
    load = max((peak.host + on_cpu * peak.reserved for peak in peaks if peak.phase == "load"), default=0)
    other = max(load, *(peak.reserved if on_cpu else peak.host for peak in peaks))
    first = max(other, load + footprint.sent_bytes)
    pinned = 0
    if not on_cpu:
        base, (of_first, of_each) = sum(footprint.home_sizes), _saved_on_host(rehearsal)
        training, (copied, copied_each) = max(peak.host for peak in peaks), _copied_beside_training(rehearsal)
        other = max(other, training + copied_each, max(footprint.weight_sizes, default=0), base + of_each)
        first = max(first, other, training + copied, base + of_first)
        pinned = max(peak.pinned for peak in peaks) + (base if config.model.offload_frozen_base is True else 0)
    host = HostUse(processes, process + other, pinned, processes * load + footprint.sent_bytes)
    return process + first, host


def _saved_on_host(rehearsal: Rehearsal) -> tuple[int, int]:
    """What is on the host while the run saves: of the first process, which exports, and of each other."""
    config, footprint = rehearsal.config, rehearsal.footprint
    is_asynchronous = config.training.async_save
    if footprint.shards == 1:
        written = max(sum(footprint.trained_sizes), sum(footprint.state_sizes))  # one file after the other
        return max(footprint.export_bytes, 0 if is_asynchronous else written), 0
    exported = min(footprint.export_bytes, LARGEST_FILE)
    if config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT:
        return max(exported, 0 if is_asynchronous else footprint.checkpoint_bytes), 0
    is_there = config.fsdp.is_on_host or is_asynchronous
    own = 0 if is_there else sum(footprint.trained_sizes) + sum(footprint.state_sizes)
    return max(exported, own), own


def _copied_beside_training(rehearsal: Rehearsal) -> tuple[int, int]:
    """Copies that stay on the host from one save to the next: of the first process, and of each other."""
    config, footprint = rehearsal.config, rehearsal.footprint
    if not config.training.async_save:
        return 0, 0
    own = sum(footprint.trained_sizes) + sum(footprint.state_sizes)
    if footprint.shards == 1:
        return own, 0
    is_whole = config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT
    return (footprint.checkpoint_bytes, 0) if is_whole else (own, own)


def _disk_bytes(config: TrainingConfig, footprint: Footprint) -> int:
    """Checkpoints at their most numerous (one more than are kept, while the newest is written) and the export."""
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
    """In which numbers the run holds and computes, also where the recipe leaves it open."""
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
    said = [
        f"every {'answer' if config.training.has_pairs else 'row'} is {batch.sequence_length} tokens long, "
        + counted(batch.per_device, "pair" if config.training.has_pairs else "row")
        + " a forward pass: nothing is padded",
        *_packing(config),
        _precision(config),
        f"band ({band}): {UNCERTAINTY[band].source}",
        *card_assumptions(config.gpu),
    ]
    if config.gpu.name == "cpu":
        said.append("cpu: bytes are what tensors take of the process's resident memory; libraries come on top")
    said += _among_devices(config, batch)
    said += rehearsal.said
    kernels = (name for name in operators if "attention" in name and not name.endswith("backward"))
    forward = sorted(name.strip("_") for name in kernels)
    forward += ["math"] if _MATHEMATICAL in operators else []
    said += [f"attention runs as {name}" for name in forward]
    if config.training.sample_prompts:
        said.append(
            f"samples are written one at a time, at most {batch.sequence_length:,} tokens long with their prompts"
        )
    if config.training.use_peft and config.peft.lora_init is LoraInit.EVA and config.peft.adapter_path is None:
        said.append(f"peft.lora_init eva: its passes over rows, at most {EVA_PASSES} before step 1, are not planned")
    if config.training.ema_decay is not None and config.training.ema_device is EmaDevice.HOST:
        said.append("step time: the host moves the average after each step, at the rate of two threads")
    if config.model.attn_implementation in PACKAGED_ATTENTION:
        said.append(f"{config.model.attn_implementation} is planned as torch's flash kernel, which keeps the same")
    if config.training.gradient_checkpointing_policy is not CheckpointingPolicy.FULL:
        said.append("step time: what a checkpoint's policy costs in Python is left out; the step takes longer")
    if config.training.optimizer_offload is OptimizerOffload.NVME:
        said.append("step time: the disk's own time is left out; the step takes longer")
    if _has_int8_weights(config):
        said.append("step time: LLM.int8's search for large columns is left out; steps took 1.7 and 1.9 times as long")
    if config.training.fp8 is not Fp8.NONE:
        said.append("fp8: the run's own layers are rehearsed; the rate of their products is that of a data sheet")
    if config.gpu.fp32_flops is not None and config.gpu.capability not in (None, _MEASURED_CAPABILITY):
        said.append("step time: shares of the data sheet's rates as measured on an H100 and an H200")
    if config.gpu.host is None and config.gpu.fp32_flops is not None:
        said.append("step time: the mean over hosts of three speeds; `tunesmith doctor --calibrate` measures this one")
    if (steps := config.training.empty_device_cache_steps) is not None and config.gpu.name != "cpu":
        every = "step" if steps == 1 else f"{steps} steps"
        said.append(f"the cache is emptied every {every}: what is allocated at the peak is the same")
    if config.model.load_pretrained_weights and config.gpu.name != "cpu":
        said.append("files are mapped while they load: the system may take their pages back, host bytes leave them out")
    if streamed := rehearsal.footprint.streamed_bytes:
        said.append(f"{streamed / GIB:.2f} GiB of blocks cross the link a micro batch, next to the compute of others")
        if config.gpu.host_link_bytes_per_second is None:
            said.append("the rate of the link is not known: step time is without it")
    if config.training.allocator.garbage_collection_threshold is not None:
        said.append("garbage collection of cached blocks is not replayed: reserved is an upper end")
    if rehearsal.read_values:
        taken = "for several documents in a row" if config.data.joins_rows else "without padding"
        if config.training.task.is_of_rows:
            taken = "where a row of several is padded"
        said.append(f"values read on the host are taken to be as {taken}: {', '.join(rehearsal.read_values)}")
    return tuple(said)


def _among_devices(config: TrainingConfig, batch: BatchUse) -> Iterator[str]:
    """What is taken to be so where there are several."""
    if config.gpu.count == 1:
        return
    yield f"equal shares on {config.gpu.count} devices; {config.gpu.name} is the limit"
    if config.is_replicated:
        yield (
            f"each of the {config.gpu.count} devices holds all weights, gradients and states: copies share the rows of "
            "a step, and make nothing of this smaller; fsdp.enable_fsdp=true splits them"
        )
    if config.adds_up_after_backward:
        yield "gradients stay in buckets, and are exchanged when backward is done (training.on_oom: shrink)"
    elif config.is_replicated:
        yield "gradients stay in torch's DDP buckets, and are exchanged during backward"
    if config.context_size > 1:
        tokens = f"{batch.sequence_length // config.context_size:,} of {batch.sequence_length:,} tokens"
        yield f"each device has {tokens} of a row, and in each layer gathers keys and values of all of them"
    if (tensor := config.fsdp.tensor_parallel_size) > 1:
        yield "sums over the devices that share each matrix are waited for; steps of two H200 were planned within 10 %"
    if config.gpu.name != "cpu":
        yield f"NCCL takes {NCCL_BYTES / MIB:,.0f} MiB, as on two H200 with one communicator"
        if config.context_size > 1:
            yield "those that share rows have a communicator of their own, taken to need as much again"
        if 1 < tensor < config.gpu.count:
            yield "groups that share matrices, and those with the same parts, have one each, taken to be alike"
    if config.fsdp.is_on_host:
        yield "step time: the host's update is that of two threads a rank"
    if config.gpu.link_bytes_per_second is None:
        yield "the rate between two cards is not known: step time is without what they exchange"


def shard_dtypes(config: TrainingConfig) -> tuple[ShardDtypes, ...]:
    """As `framework.build.parallel.fsdp.precision` has them."""
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
    """What a packed row is taken to hold, which is the worst for memory and time alike."""
    kernel = config.model.attn_implementation or "sdpa"
    has_mask = kernel not in PACKAGED_ATTENTION
    if config.data.packing:
        cost = "a mask of rows x tokens x tokens, whatever their number" if has_mask else "no mask"
        yield f"each row is a pack, planned as one long document and one of a token: {cost} ({kernel})"
    if config.data.padding_free:
        cost = "a mask of all their tokens x all their tokens" if has_mask else "no mask"
        yield f"the rows of a forward pass are the documents of one, end to end: {cost} ({kernel})"


def _warnings(config: TrainingConfig, peak: PeakUse) -> tuple[str, ...]:
    """What the reader should do or know, most useful first."""
    said: list[str] = []
    terms = peak.terms.to_json()
    tokens, logits = tokens_of(config), peak.terms.logits_and_loss
    in_chunks = config.model.chunked_loss is not False or tokens <= CHUNK
    saved = 0 if in_chunks else logits - logits * CHUNK // tokens
    if saved and max(terms, key=lambda name: terms[name]) == "logits_and_loss":
        said.append(
            f"logits are the largest term of the peak: model.chunked_loss=true saves about {saved / GIB:.1f} GiB"
        )
    if peak.terms.unattributed > UNATTRIBUTED_LIMIT * peak.device_bytes:
        said.append(f"the purpose of {peak.terms.unattributed / MIB:,.0f} MiB at the peak is not known")
    return tuple(said)
