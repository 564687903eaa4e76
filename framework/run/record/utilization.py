"""Figures of a step that compare it with its plan and its card, for `metrics.jsonl` and the trackers."""

from collections.abc import Iterable

from framework.build.losses.loss import Batch
from framework.memory.ledger import Plan
from framework.memory.roofline import dense_rate
from framework.schema.choices import MixedPrecision
from framework.schema.config import TrainingConfig

_COMPUTED_IN: dict[MixedPrecision | None, str] = {MixedPrecision.BF16: "bfloat16", MixedPrecision.FP16: "float16"}


def padding_share(micro_batches: Iterable[Batch]) -> float:
    """Share of the positions of some micro batches that are padding."""
    positions = padded = 0
    for batch in micro_batches:
        positions += batch["input_ids"].numel()
        if "attention_mask" in batch:
            padded += int((batch["attention_mask"] == 0).sum())
    return padded / positions if positions else 0.0


def planned_series(config: TrainingConfig, plan: Plan | None, tokens: int, seconds: float) -> dict[str, float | None]:
    """Planned peaks in bytes, next to which the measured ones are logged, and MFU where the card's rates are known.

    MFU is the FLOPs that the model needs for `tokens` positions of all devices (6 a trained weight and token, 4 a
    frozen one, and attention's as of the longest rows) over what the cards can make in `seconds`, by the dense rate of
    the type that products are computed in. Recomputation does not count.
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
