"""Steps that wait for the host, as planned and as measured beside an H200: the times of compiled code are fitted to six
of them (framework/memory/roofline.py)."""

import json
from pathlib import Path

import pytest

from framework.compose import compose
from framework.memory.step_time import step_cost
from framework.run.rehearsal.rehearse import record

ROWS = json.loads((Path(__file__).parents[2] / "calibration" / "h200_host_step.json").read_text())["rows"]
COMPILED = [row for row in ROWS if row["name"].endswith("compile-true")]
WITHIN = {
    "1b_full/gc-false/compile-true": 0.22,  # the card is busy for half of it, which is not overlapped
}
QUICK = ("1b_full/gc-true/compile-true",)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row["name"], marks=() if row["name"] in QUICK else pytest.mark.slow) for row in COMPILED],
)
def test_compiled_steps_of_few_tokens_take_what_the_host_takes(row):
    cost = step_cost(record(compose("finetune_local", ["model.chunked_loss=false", *row["overrides"]]).config))
    assert cost is not None
    assert cost.seconds == pytest.approx(row["step_seconds"], rel=WITHIN.get(row["name"], 0.06))
