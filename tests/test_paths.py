"""Files that are not regular are refused at once, and never waited for or opened."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from framework.cli import main
from framework.cli.printing import written
from framework.errors import RequestError
from framework.paths import open_regular, read_regular, special_files
from framework.run.record.run_folder import open_folder
from framework.schema.config import TrainingConfig
from tests.folders import save_model, split_weights

pytestmark = pytest.mark.timeout(60)  # a FIFO without a writer is waited for without end
GOOD = "model: {model_name: ./base}\ndata: {train: [{path: user/set}]}\n"


@pytest.fixture
def refused(write, capsys):
    """Runs a command that exits 2; returns its message on one line."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main([*arguments]) == 2, arguments
        return " ".join(capsys.readouterr().err.split())

    return run


def fifo(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def unix_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)


def test_kinds_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes("é".encode())
    Path("link").symlink_to("file")
    assert read_regular(Path("link")) == "é"
    assert read_regular(Path("file"), most=2) == "é"
    with pytest.raises(OSError, match="larger than 1 bytes") as found:
        read_regular(Path("file"), most=1)
    assert found.value.errno == errno.EFBIG
    fifo("pipe")
    unix_socket("socket")
    for name, kind in (("pipe", "a FIFO"), ("socket", "a socket"), ("/dev/null", "a character device")):
        with pytest.raises(OSError, match=kind):
            open_regular(Path(name))
    with pytest.raises(IsADirectoryError):
        open_regular(Path("."))
    with pytest.raises(FileNotFoundError):
        open_regular(Path("nothing"))
    Path("broken").symlink_to("nowhere")
    assert special_files(Path(".")) == ["pipe (a FIFO)", "socket (a socket)"]
    assert special_files(Path("nothing")) == []


def test_a_file_that_becomes_a_fifo_between_two_looks_is_not_waited_for(tmp_path, monkeypatch):
    pipe = fifo(str(tmp_path / "pipe"))
    (tmp_path / "file").write_text("x")
    real, looks = os.stat, []

    def stat(path, **options):
        looks.append(path)
        return real(tmp_path / "file" if str(path) == pipe else path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(OSError, match="a FIFO"):
        open_regular(Path(pipe))
    assert looks


@pytest.mark.parametrize("verb", ["show", "check", "plan", "train", "convert"])
def test_a_recipe_is_a_regular_file(refused, verb):
    assert "it is a FIFO, not a regular file" in refused(verb, fifo("r.yaml"))
    Path("device.yaml").symlink_to("/dev/zero")
    assert "it is a character device" in refused(verb, "device.yaml")
    Path("folder.yaml").mkdir()
    assert ("Is a directory" if verb == "convert" else "is a folder, not a recipe") in refused(verb, "folder.yaml")
    with Path("huge.yaml").open("wb") as file:
        file.truncate(2**40)
    assert "is larger than" in refused(verb, "huge.yaml")


def test_presets_and_templates_are_too(refused, write):
    write(GOOD)
    fifo("card.yaml")
    assert "it is a FIFO" in refused("show", "r.yaml", "gpu=./card.yaml")
    from framework.build.text.named_templates import read_template
    from framework.errors import RequestError

    with pytest.raises(RequestError, match="cannot be read"):
        read_template(fifo("chat.jinja"))


def test_explain_reads_logs_and_plans_that_are_files(refused, capsys):
    assert "it is a FIFO" in refused("explain", fifo("run.log"))
    fifo("run/plan.json")
    fifo("run/some.log")
    Path("run/other.log").write_text("all is well\n")
    assert "holds no report of a failure" in refused("explain", "run")
    fifo("run/oom.txt")
    assert "it is a FIFO" in refused("explain", "run")
    assert "holds no plan.json that can be read" in refused("explain", "run/other.log", "--run", "run")
    Path("run/plan.json").unlink()
    with Path("run/plan.json").open("wb") as file:
        file.truncate(2**40)
    assert "holds no plan.json that can be read" in refused("explain", "run/other.log", "--run", "run")


@pytest.mark.parametrize(("kind", "make"), [("a FIFO", os.mkfifo), ("a socket", unix_socket)])
def test_what_is_written_to_is_a_regular_file(refused, write, kind, make):
    write(
        "model: {architecture: {model_type: llama}, load_pretrained_weights: false}\ndata: {train: [{path: x.jsonl}]}\n"
    )
    Path("x.jsonl").write_text('{"text": "x"}\n')
    make("out.html")
    make("out.yaml")
    Path("link.html").symlink_to("out.html")
    for arguments in (
        ("plan", "r.yaml", "--html", "out.html"),
        ("plan", "r.yaml", "--html", "link.html"),
        ("fit", "r.yaml", "--html", "out.html"),
        ("fit", "r.yaml", "--output", "out.yaml"),
        ("data", "r.yaml", "--html", "out.html"),
        ("doctor", "--calibrate", "--output", "out.yaml"),
    ):
        assert f"cannot be written: it is {kind}" in refused(*arguments), arguments
    Path("run").mkdir()
    Path("run/environment.json").write_text("{}")
    Path("run/config.yaml").write_text("training: {}\n")
    make("run/report.html")
    assert f"cannot be written: it is {kind}" in refused("report", "run")
    assert f"cannot be written: it is {kind}" in refused("report", "run", "--output", "out.html")


def test_a_file_that_becomes_a_fifo_before_it_is_written(tmp_path):
    pipe = fifo(str(tmp_path / "out.html"))
    (problem,) = written(Path(pipe), "--html", lambda: "page")
    assert "cannot be written: No such device or address" in problem.message


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", ".lock", "config.yaml", "oom.txt", "checkpoints/step-00000002/x", "final/x"]
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_folder_is_resumed_and_replaced_if_its_files_are_regular(tmp_path, name, resume):
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "environment.json").write_text('{"packages": {}}')
    fifo(str(tmp_path / name))
    config = TrainingConfig(training={"output_dir": str(tmp_path)})
    with pytest.raises(RequestError, match=r"special files, which no run writes: .*\(a FIFO\)"):
        open_folder(config, "r", resume=resume, overwrite=not resume)


def test_a_fifo_next_to_weights_and_rows(refused, write):
    write("model: {model_name: ./base, architecture: {hidden_act: silu}}\ndata: {train: [{path: ./saved}]}\n")
    fifo("base/config.json")
    assert "config.json (a FIFO)" in refused("check", "r.yaml", "gpu=cpu")
    shutil.rmtree("base")
    save_model(Path("base"))
    fifo("saved/state.json")
    Path("saved/dataset_info.json").write_text("{}")
    assert "it is a FIFO" in refused("check", "r.yaml", "gpu=cpu")
    split_weights(Path("base"))
    index = json.loads(Path("base/model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../pipe")
    Path("base/model.safetensors.index.json").write_text(json.dumps(index))
    fifo("pipe")
    assert "it is a FIFO" in refused("check", "r.yaml", "gpu=cpu")


def test_a_report_says_which_of_its_files_are_none(write, capsys):
    for name in ("plan.json", "metrics.jsonl", "memory.json", "config.yaml"):
        fifo(f"run/{name}")
    Path("run/environment.json").write_text("{}")
    assert main(["report", "run"]) == 0
    page = Path("run/report.html").read_text()
    assert page.count("it is a FIFO, not a regular file") >= 4


def test_a_folder_with_a_fifo_is_given_to_no_library(refused, write, tmp_path):
    write(GOOD)
    fifo("base/config.json")
    message = refused("check", "r.yaml", "gpu=cpu")
    assert "contains files that are not regular: config.json (a FIFO)" in message
    shutil.rmtree("base")
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    fifo("base/tokenizer.json")
    assert "tokenizer.json (a FIFO)" in refused("predict", "base", "rows.jsonl")
