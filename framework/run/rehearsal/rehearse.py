"""Rehearsal: the same assembly and step as in training, run on tensors without storage and recorded.

`rehearse` patches torch while it runs, so it is called in separate processes (`framework.run.planning.plan_pool`).
"""

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from framework.build.assembly import Assembly, assemble
from framework.build.data.batches import full_batch
from framework.build.launches import listening
from framework.build.levers.activations import keeps
from framework.build.losses.loss import Batch, Observe
from framework.build.losses.router_loss import describe_routers
from framework.build.model.heads import describe_answers, reads_both_ways
from framework.build.place import Place, rehearsal_place
from framework.build.ranks import ALONE, Ranks, local_part
from framework.build.refuse import refuse_impossible
from framework.build.resolve_model import settle
from framework.build.tasks import describe_frozen_model
from framework.errors import Problem, RequestError
from framework.memory.host_use import CARDS_A_MACHINE
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.memory.resolve import describe_float16
from framework.memory.trace import Kind, Rehearsal, Space, Trace
from framework.run.components import MOST_BATCHES, Input, components_step
from framework.run.evaluate import completion_step, evaluate
from framework.run.rehearsal.fake_device import fake_device
from framework.run.rehearsal.footprint import placed_states, read_footprint, record_load, state_tensors
from framework.run.rehearsal.tracker import Tracker
from framework.run.state import copied_to_host, trained_state
from framework.run.step import keep_nothing, reference_step, train_step
from framework.schema.choices import CheckpointingPolicy, OnOutOfMemory
from framework.schema.config import TrainingConfig

if TYPE_CHECKING:  # otherwise a plan without compilation would load torch's compiler
    from framework.run.rehearsal.compiled_blocks import Kept

REHEARSED_MICRO_BATCHES = 2
"""The first micro-batch creates the gradients, the second adds to them; all others are like the second."""


def rehearse(config: TrainingConfig) -> Plan:
    """Plan a composed config, per device. Raises RequestError for problems that show only in the built model."""
    return make_plan(record(config))


def record(config: TrainingConfig, kept: "Kept | None" = None) -> Rehearsal:
    """Build a config without storage and record evaluation and two of its steps.

    `kept` holds compiled blocks captured by earlier rehearsals; new ones are added.
    """
    refuse_impossible(config, devices="any")
    config, architecture = settle(config)
    place = rehearsal_place("cpu" if config.gpu.name == "cpu" else "cuda")
    vocabulary = architecture.get_text_config().vocab_size
    # Whether some micro-batch has a row of several documents.
    rows = max(config.batch.per_device, config.eval_rows)
    joins_rows = config.data.packing or (config.data.padding_free and rows > 1)
    is_masked = joins_rows or (config.training.task.facts.is_of_rows and reads_both_ways(architecture))
    tracker = Tracker(config.gpu, vocabulary=vocabulary, padded=is_masked)
    is_compiled, is_adapted = config.training.compile is True, config.training.use_peft
    if is_adapted:  # also before torch is patched
        from framework.build.verify.adapter import describe_adapter
    if is_compiled:  # before torch.cuda is patched, since the import queries it; takes seconds
        from framework.run.rehearsal import compiled_blocks
    ranks = rehearsed_ranks(config)
    several: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ranks.world > 1:
        from framework.run.rehearsal.fake_ranks import fake_ranks

        several = fake_ranks(config.gpu, ranks.world, tracker, config.fsdp.is_on_host)
    launches, launched = _launches_of_liger(config, tracker)
    own = listening(tracker.record_launch)
    with _no_garbage_collection(), fake_device(config.gpu) as mode, several, launches, own:
        with torch.device(place.device):  # so that adapters also have no storage
            assembly = assemble(config, architecture, place, config.training.max_steps or 1000, ranks)
        mode.autocast.on_weight_cast = lambda copy: tracker.claim([copy], Kind.AUTOCAST_COPIES)
        mode.on_empty_cache, mode.on_wait = tracker.note_emptied_cache, tracker.note_wait
        blocks = None
        if is_compiled:
            blocks = compiled_blocks.plan_compiled_blocks(assembly, mode, tracker, {} if kept is None else kept)
        record_load(tracker, assembly)
        with tracker, _noted_modules(tracker):
            if config.is_replicated:
                _hold_gradients(assembly)
            _run(tracker, assembly)
        tracker.observe("save")
        footprint = read_footprint(assembly)
        trace = tracker.finish()
    _refuse_idle_policy(config, trace)
    if assembly.context is not None and not assembly.context.calls:
        message = f"{architecture.model_type} does not support other attention implementations"
        raise RequestError([Problem("model.attn_implementation", message, expected="sdpa, or leave it unset")])
    micro_batches = min(config.batch.accumulation, REHEARSED_MICRO_BATCHES)
    read_values = tuple(sorted({*mode.read_values, *tracker.read_values}))
    warnings = assembly.adapter.warnings if assembly.adapter is not None else ()
    planned = blocks.notes if blocks is not None else ()
    covered = describe_adapter(assembly) if is_adapted else ()
    split = tuple(map(str, filter(None, (assembly.tensor, assembly.sharding))))
    notes = (*split, *map(str, assembly.frozen), *covered, *planned, *launched, *describe_answers(config, architecture))
    notes += (*describe_frozen_model(config, assembly.frozen_model), *describe_routers(config, architecture))
    notes += describe_float16(config, architecture.get_text_config().to_dict())
    return Rehearsal(config, trace, footprint, micro_batches, read_values, notes, warnings)


def _launches_of_liger(
    config: TrainingConfig, tracker: Tracker
) -> tuple[contextlib.AbstractContextManager[None], tuple[str, ...]]:
    """What notes the launches of Liger's kernels in `tracker`, and the plan's assumption about them."""
    if config.model.enable_liger_kernel is not True:
        return contextlib.nullcontext(), ()
    from framework.run.rehearsal.triton_launches import NOTE, noted_launches

    return noted_launches(tracker.record_launch), (NOTE,)


def rehearsed_ranks(config: TrainingConfig) -> Ranks:
    """Rank 0 under sharding or context parallelism. Plain data parallelism is rehearsed as a single process."""
    world, is_split = config.gpu.count, config.fsdp.is_sharded or config.sharing > 1
    return Ranks(world=world, local_world=min(world, CARDS_A_MACHINE)) if is_split and world > 1 else ALONE


def _hold_gradients(assembly: Assembly) -> None:
    """Allocate the gradient buckets of data parallelism, in which gradients then live."""
    if assembly.buckets is not None:
        assembly.buckets.hold()
        return
    for parameter in assembly.trained:
        parameter.grad = torch.zeros_like(parameter)


def _refuse_idle_policy(config: TrainingConfig, trace: Trace) -> None:
    """Raise RequestError for a checkpointing policy that would save nothing, because on this card attention consists of
    small operators."""
    training, policy = config.training, CheckpointingPolicy(config.training.gradient_checkpointing_policy)
    if training.enable_gradient_checkpointing is not True or policy is CheckpointingPolicy.FULL:
        return
    if not any(keeps(policy, operation.name) for operation in trace.operations):
        message = f"{policy} keeps nothing: attention runs on {config.gpu.name} as many small operators"
        key = "training.gradient_checkpointing_policy"
        raise RequestError([Problem(key, message, expected="save_matmuls, full, or half precision")])


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, whose random moments would move the deaths of tensors."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _noted_modules(tracker: Tracker) -> Iterator[None]:
    """Report each call of a module to the tracker within the block. Not by hooks, which would also run while compiled
    blocks are captured."""
    call = torch.nn.Module._call_impl

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracker.note_module()
        return call(module, *args, **kwargs)  # type: ignore[no-untyped-call]

    torch.nn.Module._call_impl = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module._call_impl = call  # type: ignore[method-assign]


def _run(tracker: Tracker, assembly: Assembly) -> None:
    """Record a start from rows, an evaluation, three steps, an evaluation. The first step creates the optimizer's
    states, the second starts with the cached blocks of the first, the third with those of a step like itself, as all
    later ones do. If the cache is emptied at intervals, a step after that follows.

    Only the first of each is executed and then repeated in the trace, without what it has created permanently
    (tests/run/rehearsal/test_rehearse.py compares a repeated step with a real second one).
    """

    def observe(phase: str) -> None:
        if phase == "optimizer_step":
            gradients = [parameter.grad for parameter in assembly.trained if parameter.grad is not None]
            tracker.claim(gradients, Kind.GRADIENTS)
        if phase == "end":
            for tensor, space in placed_states(assembly):
                if space is Space.DEVICE:
                    tracker.claim([tensor], Kind.OPTIMIZER)
                else:
                    tracker.claim_elsewhere(tensor, Kind.OPTIMIZER, space)
        tracker.observe(phase)

    marks, config = tracker.trace.marks, assembly.config
    if config.starts_from_rows:
        _start_from_rows(tracker, assembly)
    if config.training.asks_reference_once:
        reference_step(assembly, make_batch(assembly, config.eval_rows), observe)
        observe("end")
    before = len(marks) - 1
    if config.data.eval or config.data.eval_fraction:
        evaluate(assembly, [make_batch(assembly, config.eval_rows)], observe)
        observe("end")
    if config.training.sample_prompts:
        completion_step(
            assembly, torch.zeros((1, config.longest), dtype=torch.int64, device=assembly.place.device), observe
        )
        observe("end")
    evaluated = len(marks) - 1
    _step(tracker, assembly, observe)
    observe("end")
    stepped = len(marks) - 1
    is_copied = config.training.async_save and assembly.place.kind == "cpu"
    copies = _copies_of_a_save(tracker, assembly) if is_copied else ()
    tracker.trace.repeat(evaluated, stepped)
    tracker.trace.repeat(evaluated, stepped)
    if assembly.place.kind == "cuda" and (assembly.cache.steps or 1) > 1:
        tracker.note_emptied_cache()  # the next step starts with an empty cache
        tracker.trace.repeat(evaluated, stepped)
    tracker.trace.repeat(before, evaluated)
    del copies  # with the last save


def _start_from_rows(tracker: Tracker, assembly: Assembly) -> None:
    """Record the passes of `peft.lora_init: eva`, with as many micro-batches as they keep on the device at most. The
    run empties the cache after them, when it has tried the longest rows."""
    batches = [make_batch(assembly, assembly.config.batch.per_device) for _ in range(MOST_BATCHES)]
    add = Input.add

    def added(item: Input, states: torch.Tensor) -> None:
        # The decomposition asks whether it has begun, which only changes what it checks.
        with patch.multiple(tracker, padded=True, read_values=[]):
            add(item, states)

    with patch.object(Input, "add", added):
        components_step(assembly, batches[0], tracker.observe)
    del batches
    if assembly.place.kind == "cuda":
        tracker.note_emptied_cache()
    tracker.observe("end")


def _copies_of_a_save(tracker: Tracker, assembly: Assembly) -> list[torch.Tensor]:
    """Copies made by a save during training, which stay in host memory; recorded if that is the device's memory."""
    tracker.observe("save")
    weights, states = trained_state(assembly.model).values(), state_tensors(assembly)
    copies = _copied(tracker, map(local_part, weights), Kind.WEIGHTS, assembly.place)
    copies += _copied(tracker, states, Kind.OPTIMIZER, assembly.place)
    tracker.observe("end")
    return copies


def _copied(tracker: Tracker, tensors: Iterable[torch.Tensor], kind: Kind, place: Place) -> list[torch.Tensor]:
    """Record copies in host memory, which on the CPU is the device's."""
    copies = copied_to_host(tensors, place)
    if place.kind == "cpu":
        tracker.claim(copies, kind)
    else:
        for copy in copies:
            tracker.claim_elsewhere(copy, kind, Space.HOST)
    return copies


def _step(tracker: Tracker, assembly: Assembly, observe: Observe) -> None:
    config, place = assembly.config, assembly.place
    micro_batches = [make_batch(assembly, config.batch.per_device) for _ in range(config.batch.accumulation)]
    copies: list[torch.Tensor] = []

    def before_update() -> None:
        """Record the copy of the weights for undoing a first update, which lives until the step ends."""
        copies.extend(_copied(tracker, assembly.trained, Kind.WEIGHTS, place))

    keep = before_update if config.training.on_oom is OnOutOfMemory.SHRINK else keep_nothing
    train_step(assembly, micro_batches[:REHEARSED_MICRO_BATCHES], 1, observe, keep)


def make_batch(assembly: Assembly, rows: int) -> Batch:
    """The largest micro-batch: every row of maximum length."""
    shape, device = (rows, assembly.config.longest), assembly.place.device
    return full_batch(assembly.config, torch.zeros(shape, dtype=torch.int64, device=device))
