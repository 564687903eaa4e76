"""The end of a run, read from the files in its folder."""

import pytest

from framework.reports.run_files import read_run
from framework.reports.run_page import How, read_ending
from tests.memory.explain.test_moves import FULL
from tests.reports.plans import GIB
from tests.reports.runs import checkpoint, evaluation, export, make_run, step, write_memory

REPAIRED = "training.per_device_train_batch_size 4 -> 2 (backward of step 3)"


def steps(count: int) -> list[dict[str, object]]:
    return [step(number) for number in range(1, count + 1)]


def out_of_memory(folder, head):
    (folder / "oom.txt").write_text(f"{head}\n\ntorch.OutOfMemoryError: {FULL}\n")


def ending_of(folder):
    return read_ending(read_run(folder))


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "mine", steps(4), max_steps=10)


def test_a_run_that_is_done(tmp_path):
    folder = make_run(tmp_path / "mine", steps(10), max_steps=10)
    write_memory(folder, 10)
    export(folder)
    found = ending_of(folder)
    assert (found.how, found.headline) == (How.DONE, "done, 10 of 10 steps made")
    assert "1 pass over the training rows." in found.details


def test_an_export_of_an_earlier_end_is_not_the_end(folder):
    write_memory(folder, 2)
    export(folder)
    assert ending_of(folder).how is How.UNFINISHED


def test_memory_that_ran_out_is_explained_with_moves_of_its_plan(folder):
    out_of_memory(folder, "phase: backward\nstep: 5")
    checkpoint(folder, 4)
    found = ending_of(folder)
    assert (found.how, found.headline) == (How.OUT_OF_MEMORY, "out of memory in step 5, 4 of 10 steps made")
    assert found.explanation is not None
    assert found.explanation.cause == "capacity"
    assert [move.saves_bytes for move in found.explanation.moves] == [2 * GIB]
    assert "The newest checkpoint is of step 4: `--resume` continues from there." in found.details


def test_memory_that_ran_out_before_the_first_step(tmp_path):
    folder = make_run(tmp_path / "mine", [])
    out_of_memory(folder, "phase: forward")
    found = ending_of(folder)
    assert found.headline == "out of memory, no step made"
    assert found.details == ("There is no checkpoint to resume from.",)


@pytest.mark.parametrize("name", ["oom-step-00000003.txt", "stopped-step-00000003.txt"])
def test_a_stop_that_the_run_went_on_after_did_not_end_it(folder, name):
    (folder / name).write_text(f"phase: backward\nstep: 3\n\ntorch.OutOfMemoryError: {FULL}\n")
    assert ending_of(folder).how is How.UNFINISHED


def test_a_failure_that_was_repaired_did_not_end_it(folder):
    out_of_memory(folder, f"phase: backward\nstep: 3\nrepaired: {REPAIRED}")
    assert ending_of(folder).how is How.UNFINISHED


def test_an_evaluation_that_was_repaired_before_the_first_step_did_not_end_it(folder):
    out_of_memory(folder, "repaired: training.per_device_eval_batch_size 4 -> 2 (end of the longest rows)")
    assert ending_of(folder).how is How.UNFINISHED


@pytest.mark.parametrize("step", [3, 5])
def test_a_failure_after_the_last_repair_is_the_end(tmp_path, step):
    """In the same step too, where nothing was left to halve."""
    folder = make_run(tmp_path / "mine", steps(step - 1), max_steps=10)
    out_of_memory(folder, f"phase: backward\nstep: {step}\nrepaired: {REPAIRED}")
    assert ending_of(folder).how is How.OUT_OF_MEMORY


def test_an_evaluation_that_ran_out_ended_the_run_unless_something_came_later(tmp_path):
    """The step before it has its line already."""
    head = "phase: eval\nstep: 4\nrepaired: training.per_device_eval_batch_size 4 -> 2 (eval of step 4)"
    for made, how in ((4, How.OUT_OF_MEMORY), (5, How.UNFINISHED)):
        folder = make_run(tmp_path / str(made), steps(made), max_steps=10)
        out_of_memory(folder, head)
        assert ending_of(folder).how is how
    write_memory(tmp_path / "4", 4)
    export(tmp_path / "4")
    assert ending_of(tmp_path / "4").how is How.DONE


def test_a_value_that_was_not_finite(folder):
    (folder / "stopped.txt").write_text("step: 5\n\nstep 5: loss nan, gradient norm nan over 106 supervised tokens\n")
    found = ending_of(folder)
    assert (found.how, found.headline) == (How.STOPPED, "stopped by itself in step 5, 4 of 10 steps made")
    assert found.explanation is not None
    assert found.explanation.moves == ()


def test_a_checkpoint_out_of_turn_is_an_interruption(tmp_path):
    for number, (every, how) in enumerate(((None, How.INTERRUPTED), (3, How.INTERRUPTED), (2, How.UNFINISHED))):
        folder = make_run(tmp_path / str(number), steps(4), max_steps=10, save_steps=every)
        checkpoint(folder, 4)
        assert ending_of(folder).how is how


@pytest.mark.parametrize("length", [{"max_steps": 4}, {"num_train_epochs": 0.4}])
def test_all_steps_without_an_export_are_no_interruption(tmp_path, length):
    folder = make_run(tmp_path / "mine", [*steps(4), evaluation(4, 2.0)], **length)
    checkpoint(folder, 4)
    found = ending_of(folder)
    assert found.how is How.UNFINISHED
    assert "All steps are complete" in found.details[0]


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"num_train_epochs": 0.2}])
def test_a_run_that_was_resumed_for_longer_than_its_config_says_has_not_made_all(tmp_path, length):
    folder = make_run(tmp_path / "mine", steps(4), **length)
    checkpoint(folder, 4)
    found = ending_of(folder)
    assert (found.how, found.headline) == (How.INTERRUPTED, "interrupted, 4 steps made")


def test_a_log_in_the_folder_tells_what_the_run_does_not(folder):
    assert ending_of(folder).explanation is None
    (folder / "slurm.log").write_text("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0\n")
    found = ending_of(folder)
    assert found.how is How.OUT_OF_MEMORY
    assert found.explanation is not None
    assert found.explanation.cause == "host"
    export(folder)
    assert ending_of(folder).how is How.DONE
