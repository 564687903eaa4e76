"""Predictions against memory measured on an H100: a seeded sample here, every row in the slow suite.

The rows are those of calibration/h100_truth.jsonl; `tests/run/reference.py` repeats the step that they measured. Limits
are the errors as now reached, so that they fail when one grows.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from framework.memory.allocator import CachingAllocator, replay
from framework.memory.bands import UNCERTAINTY, Band
from framework.memory.ledger import peak_use
from framework.memory.step_time import estimate_step
from framework.memory.trace import Kind
from tests.grids import slow
from tests.run.reference import H100, rehearse_row

ROWS = json.loads((Path(__file__).parents[2] / "calibration" / "h100_plain_step.json").read_text())["rows"]
QUICK = {row["name"] for row in random.Random(3).sample([row for row in ROWS if row["config"]["ga"] == 1], 1)}
PARAMETERS = [pytest.param(row, id=row["name"], marks=() if row["name"] in QUICK else pytest.mark.slow) for row in ROWS]
ALLOCATED, ALLOCATED_DROPOUT = 0.0005, 0.004
"""Largest error of allocated bytes; the second where attention drops out."""
RESERVED = 0.004
SECONDS, SECONDS_OF_HOST = 0.25, {"bert-bf16-freeze6-s512-b8": 0.35}
"""Limits of a step's time; the second where the host decides, whose process was slow (docs/evidence/planner.md)."""


@pytest.mark.parametrize("row", PARAMETERS)
def test_row(row: dict[str, Any]) -> None:
    trace, peaks = rehearse_row(row["config"])
    use = peak_use(peaks, H100.context_bytes or 0, UNCERTAINTY[Band.PLAIN])
    limit = ALLOCATED_DROPOUT if row["config"]["model"] == "bert-base" else ALLOCATED
    assert use.allocated_bytes == pytest.approx(row["allocated_bytes"], rel=limit)
    assert use.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=RESERVED)
    assert use.device_bytes_upper >= row["device_bytes"], "the band covers the measurement"
    assert use.terms.total == use.device_bytes
    assert use.terms.unattributed < 0.001 * use.device_bytes
    ends = [mark.operation for mark in trace.marks if mark.phase == "end"]
    seconds = estimate_step(trace.operations[ends[1] : ends[2]], H100).seconds
    assert seconds == pytest.approx(row["step_seconds"], rel=SECONDS_OF_HOST.get(row["name"], SECONDS))


@pytest.mark.parametrize("optimizer", ["adamw", slow("adamw_fused"), slow("adafactor"), "sgd"])
def test_a_repeated_step_is_the_second_step(optimizer: str) -> None:
    """A measured step of a model of two equal blocks."""
    row = next(row for row in ROWS if row["name"] == "l1b-bf16-sgd-s512-b1")
    config = {**row["config"], "optim": optimizer, "layers": 2}
    twice, expected = rehearse_row(config, steps=2)
    once, _ = rehearse_row(config, steps=1)
    ends = [index for index, mark in enumerate(once.marks) if mark.phase == "end"]
    once.repeat(ends[0], ends[1])
    once.enter("end")
    peaks = replay(once, CachingAllocator())
    between = {"", "end"}
    assert [p for p in peaks if p.phase not in between] == [p for p in expected if p.phase not in between]
    if optimizer != "adafactor":  # whose first step leaves out one small kernel a tensor
        assert [item.name for item in once.operations] == [item.name for item in twice.operations], optimizer


def test_llama_keeps_per_token_and_layer_what_the_hand_count_says() -> None:
    """bf16: 2 norms x 8h, (H + 2K) D x 2 of rotated heads and values, HD x 2 and 4H of attention, 4 x 2I of the MLP."""
    row = next(row for row in ROWS if row["name"] == "l1b-bf16-s1024-b4")
    kept = []
    for layers in (2, 3):
        _, peaks = rehearse_row({**row["config"], "layers": layers}, steps=1)
        forward = next(peak for peak in peaks if peak.phase == "backward")
        kept.append(forward.kinds[Kind.ACTIVATIONS])
    hidden, heads, kv_heads, head, intermediate = 2048, 32, 8, 64, 8192
    by_hand = 2 * 8 * hidden + (heads + 2 * kv_heads) * head * 2 + heads * head * 2 + 4 * heads + 4 * 2 * intermediate
    assert (kept[1] - kept[0]) / (4 * 1024) == pytest.approx(by_hand, rel=0.002)
