"""The run folder's files: cut short, or not writable."""

import json
import os
from pathlib import Path

import pytest

from framework.errors import RequestError, SaveFailed
from framework.memory.explain.evidence import earlier_reports
from framework.run.record.layout import checkpoints
from framework.run.record.overwrite import remove
from framework.run.record.run_folder import PAGE, RunFolder, held, make, open_folder, unusable_folders
from tests.tiny import tiny_config


def test_a_metrics_line_cut_short_by_a_kill_is_dropped(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n\xff\xfe\n{"step": 4, "lo')
    RunFolder(tmp_path).forget_metrics_after(2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_files_that_cannot_be_written_are_a_failed_save(tmp_path):
    folder = RunFolder(tmp_path / "absent")
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


def test_the_report_of_a_resumed_run_names_the_step_of_its_stop(tmp_path):
    """A report without a step, of the trial before all, gets the step that the run resumes from."""
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
    remove(held(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("is_last", [False, True])
def test_the_evaluation_behind_the_last_step_is_dropped_where_it_comes_again(tmp_path, is_last):
    lines = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}, {"step": 4, "loss": 1.0}]
    lines += [{"step": 4, "eval_loss": 1.5}, {"step": 5, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    RunFolder(tmp_path).forget_metrics_after(4, is_last)
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == lines[: 3 if is_last else 4]


def test_a_resume_under_other_versions_keeps_both_records_and_says_what_moved(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_environment({"device": "cpu"}, 0)
    first = json.loads((tmp_path / "environment.json").read_text())
    assert folder.moved_versions() == []
    folder.write_environment({"device": "cpu"}, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["environment.json"]
    older = {**first, "packages": {**first["packages"], "torch": "2.1.0", "peft": None}, "python": "3.9.1"}
    (tmp_path / "environment.json").write_text(json.dumps(older))
    moved = folder.moved_versions()
    assert f"torch {first['packages']['torch']}, was 2.1.0" in moved
    assert f"python {first['python']}, was 3.9.1" in moved
    assert f"peft {first['packages']['peft']}, was missing" in moved
    assert len(moved) == 3
    folder.write_environment({"device": "cpu"}, 6)
    kept = json.loads((tmp_path / "environment-until-step-00000006.json").read_text())
    assert kept == older
    assert json.loads((tmp_path / "environment.json").read_text())["packages"] == first["packages"]


LINES = {"output_dir": {}, "fallback_dir": {}, "optimizer_offload_folder": {"optimizer_offload": "nvme"}}
UNUSABLE = {
    "too long": ("x" * 5000, "File name too long"),
    "too deep": ("a/" * 2500, "File name too long"),
    "no room for the names in it": ("a/" * 1890, "File name too long"),
    "a zero byte": ("a\0b", "null byte"),
    "a file": ("file", "Not a directory"),
    "below a file": ("file/a/b", "Not a directory"),
    "a link to itself": ("loop", "symbolic links"),
    "below it": ("loop/a", "symbolic links"),
    "a link to nothing": ("dangling", "link on the path is broken"),
    "below that": ("dangling/a", "link on the path is broken"),
    "a FIFO in it": ("odd", "special files"),
    "not ours": ("sealed/a/b", "cannot be created or written to: Permission denied"),
}


@pytest.mark.parametrize("key", LINES)
@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_a_folder_is_refused_by_check_and_before_anything_is_read(tmp_path, monkeypatch, name, key):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    Path("odd").mkdir()
    os.mkfifo("odd/config.yaml")
    Path("sealed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path).name != "sealed")  # root may write anywhere
    written, reason = UNUSABLE[name]
    if key == "fallback_dir" and name == "a FIFO in it":
        written = "file"  # the run has a folder of its own in that one
        reason = "Not a directory"
    before = {*tmp_path.rglob("*")}
    config = tiny_config(training={"output_dir": "fine", **LINES[key], key: written})
    with pytest.raises(RequestError) as caught:
        open_folder(config, "r", resume=False, overwrite=False)
    (problem,) = caught.value.problems
    assert problem.key == f"training.{key}"
    assert reason in problem.message
    assert unusable_folders(config) == caught.value.problems
    assert {*tmp_path.rglob("*")} == before


@pytest.mark.parametrize("stray", ["step-abcdefgh", "step-0000001", "notes", "step-00000004.txt"])
def test_strays_among_checkpoints_are_none(tmp_path, stray):
    saved = tmp_path / "checkpoints"
    for name in ("step-00000002", "step-00000010", stray):
        (saved / name).mkdir(parents=True)
    (saved / "step-00000011").touch()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_a_run_is_resumed_or_overwritten(tmp_path):
    config = tiny_config(training={"output_dir": str(tmp_path / "run")})
    with pytest.raises(RequestError) as caught:
        open_folder(config, "r", resume=True, overwrite=True)
    assert [(each.key, each.expected) for each in caught.value.problems] == [("--overwrite", "one of the two")]
