"""Measurements of a run: peak memory by phase (the allocator's counters on a GPU, resident memory on the CPU), the
share of trained elements that change, and series to compare with the plan."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor

from framework.build.losses.loss import Batch
from framework.build.place import Place
from framework.build.ranks import local_part
from framework.memory.ledger import STEP_PHASES, Plan
from framework.memory.roofline import dense_rate
from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import facts_of


@dataclass
class Meter:
    """Memory peaks of a run in bytes. Pass `observe` to the step, which calls it when each phase begins.

    On the CPU a phase is measured at its end, where a step holds most; `baseline` is the process's memory before the
    model was built.
    """

    place: Place
    phases: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    reserved: int = 0
    baseline: int = field(init=False)
    _phase: str = "load"

    def __post_init__(self) -> None:
        self.baseline = 0 if self.place.kind == "cuda" else resident_bytes()

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def observe(self, phase: str) -> None:
        """End the current phase, record its peak, and begin `phase`."""
        self._close()
        self._phase = phase

    def forget_steps(self) -> None:
        """Reset the phases of a step, after the micro-batch has become smaller."""
        self._close()
        self.phases = {name: peak for name, peak in self.phases.items() if name not in STEP_PHASES}
        self.allocated = self.reserved = max(self.phases.values(), default=0)
        self._phase = "end"

    @contextlib.contextmanager
    def separate(self) -> Iterator[None]:
        """Measure something outside the run: within the block `allocated` is only its own peak."""
        self._close()
        kept = dict(self.phases), self.allocated, self.reserved
        self.allocated = 0
        yield
        self._close()
        (self.phases, self.allocated, self.reserved), self._phase = kept, "end"

    def _close(self) -> None:
        if self.place.kind == "cuda":
            allocated = torch.cuda.max_memory_allocated(self.place.device)
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.place.device))
            torch.cuda.reset_peak_memory_stats(self.place.device)
        else:
            allocated = resident_bytes()
            self.reserved = max(self.reserved, allocated)
        self.allocated = max(self.allocated, allocated)
        if self._phase != "end":
            self.phases[self._phase] = max(self.phases.get(self._phase, 0), allocated)

    def document(self) -> dict[str, Any]:
        """The `measured` part of memory.json."""
        self._close()
        counter = "torch.cuda allocator" if self.place.kind == "cuda" else "resident memory of the process"
        document: dict[str, Any] = {"counter": counter, "allocated_bytes": self.allocated}
        document["baseline_bytes"] = self.baseline
        document["reserved_bytes"] = self.reserved
        document["phases"] = [{"name": name, "allocated_bytes": peak} for name, peak in self.phases.items()]
        if self.place.kind == "cuda":
            free, total = torch.cuda.mem_get_info(self.place.device)
            document["device_name"] = torch.cuda.get_device_name(self.place.device)
            document["device_bytes"] = total - free
        return document


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, in bytes."""
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(number: int) -> psutil.Process:
    """Cached, because creating it takes ten times as long as a query; keyed by pid because of forks."""
    return psutil.Process(number)


SPAN = 50
"""Steps between two measurements."""
SAMPLE = 1024
"""Most sampled elements per tensor, evenly spread: 1 MiB in all for a model of 256 tensors."""
TINY = 0.1
"""Share below which a run gets a warning. Of plain bfloat16 weights with standard deviation 0.02, 5 % change at a
learning rate of 6e-6."""


@dataclass(frozen=True)
class Moved:
    """Shares of trained elements that changed: of all, and of vectors only (norms and biases; None without any)."""

    all: float
    vectors: float | None


class MovedElements:
    """Change of trained tensors between measurements, from a sample of this rank's elements kept on the host."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self._trained = trained
        self._before = self._sample()

    def measure(self) -> Moved:
        """Shares changed since the last measurement."""
        before, self._before = self._before, self._sample()
        changed = [
            float((now != then).float().mean()) for now, then in zip(self._before, before, strict=True) if len(now)
        ]
        here = [tensor for tensor in map(local_part, self._trained) if tensor.numel()]
        sizes, vectors = [tensor.numel() for tensor in here], [tensor.dim() < 2 for tensor in here]
        return Moved(
            _mean(changed, sizes) or 0.0,
            _mean(changed, [size * is_vector for size, is_vector in zip(sizes, vectors, strict=True)]),
        )

    @torch.no_grad()
    def _sample(self) -> list[Tensor]:
        # An odd stride, so that the elements of a matrix are not all from one column.
        here = [local_part(tensor).detach() for tensor in self._trained]
        taken = [tensor.flatten()[:: -(-tensor.numel() // SAMPLE) | 1] for tensor in here]
        together = torch.cat([part.float() for part in taken]).cpu()  # one copy from the device, not one a tensor
        return list(torch.split(together, [len(part) for part in taken]))


def _mean(values: Sequence[float], weights: Sequence[int]) -> float | None:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else None


def unmoved_warning(moved: Moved, config: TrainingConfig) -> str | None:
    """Warning about weights that hardly change. Kahan compensation changes before its weight does."""
    if (moved.all >= TINY and moved.vectors != 0) or facts_of(config.training.optimizer).keeps_small_updates:
        return None
    which = f"{moved.all:.1%} of the trained elements"
    which += "" if moved.vectors is None else f" and {moved.vectors:.1%} of norms and biases"
    cure = f"the peak learning rate is {config.training.learning_rate:g}"
    if config.model.torch_dtype_str is TorchDtype.BFLOAT16:
        cure = "updates round away in bfloat16: training.optimizer=anyprecision_adamw, or model.torch_dtype_str=float32"
    return f"warning   only {which} changed in the last {SPAN} steps; {cure}"


_COMPUTED_IN: dict[MixedPrecision | None, str] = {MixedPrecision.BF16: "bfloat16", MixedPrecision.FP16: "float16"}


def padding_share(micro_batches: Iterable[Batch]) -> float:
    """Share of padding in the tokens of some micro-batches."""
    positions = padded = 0
    for batch in micro_batches:
        positions += batch["input_ids"].numel()
        if "attention_mask" in batch:
            padded += int((batch["attention_mask"] == 0).sum())
    return padded / positions if positions else 0.0


def planned_series(config: TrainingConfig, plan: Plan | None, tokens: int, seconds: float) -> dict[str, float | None]:
    """Planned peaks in bytes, logged next to the measured ones, and MFU if the card's rates are known.

    MFU is the model's FLOPs for `tokens` tokens of all devices (6 per trained weight and token, 4 per frozen one, and
    attention at maximum row length) divided by what the cards can compute in `seconds` at the dense rate of the dtype
    of products. Recomputation does not count.
    """
    if plan is None:
        return {}
    peak = plan.peak
    series: dict[str, float | None] = {
        "planned_peak_allocated_bytes": peak.allocated_bytes,
        "planned_peak_reserved_bytes": peak.reserved_bytes,
    }
    if plan.step is not None and config.gpu.fp32_flops is not None:
        precision = config.training.mixed_precision_dtype
        rate = dense_rate(_COMPUTED_IN.get(precision, str(config.model.torch_dtype_str)), config.gpu)
        planned = config.batch.global_size * config.training.sequences_per_row * config.longest
        series["mfu"] = plan.step.model_flops * tokens / planned / seconds / rate
    return series
