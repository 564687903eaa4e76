"""`plan --measure` and `doctor --compare`: measure the real step on this machine in a fresh process, on synthetic
tokens of the planned shape, and compare it with its plan.

Weights are random (their values do not change the cost of a step), so nothing is downloaded.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from transformers.initialization import no_init_weights

from framework.activity import doing
from framework.build.assembly import Assembly, assemble
from framework.build.data.batches import full_batch
from framework.build.levers.allocator import choose_allocator
from framework.build.losses.loss import Batch
from framework.build.model.parts import causal_model
from framework.build.place import Place, real_place
from framework.build.resolve_model import settle
from framework.errors import OutOfMemory, Problem, RequestError
from framework.memory.cards import card_names, card_of_size, installed_cards, read_card
from framework.memory.ledger import Plan
from framework.memory.requirements import is_installed
from framework.run.planning.host_probe import probe_host, shares_of
from framework.run.planning.measurements import IS_LAST, Measured, Measurements
from framework.run.planning.plan_pool import Rehearsals
from framework.run.planning.server import end_with_client
from framework.run.record.meter import Meter
from framework.run.step import reference_step, train_step
from framework.schema.config import TrainingConfig

STEPS = 10
"""The first step creates optimizer states and selects kernels; the median of the steps after the second is reported."""
DRAWN = 1 << 20
"""Random numbers that weights in host memory repeat."""


def measure(config: TrainingConfig, steps: int = STEPS) -> Measured:
    """Run `steps` real optimizer steps of a config on the CUDA card of this machine.

    Raises RequestError without a card, OutOfMemory if the step does not fit.
    """
    if not torch.cuda.is_available():
        raise RequestError([Problem("--measure", "this machine has no CUDA card to measure on")])
    if config.context_size > 1:
        message = "one process has no rows to share with others"
        raise RequestError([Problem("--measure", message, expected="attn_implementation: sdpa")])
    if config.fsdp.tensor_parallel_size > 1:
        message = "one process has no matrices to share with others"
        raise RequestError([Problem("--measure", message, expected="fsdp.tensor_parallel_size: 1")])
    choose_allocator(config)
    place = real_place(torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(config.training.seed)
    try:
        assembly = assembled_at_random(config, place)
        return _measure(assembly, synthetic_batches(assembly), steps)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error).splitlines()[0]) from None


def assembled_at_random(config: TrainingConfig, place: Place) -> Assembly:
    """Build the config with random weights, also for a model of which only the config file is available. Weights in
    host memory repeat a short draw: CPU cores take ten minutes to draw 8 billion numbers."""
    settled, architecture = settle(config)
    unloaded, teacher = {"load_pretrained_weights": False}, settled.training.teacher
    training = {"teacher": teacher.model_copy(update=unloaded)} if teacher is not None else {}
    changes = {
        "model": settled.model.model_copy(update=unloaded),
        "training": settled.training.model_copy(update=training),
    }
    config = settled.model_copy(update=changes)
    if config.model.offload_frozen_base is not True:
        return assemble(config, architecture, place, total_steps=1000)
    with no_init_weights():
        assembly = assemble(config, architecture, place, total_steps=1000)
    drawn = 0.02 * torch.randn(DRAWN)
    with torch.no_grad():
        for weight in assembly.model.parameters():
            for part in torch.split(weight.view(-1), DRAWN):
                part.copy_(drawn[: len(part)])
    return assembly


def _measure(assembly: Assembly, batches: list[Batch], steps: int) -> Measured:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if assembly.config.training.asks_reference_once:  # as before a run's first step, which leaves cached memory
        reference_step(assembly, _synthetic_batch(assembly, assembly.config.eval_rows))
    meter, seconds = Meter(assembly.place), []
    for step in range(1, steps + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = train_step(assembly, batches, step, meter.observe)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    document = meter.document()
    median = statistics.median(seconds[2:] or seconds)
    return Measured(
        device_name=document["device_name"],
        allocated_bytes=meter.allocated,
        reserved_bytes=meter.reserved,
        device_bytes=document["device_bytes"],
        step_seconds=median,
        tokens_per_second=result.tokens / median,
        phases={phase: peak for phase, peak in meter.phases.items() if phase != "load"},
        loss=result.loss,
        torch_version=torch.__version__,
    )


def synthetic_batches(assembly: Assembly) -> list[Batch]:
    """The micro-batches of a worst-case step: random tokens, every row of maximum length, all tokens supervised."""
    batch = assembly.config.batch
    return [_synthetic_batch(assembly, batch.per_device) for _ in range(batch.accumulation)]


def _synthetic_batch(assembly: Assembly, rows: int) -> Batch:
    config, device = assembly.config, assembly.place.device
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    return full_batch(config, torch.randint(0, vocabulary, (rows, config.longest), device=device))


def serve() -> None:
    """Answer each line of stdin, a resolved config as JSON, with its measurement on stdout; `null` with itself."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers
    gc.freeze()
    for line in sys.stdin:
        if (document := json.loads(line)) is not None:
            # torchao, which transformers imports, may start CUDA, which forks could not use
            has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            document = {**_answer(document), IS_LAST: True} if has_started else _measured_in_fork(document)
        print(json.dumps(document), file=answers, flush=True)


def _measured_in_fork(config: Mapping[str, Any]) -> dict[str, Any]:
    """The answer for a config."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            with os.fdopen(writes, "w") as answer:
                json.dump(_answer(config), answer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:  # it printed nothing, and the last line is reported
        print(f"its process was ended by signal {-code}", file=sys.stderr, flush=True)
    return json.loads(text) if text else {"fault": f"its process ended: {code}"}


def _answer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, measured in this process, which ends early if nobody waits for it."""
    end_with_client()
    try:
        return measure(TrainingConfig.model_validate(config)).to_json()
    except RequestError as error:
        return {"errors": [problem.to_json() for problem in error.problems]}
    except OutOfMemory as error:
        return {"out_of_memory": str(error)}


COMPARED_MODEL: Mapping[str, Any] = {
    "load_pretrained_weights": False,
    "architecture": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
"""A model of a quarter billion weights, with which every step below fits into 8 GB."""

COMPARED: Mapping[str, Mapping[str, Any]] = {
    "full": {"training": {"per_device_train_batch_size": 2}, "model": {"model_max_length": 1024}},
    "checkpointed": {
        "training": {"per_device_train_batch_size": 4, "enable_gradient_checkpointing": True},
        "model": {"model_max_length": 1024},
    },
    "few tokens": {"training": {"per_device_train_batch_size": 1}, "model": {"model_max_length": 128}},
    "adapter": {"training": {"per_device_train_batch_size": 4, "use_peft": True}, "model": {"model_max_length": 1024}},
    "compiled": {
        "training": {"per_device_train_batch_size": 4, "compile": True},
        "model": {"model_max_length": 1024},
    },
}


@dataclass(frozen=True)
class Compared:
    """Relative errors of a step's plan (planned / measured - 1); None for a step that did not fit."""

    name: str
    fits: bool = False
    allocated: float | None = None
    used: float | None = None
    seconds: float | None = None
    """None also if the card's rates are unknown."""

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        errors = ("-" if error is None else f"{error:+.1%}" for error in (self.allocated, self.used, self.seconds))
        return (self.name, *(errors if self.fits else ["did not fit"] * 3))


def compare(measured: Measurements) -> tuple[str, list[Compared]]:
    """Plan and measure some steps on the card. Returns its name and the comparisons.

    Raises RequestError without a card, or with one that is too old for a plan.
    """
    cards = installed_cards()
    if not cards or not torch.cuda.is_available() or (name := cards[0].name) is None:
        raise RequestError([Problem("--compare", "this machine has no CUDA card that plans are made for")])
    facts = read_card(name) if name in card_names() else card_of_size(name)
    found = [_measured(name, config, measured) for name, config in _configs(facts or {}).items()]
    # Last, since it uses dynamo, which asks for the card's current stream and so creates a context in this process
    host = shares_of(probe_host()).model_dump()
    configs = _configs({**(facts or {}), "host": host})
    with Rehearsals() as rehearsals:
        plans = rehearsals.plans([*configs.values()])
    return cards[0].product, [_compared(*row) for row in zip(configs, plans, found, strict=True)]


def _configs(card: Mapping[str, Any]) -> dict[str, TrainingConfig]:
    compiles = is_installed("triton")
    return {
        name: TrainingConfig.model_validate(
            {
                "gpu": card,
                "training": {"mixed_precision_dtype": "bf16", "max_steps": 10, **step["training"]},
                "model": {**COMPARED_MODEL, **step["model"]},
            }
        )
        for name, step in COMPARED.items()
        if compiles or name != "compiled"
    }


def _measured(name: str, config: TrainingConfig, measured: Measurements) -> Measured | None:
    """The measurement of a step, None if it does not fit."""
    try:
        with doing(f"measuring the step `{name}`"):
            return measured(config)
    except OutOfMemory:
        return None


def _compared(name: str, plan: Plan, found: Measured | None) -> Compared:
    if found is None:
        return Compared(name)
    use = plan.step_peak
    return Compared(
        name,
        True,
        use.allocated_bytes / found.allocated_bytes - 1,
        use.device_bytes / found.device_bytes - 1,
        None if plan.step is None else plan.step.seconds / found.step_seconds - 1,
    )


def summary(rows: Sequence[Compared], device_name: str) -> str:
    """One line: card, versions, and the relative errors of each step (allocated, used, seconds)."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    steps = "; ".join(f"{row.name} {' '.join(row.cells()[1:])}" for row in rows)
    return f"{device_name}, {packages}: {steps}"
