"""A card and a planner made of arithmetic, so that a search can be compared with brute force."""

from collections.abc import Sequence
from dataclasses import replace

from framework.memory.ledger import BatchUse, Device, PeakUse, PhaseUse, Plan, StepCost, Terms
from framework.memory.search.estimate import DEPTH_KEYS
from framework.schema.config import TrainingConfig

MIB = 1 << 20


class Arithmetic:
    """A `Measure` whose bytes are linear in layers and rows, and whose seconds rise with what is computed again.

    `calls` counts plans. Fixed bytes are 1000 MiB and 100 a layer; activations 50 a layer and row less what levers
    take; logits 200 a row. The unfused optimizer is 3 % slower.

    The host has 1000 MiB, 80 a layer for states and 10 a layer and row for activations.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.whole: list[TrainingConfig] = []

    def __call__(self, configs: Sequence[TrainingConfig]) -> list[Plan | None]:
        return [self.plan(config) for config in configs]

    def plan(self, config: TrainingConfig) -> Plan:
        self.calls += 1
        assert config.model.architecture is not None
        layers = next(int(config.model.architecture[key]) for key in DEPTH_KEYS if key in config.model.architecture)
        rows, training = config.batch.per_device, config.training
        kept, work = _kept(config)
        logits = 20 if config.model.chunked_loss else 200
        fixed = 1000 + layers * (60 if training.optimizer_offload == "host" else 100)
        fixed *= 0.5 if training.optimizer == "adamw_8bit" else 1
        fixed /= config.gpu.count if config.fsdp.is_sharded else 1
        allocated = int((fixed + rows * (layers * 50 * kept + logits)) * MIB)
        cached = allocated * (1.01 if training.allocator.expandable_segments else 1.10)
        seconds = 0.1 + config.batch.accumulation * (0.01 + rows * layers * 0.01 * work)
        seconds += 0.002 * rows * config.batch.accumulation if config.model.chunked_loss else 0
        seconds += layers * 0.05 if training.optimizer_offload == "host" else 0
        seconds *= 1.1 if config.fsdp.is_sharded else 1
        seconds *= 1.03 if training.optimizer == "adamw_torch" else 1
        host = (
            1000
            + layers * 80 * (training.optimizer_offload == "host")
            + rows * layers * 10 * training.activation_offload
        )
        return replace(make_plan(config, allocated, int(cached), seconds), host_bytes=int(host * MIB))


def _kept(config: TrainingConfig) -> tuple[float, float]:
    """Share of activations kept, and work relative to the plain model."""
    training = config.training
    kept, work = 1.0, 1.0
    if training.enable_gradient_checkpointing:
        every = int(training.gradient_checkpointing_every)
        kept, work = 0.1 / every + 1 - 1 / every, 1 + 0.33 / every
    if training.activation_offload:
        kept, work = kept * 0.2, work * 1.5
    if training.compile:
        kept, work = kept * float(training.activation_memory_budget or 1) * 0.8, work * 0.8
        work += 0.1 if training.activation_memory_budget else 0
    return kept, work


def make_plan(config: TrainingConfig, allocated: int, upper: int, seconds: float) -> Plan:
    """A plan with one phase and these figures."""
    card, batch = config.gpu, config.batch
    terms = Terms(weights=allocated, fragmentation=upper - allocated)
    peak = PeakUse("backward", allocated, upper, 0, upper, upper, terms)
    length = 128
    tokens = batch.per_device * batch.accumulation * length
    return Plan(
        device=Device(card.name, card.count, card.capacity_bytes, card.usable_bytes),
        peak=peak,
        step_peak=peak,
        phases=(PhaseUse("backward", allocated, upper, terms),),
        host_bytes=0,
        disk_bytes=0,
        checkpoint_bytes=0,
        step=StepCost(seconds, tokens / seconds, 0, "compute"),
        run_hours=None,
        batch=BatchUse(batch.per_device, batch.accumulation, batch.world, length),
        total_parameters=1,
        trainable_parameters=1,
        assumptions=(),
        warnings=(),
    )
