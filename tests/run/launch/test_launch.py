"""`--nproc`: this process starts the ranks, watches over them and says what none of them can."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import DoesNotFit, RequestError
from framework.memory.ledger import HostUse
from framework.run.launch import launch
from framework.run.launch.launch import require_devices
from framework.run.planning import capacity as room
from framework.run.ranks.coordinator import ALIVE, require_world
from framework.run.trainer import train
from framework.schema.config import TrainingConfig
from tests.reports.plans import GIB, on
from tests.run.several import ROOT
from tests.run.test_trainer import config, corpus, metrics  # noqa: F401

RECIPE = """
training: {{task: pretrain, max_steps: 100000, per_device_train_batch_size: 2, global_batch_size: 4, save_steps: 20}}
model:
  architecture: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}}
  load_pretrained_weights: false
  tokenizer: {{train: bpe, vocab_size: 300}}
  model_max_length: 32
data: {{train: [{{path: {corpus}}}]}}
gpu: {{name: cpu, count: {count}}}
"""


def devices(count: int, name: str = "cpu") -> TrainingConfig:
    return TrainingConfig.model_validate({"gpu": {"name": name, "count": count}})


def test_a_config_for_two_devices_is_not_trained_by_one_process(corpus, tmp_path):  # noqa: F811
    """Not one process on one card, silently."""
    made = config(corpus, tmp_path / "run")
    two = made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})
    with pytest.raises(RequestError, match="2 devices are asked for, 1 process takes part"):
        train(two, planner=None, quiet=True)
    assert not (tmp_path / "run").exists()


def test_more_processes_than_cards_are_refused():
    require_devices(devices(64))
    with pytest.raises(RequestError, match="64 processes are asked for, and this machine has"):
        require_devices(devices(64, "h100_80gb"))


def test_written_and_started_must_be_the_same_number(write, capsys, corpus):  # noqa: F811
    recipe = write(RECIPE.format(corpus=corpus, count=3))
    assert main(["train", str(recipe), "--nproc", "2"]) == 2
    error = capsys.readouterr().err
    assert "3 cards are written, but 2 processes are started" in error
    assert "r.yaml" in error


def test_what_all_ranks_need_of_the_host_is_refused_before_any_starts(monkeypatch, corpus, tmp_path):  # noqa: F811
    """There would be room for one."""
    made = config(corpus, tmp_path / "run")
    two = made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})
    host = HostUse(processes=2, other_bytes=30 * GIB, pinned_bytes=24 * GIB)
    plan = replace(on(24.0), host_bytes=40 * GIB, host=host)
    monkeypatch.setattr(launch, "plan_in_subprocess", lambda config: plan)
    monkeypatch.setattr(room, "available_host_bytes", lambda: 60 * GIB)
    with pytest.raises(DoesNotFit, match=r"70.00 GiB of host memory for 2 processes \(48.00 GiB of it pinned\)"):
        launch.launch(two, "run", [])


def test_a_plan_over_the_card_is_tried_where_ranks_shrink(monkeypatch, corpus, tmp_path):  # noqa: F811
    monkeypatch.setattr(launch, "plan_in_subprocess", lambda config: on(1.0))
    monkeypatch.setattr(launch, "TCPStore", lambda *args, **kwargs: pytest.fail("started"))
    for word, failure in (("stop", DoesNotFit), ("shrink", pytest.fail.Exception)):
        made = config(corpus, tmp_path / "run", training={"on_oom": word})
        two = made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})
        with pytest.raises(failure):
            launch.launch(two, "run", [])


def test_as_many_as_asked_for_are_welcome():
    from framework.build.ranks import Ranks

    require_world(devices(2), Ranks(world=2))


@pytest.mark.parametrize(("arrived", "raises"), [((0,), True), ((0, 1), False)])
def test_ctrl_c_goes_to_the_ranks_once_all_know_what_to_do_about_it(arrived, raises, monkeypatch):
    """Before, they are importing modules: there is nothing to save, and each would say that it was interrupted."""
    monkeypatch.setattr(launch, "GRACE", 60.0)
    coordinator = launch.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for rank in arrived:
        coordinator.set(f"{ALIVE}/{rank}", "")
    rank = (
        "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); print(flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", rank]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
            assert launch._watched(ranks, coordinator, [signal.SIGINT]) == 130
        assert [process.poll() for process in ranks] == ([None, None] if raises else [130, 130])
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.fresh_process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 4), (signal.SIGINT, 130)])
def test_a_rank_that_is_killed_is_named_and_ctrl_c_saves(number, code, write, corpus, tmp_path):  # noqa: F811
    """SIGKILL to rank 1: all end within 30 s, the last checkpoint is whole. SIGINT to the launcher: saved, all end."""
    recipe = write(RECIPE.format(corpus=corpus, count=2))
    command = [sys.executable, "-m", "framework", "train", str(recipe), "training.output_dir=run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    saved = Path("run/checkpoints/step-00000020")
    end = time.monotonic() + 200
    while not saved.exists() and time.monotonic() < end and launcher.poll() is None:
        time.sleep(0.2)
    os.kill(_rank(launcher.pid, 1) if number == signal.SIGKILL else launcher.pid, number)
    begun = time.monotonic()
    _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == code, error
    assert time.monotonic() - begun < 30
    assert ("rank 1 was killed (SIGKILL)" in error) == (number == signal.SIGKILL)
    assert error.splitlines()[-1].startswith("stopped after step") == (number == signal.SIGINT)
    assert ("continue with --resume" in error) == (number == signal.SIGINT)
    newest = max(saved.parent.glob("step-????????"))
    assert (newest / "random-00001.json").exists()


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_say_so_and_end(write, corpus):  # noqa: F811
    recipe = write(RECIPE.format(corpus=corpus, count=2))
    command = [sys.executable, "-m", "framework", "train", str(recipe), "training.output_dir=run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not Path("run/checkpoints/step-00000020").exists() and time.monotonic() < end and launcher.poll() is None:
        time.sleep(0.2)
    launcher.kill()
    _, error = launcher.communicate(timeout=60)  # which waits for the ranks, who write to the same pipe
    assert "error the process that started the ranks was killed: all end; checkpoints are intact" in error
    assert "internal fault" not in error


def _rank(launcher: int, rank: int) -> int:
    """The process of a rank, a child of the launcher."""
    import psutil

    ranks = [child for child in psutil.Process(launcher).children() if child.environ().get("RANK") == str(rank)]
    return int(ranks[0].pid)
