"""The run folder's files: cut short, or not writable."""

import json

import pytest

from framework.errors import RequestError, SaveFailed
from framework.memory.explain.evidence import earlier_reports
from framework.run.record import PAGE, RunFolder, clear, held, make, open_folder
from tests.tiny import tiny_config


def test_a_metrics_line_cut_short_by_a_kill_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    folder.forget_metrics_after(2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_files_that_cannot_be_written_are_a_failed_save(tmp_path):
    folder = RunFolder(tmp_path / "absent")
    with pytest.raises(SaveFailed, match=r"metrics\.jsonl could not be written"):
        folder.append_metrics({"step": 1})
    with pytest.raises(SaveFailed, match=r"plan\.json could not be written"):
        folder.write_json("plan.json", {})


def test_a_folder_that_cannot_be_written_to_is_the_requests_fault(tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(RequestError, match="Read-only file system"):
        make(RunFolder(tmp_path))


def test_a_folder_without_checkpoints_names_the_runs_that_have_some(tmp_path):
    (tmp_path / "mine_2" / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "others").mkdir()
    config = tiny_config(training={"output_dir": str(tmp_path / "mine")})
    with pytest.raises(RequestError) as caught:
        open_folder(config, "r", resume=True, overwrite=False)
    [problem] = caught.value.problems
    assert problem.nearest == f"training.output_dir={tmp_path / 'mine_2'}"
    assert "others" not in problem.expected


def test_what_stopped_a_run_that_goes_on_says_at_which_step_that_was(tmp_path):
    """One without a step, of the trial before all, has the step that the run goes on from."""
    folder = RunFolder(tmp_path)
    folder.set_stops_aside(4)
    assert not list(tmp_path.iterdir())
    folder.write_stop(9, "step 9: loss nan")
    (tmp_path / "oom.txt").write_text("phase: forward\n\nCUDA out of memory.")
    (tmp_path / "notes-step-00000009.txt").write_text("mine")
    folder.set_stops_aside(4)
    names = ["notes-step-00000009.txt", "oom-step-00000004.txt", "stopped-step-00000009.txt"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [file.name for file in held(tmp_path)] == names[1:]
    assert [file.name for file in earlier_reports(tmp_path)] == names[1:]


def test_a_page_of_the_run_before_goes_with_it(tmp_path):
    for name in (PAGE, "plan.json", "mine.txt"):
        (tmp_path / name).touch()
    clear(RunFolder(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
