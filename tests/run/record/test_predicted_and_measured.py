"""The last line of a run says what was compared: on the CPU a process is no measure of its tensors."""

from framework.memory.units import GIB, MIB
from framework.run.record.predicted_and_measured import compare, last_line
from tests.reports.plans import on


def measured(counter: str, allocated: int, baseline: int) -> dict[str, object]:
    return {"counter": counter, "allocated_bytes": allocated, "baseline_bytes": baseline, "phases": []}


def test_a_card_has_the_error_of_the_prediction():
    plan = on(24.0)
    peak = plan.peak.allocated_bytes
    line = last_line(compare(plan, measured("torch.cuda allocator", peak * 4 // 5, 0)))
    assert "(torch.cuda allocator); predicted" in line
    assert line.endswith("error +25.0%")
    assert last_line(compare(None, measured("torch.cuda allocator", 3 * GIB, 0))).endswith(
        "3.00 GiB (torch.cuda allocator)"
    )


def test_the_cpu_has_what_the_process_held_before_and_no_error():
    line = last_line(compare(on(24.0), measured("resident memory of the process", 2 * GIB, 1000 * MIB)))
    assert "peak memory 2.00 GiB of the whole process, which held 1,000.0 MiB before the model was built" in line
    assert "for tensors only" in line
    assert "error" not in line
    unplanned = last_line(compare(None, measured("resident memory of the process", 2 * GIB, 1000 * MIB)))
    assert unplanned.endswith("before the model was built")
