"""`--overwrite`: what a run wrote goes, all of it or nothing; what the same request reads, or others wrote, stays."""

import json
import os
import shutil

import pytest

from framework.errors import RequestError
from framework.run.record import layout
from framework.run.record.layout import kept_for
from framework.run.record.overwrite import remove
from framework.run.record.run_folder import RunFolder, held, open_folder
from tests.tiny import tiny_config


@pytest.fixture
def folder(tmp_path):
    """A run folder as one is left, with files of its user in it."""
    run = tmp_path / "r"
    for name in ("checkpoints/step-00000002", "checkpoints/step-abcdefgh", "final/base_model", "merged", "gguf"):
        (run / name).mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "final/model.safetensors", "final/config.json", "final/README.md"):
        (run / name).write_text("{}")
    for name in (
        "merged/model.safetensors",
        "merged/config.json",
        "gguf/r-q8_0.gguf",
        "gguf/Modelfile",
        "gguf/my.gguf",
    ):
        (run / name).write_text("{}")
    for name in ("notes.txt", "checkpoints/notes.txt", "checkpoints/step-00000002/state.json"):
        (run / name).write_text("mine")
    RunFolder(run).write_environment({}, 0)
    return run


def names(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def refused(run, **sections):
    """The problems, after checking that nothing changed."""
    before = names(run)
    training = {"output_dir": str(run), **sections.pop("training", {})}
    with pytest.raises(RequestError) as caught:
        open_folder(tiny_config(training=training, **sections), "r", resume=False, overwrite=True)
    assert names(run) == before
    return caught.value.problems


def test_only_what_a_run_wrote_is_removed(folder):
    open_folder(tiny_config(training={"output_dir": str(folder)}), "r", resume=False, overwrite=True)
    remove(held(folder))
    kept = ["checkpoints", "checkpoints/notes.txt", "checkpoints/step-abcdefgh", "final", "final/README.md"]
    assert names(folder) == [*kept, "gguf", "gguf/my.gguf", "notes.txt"]


def test_what_was_made_of_an_earlier_run_goes_with_it_and_of_no_run_stays(tmp_path):
    (tmp_path / "gguf").mkdir()
    assert held(tmp_path) == []
    RunFolder(tmp_path).write_environment({}, 0)
    assert [path.name for path in held(tmp_path)] == ["environment.json", "gguf"]


@pytest.mark.parametrize("through", ["itself", "link to it", "folder of links", "base_model"])
@pytest.mark.parametrize("key", ["model.model_name", "model.tokenizer_name", "training.teacher.model_name"])
def test_a_model_that_would_be_removed_is_refused(folder, tmp_path, key, through):
    place = folder / "final"
    if through == "link to it":
        place = tmp_path / "linked"
        place.symlink_to(folder / "final")
    elif through == "folder of links":
        place = tmp_path / "snapshot"
        place.mkdir()
        (place / "model.safetensors").symlink_to(folder / "final" / "model.safetensors")
    elif through == "base_model":
        place = folder / "final" / "base_model"
    section, _, name = key.partition(".")
    inner = {"teacher": {"model_name": str(place)}} if "teacher" in name else {name: str(place)}
    more = {"task": "distillation"} if "teacher" in name else {}
    [problem] = refused(folder, **{section: {**inner, **more}})
    assert problem.key == key
    assert "--overwrite would remove" in problem.message


@pytest.mark.parametrize("written", ["checkpoints/rows.jsonl", "checkpoints/*.jsonl", "metrics.jsonl", "."])
def test_rows_that_would_be_removed_are_refused(folder, written):
    """Rows that lie among checkpoints stay; the log does not, whether it is named or found in its folder."""
    (folder / "checkpoints" / "rows.jsonl").write_text('{"text": "a"}\n')
    config = {"data": {"train": [{"path": str(folder / written)}]}}
    if written.startswith("checkpoints"):
        training = {"output_dir": str(folder)}
        open_folder(tiny_config(training=training, **config), "r", resume=False, overwrite=True)
        return
    [problem] = refused(folder, **config)
    assert problem.key == "data.train[0].path"


def test_a_folder_that_no_run_made_is_refused(folder):
    (folder / "environment.json").unlink()
    [problem] = refused(folder)
    assert "no environment.json of a run" in problem.message
    (folder / "environment.json").write_text("[1]")
    assert "no environment.json of a run" in refused(folder)[0].message


@pytest.mark.parametrize("name", ["checkpoints", "final", "config.yaml"])
def test_a_link_is_refused_before_anything_is_removed(folder, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder / name, elsewhere)
    (folder / name).symlink_to(elsewhere)
    problems = refused(folder)
    assert any("it is a link to" in problem.message for problem in problems)
    assert elsewhere.exists()


def test_a_checkpoint_with_a_file_of_someone_else_is_refused(folder):
    (folder / "checkpoints/step-00000002/.DS_Store").write_text("a file browser's")
    assert kept_for(folder / "checkpoints/step-00000002") is None
    (folder / "checkpoints/step-00000002/notes.txt").write_text("mine")
    [problem] = refused(folder)
    assert "no run wrote notes.txt in it" in problem.message


def test_what_cannot_be_renamed_leaves_everything(folder, monkeypatch):
    before, rename, calls = names(folder), os.rename, []

    def refuse(source, target):
        calls.append(source)
        if len(calls) == 4:
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr("pathlib.os.rename", refuse)
    with pytest.raises(RequestError, match="Nothing was removed"):
        remove(held(folder))
    assert names(folder) == before


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", ".config.yaml.incomplete", "metrics.jsonl", "environment.json"):
        (run / name).symlink_to(victim)
    RunFolder(run).write_config(tiny_config())
    RunFolder(run).write_environment({}, 0)
    with pytest.raises(OSError, match="symbolic links"):
        layout.append_line(run / "metrics.jsonl", "{}")
    assert victim.read_text() == "precious"
    assert not (run / "config.yaml").is_symlink()
    assert json.loads((run / "environment.json").read_text())["packages"]
