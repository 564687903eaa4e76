"""`train -m`: runs are checked before the first starts, each has its folder and exit code, and one table lists all.

A stand-in that reads the overrides replaces `tunesmith train` wherever a real run would show nothing more.
"""

import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import framework
from framework.checks import PLAN, check_request
from framework.cli import main
from framework.compose.sweep import Sweep, sweep_of
from framework.run.launch.sweep import SweptRun, own_cards, worst
from tests.cli.test_train import RECIPE, losses
from tests.forks import ADDRESS

GOOD = """
training: {task: pretrain, max_steps: 2, output_dir: swept}
model: {model_name: a/b}
data: {train: [{path: user/set}]}
"""
STAND_IN = """
import json, os, pathlib, signal, sys
overrides = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder, seed = pathlib.Path(overrides["training.output_dir"]), int(overrides["training.seed"])
print("words", *sys.argv[1:])
print("cards", os.environ.get("CUDA_VISIBLE_DEVICES"), file=sys.stderr)
if seed == 130:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
if seed < 10:
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True, exist_ok=True)
    rows = [{"step": 1, "loss": 9}, {"step": 2, "loss": seed + 0.5}, {"step": 2, "eval_loss": seed + 0.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "environment.json").write_text('{"packages": {}}')
    (folder / "memory.json").write_text('{"measured": {"allocated_bytes": 1073741824}}')
print("error no rows", file=sys.stderr)
sys.exit(0 if seed < 10 else seed - 10)
"""


@pytest.fixture
def command(write, capsys, monkeypatch):
    """Runs `train r.yaml -m` with a stand-in for each run; returns exit code, stdout and stderr."""
    write(GOOD)
    monkeypatch.delenv(ADDRESS, raising=False)  # its parent is the sweep, to which it sends a signal
    stand_in = [sys.executable, "-c", STAND_IN]
    monkeypatch.setattr(SweptRun, "command", lambda run, job: [*stand_in, *run.arguments(job)[1:]])

    def run_command(*arguments: str):
        code = main(["train", "r.yaml", "-m", "gpu=cpu", *arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err, captured.err
        return code, captured.out, captured.err

    return run_command


def test_the_table_tells_overrides_losses_peak_exit_code_and_folder(command):
    code, out, err = command("training.seed=1,2", "training.learning_rate=1e-4")
    assert code == 0, out + err
    seconds = [round(json.loads(Path(f"swept/results/{number}.json").read_text())["seconds"]) for number in (0, 1)]
    assert [line.split() for line in out.splitlines()[1:-1]] == [
        ["0", "0", "2", "1.5000", "1.2500", "1.00", f"{seconds[0]}", "0", "training.seed=1"],
        ["1", "0", "2", "2.5000", "2.2500", "1.00", f"{seconds[1]}", "1", "training.seed=2"],
    ]
    own = f"training.seed=2 training.learning_rate=1e-4 training.output_dir={Path('swept/1').absolute()}"
    assert f"run 1: tunesmith train r.yaml gpu=cpu {own}\n" in err
    assert f"[1] words gpu=cpu {own}\n" in err
    assert f"words gpu=cpu {own}\n" in Path("swept/results/1.log").read_text()


def test_a_run_that_fails_stops_no_other_and_the_worst_code_is_the_sweeps(command):
    code, out, err = command("training.seed=12,1,14", "--json", "--quiet")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (4, 4)
    assert [run["exit_code"] for run in document["runs"]] == [2, 0, 4]
    assert [run["loss"] for run in document["runs"]] == [None, 1.5, None]
    assert document["runs"][1]["folder"] == str(Path("swept/1").absolute())
    assert "[0]" not in err
    _, out, _ = command("training.seed=12", "training.max_steps=1,2", "hydra.sweep.dir=other", "--json")
    assert [error["message"] for error in json.loads(out)["errors"]] == ["run 0: no rows", "run 1: no rows"]


def test_no_further_run_begins_after_a_failure_when_asked_or_after_an_interrupt(command):
    code, out, _ = command("training.seed=1,14,2", "--fail-fast", "--json")
    assert (code, [run["exit_code"] for run in json.loads(out)["runs"]]) == (4, [0, 4, None])
    code, out, _ = command("training.seed=130,2", "hydra.sweep.dir=other")
    assert code == 130
    assert "not begun" in out.splitlines()[2]


@pytest.mark.slow
def test_an_interrupt_between_two_runs_lets_none_begin(command, monkeypatch):
    keep = SweptRun._run

    def run(self, job, log, environment):
        code = keep(self, job, log, environment)
        os.kill(os.getpid(), signal.SIGINT)
        return code

    monkeypatch.setattr(SweptRun, "_run", run)
    code, out, err = command("training.seed=1,2", "--json")
    assert (code, [one["exit_code"] for one in json.loads(out)["runs"]]) == (130, [0, None])
    assert "no further run starts" in err
    monkeypatch.setattr(SweptRun, "_run", keep)
    code, out, _ = command("training.seed=1,2", "--resume", "--json")
    assert (code, [one["exit_code"] for one in json.loads(out)["runs"]]) == (0, [0, 0])


def test_all_that_is_wrong_is_reported_before_anything_is_begun(command):
    code, out, err = command("training.seed=1,2,3", "training.learning_rate=-1,1e-4", "trainng.a=1")
    assert (code, out) == (2, "")
    assert "cannot be -1 (run 0: training.seed=1 training.learning_rate=-1 and 2 more)" in err
    assert err.count("error trainng.a") == 1
    assert "trainng.a` (" not in err
    assert not Path("swept").exists()


def test_a_folder_that_is_taken_is_refused_resumed_or_replaced(command):
    assert command("training.seed=1,12")[0] == 2
    code, _, err = command("training.seed=1,2")
    assert code == 2
    assert "swept/0 already holds a run" in err.replace(str(Path.cwd()) + "/", "")
    code, _, err = command("training.seed=1,2", "--resume", "--allow", "data.workers")
    assert code == 0
    lines = [line for line in err.splitlines() if "] words" in line]
    assert ["--resume" in line for line in lines] == [True, False]
    assert all("--allow data.workers" in line for line in lines)
    code, _, err = command("training.seed=1,2", "--overwrite", "--nproc", "1")
    assert code == 0
    assert err.count("--overwrite --nproc 1") == 2 * len(["told", "run"])


def test_a_dry_run_writes_nothing(command):
    code, out, _ = command("training.seed=1,2", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["folder"] == str(Path("swept").absolute())
    assert json.loads(out)["runs"][1]["folder"] == str(Path("swept/1").absolute())
    assert [path.name for path in Path().iterdir()] == ["r.yaml"]


def test_while_runs_are_made_they_alone_say_what_is_being_done(command, monkeypatch):
    messages = []
    monkeypatch.setattr("framework.cli.sweep.now", messages.append)
    monkeypatch.setattr("framework.cli.sweep._launch", lambda *_: messages.append("launched") or [])
    command("training.seed=1,2")
    assert messages == ["", "launched"]


@pytest.mark.slow
def test_a_launcher_that_breaks_is_reported_and_its_runs_are_lost(command, monkeypatch):
    def run(self, job, log, environment):
        raise OSError("no space")

    monkeypatch.setattr(SweptRun, "_run", run)
    code, out, err = command("training.seed=1,2", "--json")
    assert (code, [run["exit_code"] for run in json.loads(out)["runs"]]) == (4, [4, 4])
    assert "the launcher basic failed: OSError: no space" in err
    code, out, err = command("training.seed=1,2", "hydra.sweep.dir=/proc/swept")
    assert (code, out) == (2, "")
    assert "/proc/swept cannot be created" in err


def test_a_sweeper_that_does_nothing_is_no_success(command, monkeypatch):
    monkeypatch.setattr(Sweep, "chosen", lambda sweep, kind: "another")
    assert command("training.seed=interval(1,2)")[0] == 4
    assert "no key `trainng`" in command("training.seed=interval(1,2)", "trainng.x=1")[2].replace(
        "trainng.x", "trainng"
    )


def test_a_sweep_is_started_by_one_process(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "started by one" in command("training.seed=1,2")[2]


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 3, 2), 3), ((4, 1, 3), 1), ((1, 130, None), 130), ((), 0), ((None,), 0)]
)
def test_the_worst_code(codes, code):
    assert worst(codes) == code


def test_runs_at_a_time_have_cards_of_their_own(monkeypatch, tmp_path):
    from framework.memory.cards import InstalledCard

    cards = [InstalledCard(str(number), f"GPU-{number}", "H100", 81559, "9.0", False) for number in range(3)]
    monkeypatch.setattr("framework.run.launch.sweep.installed_cards", lambda: cards)
    monkeypatch.setattr("framework.run.launch.sweep._PAUSE", 0.01)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    waited = []
    with own_cards(2, waited.append) as first, own_cards(1, waited.append) as second:
        assert (first, second) == ({"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, {"CUDA_VISIBLE_DEVICES": "GPU-2"})

        class Waits(Exception):
            pass

        def stop() -> None:
            raise Waits

        with pytest.raises(Waits), own_cards(1, stop):
            pass
    with own_cards(3, waited.append) as all_of_them:
        assert all_of_them == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2"}
    for count in (0, 4):
        with own_cards(count, waited.append) as environment:
            assert environment == {}
    assert not waited


@pytest.mark.slow
def test_the_page_tells_commands_whose_runs_compose():
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    typed = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("tunesmith train")]
    assert len(typed) == 5
    for recipe, *arguments in typed:
        sweep = sweep_of([word for word in arguments if not word.startswith("-")])
        known = sweep if sweep.chosen("launcher") == "basic" else replace(sweep, settings=())
        jobs = known.outline("runs/x").jobs
        assert jobs
        for job in jobs:
            assert not check_request(recipe, sweep.overrides_of(job), needs=PLAN).problems


@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
@pytest.mark.slow
def test_a_real_sweep_learns_what_its_printed_commands_learn(launcher, write, monkeypatch, capsys):
    package = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}.get(launcher)
    if package:
        pytest.importorskip(f"hydra_plugins.{package}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(framework.__file__).parents[1]), *sys.path]))
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    write(RECIPE)
    assert (
        main(["train", "r.yaml", "-m", "gpu=cpu", "training.learning_rate=1e-4,2e-2", f"hydra/launcher={launcher}"])
        == 0
    )
    assert main(["train", "r.yaml", "gpu=cpu", "training.learning_rate=0.02", "training.output_dir=alone"]) == 0
    assert losses("run/1") == losses("alone") != losses("run/0")
    assert f"{losses('alone')[-1]:.4f}" in capsys.readouterr().out


def test_what_one_run_reads_no_other_may_remove(command, write):
    """The second run's model is the first run's export, which `--overwrite` would remove before it is read."""
    assert command("training.seed=1,2")[0] == 0
    final = Path("swept") / "0" / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    code, _, err = command("training.seed=1,2", f"model.model_name={final}", "--overwrite")
    assert code == 2
    assert "--overwrite would remove before it is read" in err
    assert (final / "config.json").exists()
