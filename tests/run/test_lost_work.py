"""Faults around a run must not cost its progress: full disks, killed workers, stray files."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from accelerate.tracking import TensorBoardTracker
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework.build.data import batches as data_workers
from framework.build.data.batches import GlobalBatches
from framework.cli import main
from framework.errors import RequestError, SaveFailed, WorkersLost
from framework.run import session as session_module
from framework.run import trainer
from framework.run.checkpoints import checkpoint, export
from framework.run.record import layout
from framework.run.record import run_folder as record
from framework.run.record.layout import checkpoints
from framework.run.record.lock import only_run
from framework.run.record.run_folder import fallback_of
from framework.run.setup import start as opening
from tests.grids import first
from tests.run.test_trainer import config, corpus, final_weights, metrics, same, straight, train  # noqa: F401
from tests.tiny import LLAMA

LORA = {"lora_r": 2, "lora_target_modules": ["q_proj"]}


def full(monkeypatch, module, name, is_full):
    """No room for the files of that function for which `is_full` of the arguments."""
    original = getattr(module, name)

    def write(*arguments, **options):
        if is_full(" ".join(map(str, arguments))):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, write)


def test_a_log_that_the_disk_does_not_take_ends_nothing(corpus, straight, tmp_path, monkeypatch, capsys):  # noqa: F811
    appended = []

    def is_full(text):
        appended.append(text)
        return 3 < len(appended) < 9

    full(monkeypatch, layout, "append_line", is_full)
    monkeypatch.setattr("framework.run.record.metrics_log.append_line", layout.append_line)
    full(monkeypatch, record, "replace_file", lambda text: "memory.json" in text)
    train(config(corpus, tmp_path / "run"), quiet=False)
    assert metrics(tmp_path / "run") == straight[0]
    output = capsys.readouterr().err
    assert output.count("wait in memory") == 1
    assert "lines that waited in memory are written" in output


def no_room_for_checkpoints(monkeypatch, folder):
    full(monkeypatch, checkpoint, "save_verified", lambda text: str(folder / "checkpoints") in text)


def test_the_export_is_written_though_the_last_checkpoint_is_not(corpus, straight, tmp_path, monkeypatch):  # noqa: F811
    no_room_for_checkpoints(monkeypatch, tmp_path / "run")
    with pytest.raises(SaveFailed, match=r"The weights after step 12 are exported: .*final; there is no checkpoint"):
        train(config(corpus, tmp_path / "run"))
    assert same(final_weights(tmp_path / "run"), straight[1])
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]


def test_the_checkpoint_stays_though_the_export_is_not_written(corpus, straight, tmp_path, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patched:
        full(patched, export, "write_model", lambda text: True)
        with pytest.raises(SaveFailed, match=r"final could not be written: .*No space left on device") as ended:
            train(config(corpus, tmp_path / "run"))
    assert "\n--resume continues from step 12; training.fallback_dir names" in str(ended.value)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000012"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    train(config(corpus, tmp_path / "run"), resume=True)
    assert same(final_weights(tmp_path / "run"), straight[1])
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(again) == len(lines)  # the last evaluation stands once
    assert [json.loads(line)["step"] for line in again if "eval_loss" in line] == [0, 12]


def test_checkpoints_go_to_the_fallback_and_the_run_resumes_from_there(corpus, straight, tmp_path, monkeypatch, capsys):  # noqa: F811
    elsewhere = {"save_steps": 5, "fallback_dir": str(tmp_path / "other")}
    run = config(corpus, tmp_path / "run", training=elsewhere)
    with monkeypatch.context() as patched:
        no_room_for_checkpoints(patched, tmp_path / "run")
        train(run, quiet=False)
    kept = fallback_of(run, tmp_path / "run")
    assert kept.parent == tmp_path / "other"
    assert [path.name for path in checkpoints(kept)] == ["step-00000010", "step-00000012"]
    assert checkpoints(tmp_path / "run") == []
    assert f"The checkpoint is {kept / 'checkpoints' / 'step-00000012'}" in capsys.readouterr().err
    shutil.rmtree(kept / "checkpoints" / "step-00000012")
    train(run, resume=True)
    assert metrics(tmp_path / "run") == straight[0]
    assert same(final_weights(tmp_path / "run"), straight[1])
    with pytest.raises(RequestError, match="already holds a run"):
        train(run)
    train(config(corpus, tmp_path / "run", training={**elsewhere, "max_steps": 1}), overwrite=True)
    assert not checkpoints(kept)  # else a later --resume would go on from them


@pytest.mark.parametrize("mode", first(1, ["adapter_only", "adapter_and_base_model", "merged"]))
def test_the_export_goes_elsewhere_whole(corpus, tmp_path, monkeypatch, mode):  # noqa: F811
    training = {"max_steps": 1, "use_peft": True, "fallback_dir": str(tmp_path / "other")}
    peft = {**LORA, "peft_save_mode": mode}
    begun, exported = [], trainer.export
    monkeypatch.setattr(trainer, "export", lambda *given: begun.append("export") or exported(*given))
    full(monkeypatch, export, "write_tokenizer", lambda text: bool(begun) and "run/.final" in text)
    with pytest.raises(SaveFailed, match=r"The export is .*other"):
        train(config(corpus, tmp_path / "run", architecture=LLAMA, training=training, peft=peft))
    monkeypatch.undo()
    train(config(corpus, tmp_path / "run", architecture=LLAMA, training=training, peft=peft), resume=True)
    (kept,) = (tmp_path / "other").glob("run-*/final")
    expected = {path.relative_to(tmp_path / "run" / "final") for path in (tmp_path / "run" / "final").rglob("*")}
    expected.remove(Path("README.md"))  # the card of a run that ended as it should
    assert {path.relative_to(kept) for path in kept.rglob("*")} == expected
    for name in expected:
        if name.suffix == ".safetensors":
            assert same(load_file(kept / name), load_file(tmp_path / "run" / "final" / name))


def killing(monkeypatch, often):
    """Kill a worker before each of some steps."""
    original, seen, killed = session_module.Session.take, [], []

    def loaded(loader):
        seen.append(iter(loader))
        return seen[-1]

    def take(self, step):
        if len(killed) < often and seen and step >= 4:
            killed.append(step)
            os.kill(seen[-1]._workers[0].pid, signal.SIGKILL)
        return original(self, step)

    monkeypatch.setattr(data_workers, "iter", loaded, raising=False)
    monkeypatch.setattr(session_module.Session, "take", take)
    return killed


@pytest.mark.parametrize("workers", first(1, [1, 2]))
def test_a_killed_worker_is_started_again_and_nothing_changes(
    corpus,  # noqa: F811
    straight,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
    workers,
):
    killed = killing(monkeypatch, 2)
    train(config(corpus, tmp_path / "run", data={"workers": workers}), quiet=False)
    assert len(killed) == 2
    assert metrics(tmp_path / "run") == straight[0]
    assert "was killed (SIGKILL)" in capsys.readouterr().err


def test_workers_that_die_again_and_again_end_the_run_with_its_state(corpus, tmp_path, monkeypatch):  # noqa: F811
    start = GlobalBatches.start

    def begun(self, step):
        for number, made in enumerate(start(self, step), step):
            if number == 4:
                raise data_workers.WorkersDied("a process that prepares batches was killed")
            yield made

    monkeypatch.setattr(GlobalBatches, "start", begun)
    with pytest.raises(WorkersLost, match="3 times in a row; the state after step 4 is saved") as caught:
        train(config(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 4
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000004"]


def test_a_second_run_in_the_folder_is_refused_and_harms_nothing(corpus, tmp_path):  # noqa: F811
    (tmp_path / "run").mkdir()
    with only_run(tmp_path / "run"), pytest.raises(RequestError, match=f"process {os.getpid()} on .* is training"):
        train(config(corpus, tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_that_came_first_since_the_check_is_not_mixed_with(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Both have found an empty folder; the other one is done by the time that this one begins to write."""

    def after_another(folder):
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        return only_run(folder)

    monkeypatch.setattr(opening, "only_run", after_another)
    with pytest.raises(RequestError, match="already holds a run"):
        train(config(corpus, tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_copied_run_resumes_in_the_copy(corpus, tmp_path, capsys):  # noqa: F811
    first, second = tmp_path / "a", tmp_path / "b"
    train(config(corpus, first, training={"max_steps": 2}))
    shutil.copytree(first, second)
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    arguments = ["training.max_steps=3", "--resume", "--allow", "training.max_steps", "--quiet", "gpu=cpu"]
    assert main(["train", str(second / "config.yaml"), *arguments]) == 0
    assert f"using the run in {second}" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert checkpoints(second)[-1].name == "step-00000003"
    assert f"output_dir: {second}" in (second / "config.yaml").read_text()


def test_tensorboard_has_one_folder_whatever_the_run_is_called(corpus, tmp_path):  # noqa: F811
    pytest.importorskip("tensorboard")
    names = {"trackers": ["tensorboard"], "run_name": "../../../escaped", "max_steps": 1}
    train(config(corpus, tmp_path / "deep" / "er" / "run", training=names))
    events = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    folder = tmp_path / "deep" / "er" / "run" / "tensorboard"
    assert events
    assert all(path == folder or folder in path.parents for path in events)


def test_a_tracker_that_fails_is_left_out(corpus, straight, tmp_path, monkeypatch, capsys):  # noqa: F811
    pytest.importorskip("tensorboard")
    full(monkeypatch, TensorBoardTracker, "log", lambda text: "'step': 3" in text)
    train(config(corpus, tmp_path / "run", training={"trackers": ["tensorboard"]}), quiet=False)
    assert metrics(tmp_path / "run") == straight[0]
    assert capsys.readouterr().err.count("tensorboard is dropped from step 3 on") == 1


def test_a_file_of_someone_else_beside_the_export_stays_at_a_resume(corpus, tmp_path):  # noqa: F811
    run = config(corpus, tmp_path / "run", training={"max_steps": 1})
    train(run)
    (tmp_path / "run" / "final" / "README.md").write_text("mine")
    train(run, resume=True)
    assert (tmp_path / "run" / "final" / "README.md").read_text() == "mine"
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert not list(Path(tmp_path / "run").glob(".final*"))
