"""`plan --measure`: the real step on this machine, on synthetic tokens of the planned shape, in a fresh process.

Weights are random (their values do not change what a step costs), so nothing is downloaded.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.initialization import no_init_weights

from framework.build.assembly import Assembly, assemble
from framework.build.data.batches import full_batch
from framework.build.levers.allocator import choose_allocator
from framework.build.losses.loss import Batch
from framework.build.model.parts import causal_model
from framework.build.place import Place, real_place
from framework.build.resolve_model import settle
from framework.errors import OutOfMemory, Problem, RequestError
from framework.run.planning.python_process import python_command
from framework.run.record.meter import Meter
from framework.run.step import reference_step, train_step
from framework.schema.config import TrainingConfig

STEPS = 10
"""The first step creates optimizer states and picks kernels; the median of those after the second is reported."""


DRAWN = 1 << 20
"""Random numbers that the weights of a base in host memory repeat."""


@dataclass(frozen=True)
class Measured:
    """What one card really took, forward to optimizer step. Bytes and seconds."""

    device_name: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    step_seconds: float
    tokens_per_second: float
    phases: dict[str, int]
    loss: float
    torch_version: str = torch.__version__

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(config: TrainingConfig, steps: int = STEPS) -> Measured:
    """Run `steps` real optimizer steps of a config on the CUDA card of this machine.

    Raises RequestError without a card, OutOfMemory when the step does not fit.
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
    """The config built with random weights: also that of a model whose own config alone is read, from its folder or
    hub. Those in host memory repeat a short draw: processor cores take ten minutes to draw 8 billion."""
    settled, architecture = settle(config)
    config = _with_random_weights(settled)
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


def _with_random_weights(config: TrainingConfig) -> TrainingConfig:
    """The config that loads no weights, a teacher's neither."""
    unloaded, teacher = {"load_pretrained_weights": False}, config.training.teacher
    training = {"teacher": teacher.model_copy(update=unloaded)} if teacher is not None else {}
    changes = {
        "model": config.model.model_copy(update=unloaded),
        "training": config.training.model_copy(update=training),
    }
    return config.model_copy(update=changes)


def _measure(assembly: Assembly, batches: list[Batch], steps: int) -> Measured:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if assembly.config.training.asks_reference_once:  # a run asks before its first step, which leaves cached memory
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
    )


def synthetic_batches(assembly: Assembly) -> list[Batch]:
    """The micro batches of one worst step: every row as many random tokens as the longest, all supervised."""
    batch = assembly.config.batch
    return [_synthetic_batch(assembly, batch.per_device) for _ in range(batch.accumulation)]


def _synthetic_batch(assembly: Assembly, rows: int) -> Batch:
    config, device = assembly.config, assembly.place.device
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    return full_batch(config, torch.randint(0, vocabulary, (rows, config.longest), device=device))


def measure_in_subprocess(config: TrainingConfig) -> Measured:
    """`measure` in a fresh interpreter, so that nothing of this process sits on the card. Raises as `measure` does."""
    command = python_command("from framework.run.planning.measure import main; main()")
    done = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"measuring failed: {done.stderr.strip()[-2000:]}") from None
    if "errors" in document:
        raise RequestError([Problem(**problem) for problem in document["errors"]])
    if "out_of_memory" in document:
        raise OutOfMemory(document["out_of_memory"])
    return Measured(**document)


def main() -> None:
    """Read a resolved config as JSON on stdin, write what was measured as JSON on stdout."""
    try:
        document = measure(TrainingConfig.model_validate_json(sys.stdin.read())).to_json()
    except RequestError as error:
        document = {"errors": [problem.to_json() for problem in error.problems]}
    except OutOfMemory as error:
        document = {"out_of_memory": str(error)}
    print(json.dumps(document))
