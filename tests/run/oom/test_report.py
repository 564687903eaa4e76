"""Out of memory in a run: the messages, the files, and the savings of the levers."""

import json
import os
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from framework.build.place import real_place
from framework.cli import main
from framework.compose import load
from framework.errors import OutOfMemory, RequestError
from framework.memory.cards import detect, read_card
from framework.memory.explain import explain
from framework.memory.explain.moves import propose
from framework.memory.planning import make_plan
from framework.run import step as step_module
from framework.run.oom import report as out_of_memory
from framework.run.oom.report import PlannedRun, Watch, explained_failures, is_memory_failure
from framework.run.planning import plan_pool
from framework.run.planning.what_if import lever_savings
from framework.run.record.meter import Meter
from framework.run.record.run_folder import SNAPSHOT
from framework.run.rehearsal.rehearse import record
from framework.schema.gpu import GPUParams
from tests.card import capped_card
from tests.cli.test_train import RECIPE
from tests.run.test_trainer import config, corpus, train  # noqa: F401
from tests.tiny import GPT2, tiny_config

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 21.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)


@contextmanager
def failing(monkeypatch, phase: str, step: int, error: Exception):
    """The step raises when the phase of that step begins."""
    original = step_module.launch_step

    def launch_step(assembly, micro_batches, number, observe, before_update):
        def watch(name):
            observe(name)
            if (name, number) == (phase, step):
                raise error

        return original(assembly, micro_batches, number, watch, before_update)

    monkeypatch.setattr("framework.run.trainer.launch_step", launch_step)
    yield


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "optimizer_step"])
def test_the_phase_and_the_step_are_kept_and_explained(corpus, tmp_path, monkeypatch, phase):  # noqa: F811
    folder = tmp_path / "run"
    with failing(monkeypatch, phase, 3, torch.OutOfMemoryError(FULL)), pytest.raises(OutOfMemory) as raised:
        train(config(corpus, folder))
    assert raised.value.exit_code == 4
    named = "the optimizer step" if phase == "optimizer_step" else phase
    assert str(raised.value).startswith(f"out of memory in {named} (step 3): ")
    assert f"kept in {folder}: oom.txt" in str(raised.value)
    found = explain(folder)
    assert (found.phase, found.circumstances.step, found.cause) == (phase, 3, "capacity")
    assert found.message.request_bytes == 2 * 2**30
    assert len(found.circumstances.floors) == 2
    assert "launch_step" in (folder / "oom.txt").read_text()


def test_the_first_optimizer_step_is_named(corpus, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / "run"
    with failing(monkeypatch, "optimizer_step", 1, torch.OutOfMemoryError(FULL)), pytest.raises(OutOfMemory) as raised:
        train(config(corpus, folder))
    assert str(raised.value).startswith("out of memory in the first optimizer step (step 1)")
    assert explain(folder).is_first_step


def test_a_run_that_resumes_keeps_the_report_under_the_name_of_its_step(corpus, tmp_path, monkeypatch):  # noqa: F811
    """A folder's explanation is of its last stop, if the run has not continued since."""
    folder = tmp_path / "run"
    for earlier in ([], ["oom-step-00000003.txt"]):
        with (
            monkeypatch.context() as patched,
            failing(patched, "forward", 3, torch.OutOfMemoryError(FULL)),
            pytest.raises(OutOfMemory),
        ):
            train(config(corpus, folder), resume=bool(earlier))
        assert explain(folder).circumstances.step == 3
        assert sorted(file.name for file in folder.glob("oom*")) == [*earlier, "oom.txt"]
    (folder / SNAPSHOT).write_bytes(b"what a card would leave")
    train(config(corpus, folder), resume=True)
    assert sorted(file.name for file in folder.glob("oom*")) == [
        "oom-step-00000003-2.txt",
        "oom-step-00000003.txt",
        "oom_snapshot-step-00000003-2.pickle",
    ]
    with pytest.raises(
        RequestError, match=r"continued since it stopped: oom-step-00000003\.txt, oom-step-00000003-2"
    ) as raised:
        explain(folder)
    assert raised.value.problems[0].nearest == str(folder / "oom-step-00000003-2.txt")
    assert explain(folder / "oom-step-00000003-2.txt").cause == "capacity"
    train(config(corpus, folder), overwrite=True)
    assert not list(folder.glob("oom*"))


def test_while_loading_nothing_is_written(corpus, tmp_path, monkeypatch):  # noqa: F811
    def fail(*_):
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr("framework.run.setup.start.assemble", fail)
    with pytest.raises(OutOfMemory, match=r"^out of memory in load: "):
        train(config(corpus, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(FULL), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError(FULL), False),
    ],
)
def test_which_errors_are_of_memory(error, expected):
    assert is_memory_failure(error) is expected


def test_another_error_passes_unchanged():
    watch = Watch(Meter(real_place(torch.device("cpu"))))
    with pytest.raises(ValueError, match=r"^mine$"), explained_failures(watch, None, None):
        raise ValueError("mine")


def test_a_larger_micro_batch_than_any_before_is_a_spike(tmp_path):
    watch = Watch(Meter(real_place(torch.device("cpu"))))
    for step in (1, 2, 3):
        watch.begin(step, [400])
        watch.end()
    watch.begin(4, [400, 2044])
    watch.meter.observe("backward")
    with pytest.raises(OutOfMemory, match=r"\[spike\]"), explained_failures(watch, None, tmp_path):
        raise torch.OutOfMemoryError(FULL)
    found = explain(tmp_path)
    assert (found.cause, found.circumstances.batch, found.circumstances.largest_batch) == ("spike", 2044, 400)


def test_savings_are_those_of_a_rehearsal_with_the_lever_moved(monkeypatch):
    monkeypatch.setattr("framework.run.planning.what_if.MOST_SECONDS", 600)
    settings = {"optimizer": "adamw_torch", "per_device_train_batch_size": 8, "global_batch_size": 8, "max_steps": 2}
    config_ = tiny_config(training=settings, data={"eval_fraction": 0.5})
    plan = make_plan(record(config_))
    some = {"training.per_device_train_batch_size", "training.enable_gradient_checkpointing"}
    some |= {"training.optimizer_offload"}
    proposals = {proposal.override: proposal for proposal in propose(config_) if proposal.key in some}
    monkeypatch.setattr("framework.run.planning.what_if.propose", lambda _: [*proposals.values()])
    levers = lever_savings(config_, plan)
    assert {lever["override"] for lever in levers} == {*proposals}
    peaks = {phase.name: phase.allocated_bytes for phase in plan.phases}
    chosen = [levers[0], *(lever for lever in levers if lever["key"].endswith("train_batch_size"))]
    for lever in chosen:
        other = make_plan(record(proposals[lever["override"]].config))
        assert lever["saves"] == {
            **{phase.name: peaks[phase.name] - phase.allocated_bytes for phase in other.phases},
            "host": plan.host_bytes - other.host_bytes,
        }
    batch = chosen[1]["saves"]
    assert batch["backward"] > 0
    assert batch["optimizer_step"] < 0.01 * peaks["optimizer_step"]  # it does not help there


def test_savings_that_are_not_known_in_time_have_no_figure(monkeypatch):
    monkeypatch.setattr("framework.run.planning.what_if.MOST_SECONDS", -1)
    levers = lever_savings(tiny_config(), make_plan(record(tiny_config())))
    assert levers
    assert all(lever["saves"] is None for lever in levers)


def test_where_no_process_can_be_started_the_failure_is_reported_without_figures(monkeypatch):
    monkeypatch.setattr(plan_pool, "_COMMAND", ["/nowhere/python"])
    assert {lever["saves"] for lever in lever_savings(tiny_config(), make_plan(record(tiny_config())))} == {None}


def test_a_rank_for_which_others_hang_does_not_wait_for_savings(monkeypatch):
    monkeypatch.setattr(out_of_memory, "lever_savings", lambda *_: pytest.fail("it waits"))
    planned = PlannedRun(tiny_config(), make_plan(record(tiny_config())), is_alone=False)
    assert planned.with_savings(None).levers is None


@pytest.fixture
def recipe(write, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    return write(RECIPE)


def test_a_run_keeps_the_savings_of_every_lever_and_explain_ranks_them(recipe, capsys, monkeypatch):
    """From the command line to the ranked overrides, for a failure in the optimizer's step; exit 4. Blocks are not
    compiled, which takes as long as all other rehearsals."""
    monkeypatch.setattr("framework.run.planning.what_if.MOST_SECONDS", 600)
    plain = [proposal for proposal in propose(load(recipe, ["gpu=cpu"])) if not proposal.config.training.compile]
    monkeypatch.setattr("framework.run.planning.what_if.propose", lambda _: plain)
    with failing(monkeypatch, "optimizer_step", 2, torch.OutOfMemoryError(FULL)):
        assert main(["train", str(recipe), "gpu=cpu"]) == 4
    assert "out of memory in the optimizer step (step 2)" in capsys.readouterr().err
    levers = json.loads(Path("run", "plan.json").read_text())["levers"]
    assert len(levers) > 5
    assert all(lever["saves"] is not None for lever in levers)
    assert main(["explain", "run", "--json"]) == 0
    moves = json.loads(capsys.readouterr().out)["moves"]
    assert moves
    assert [move["saves_bytes"] for move in moves] == sorted((m["saves_bytes"] for m in moves), reverse=True)
    assert not moves[0]["override"].startswith("training.per_device_train_batch_size")
    for move in moves:
        assert main(["check", "run/config.yaml", *move["override"].split(), "--quick"]) == 0, move


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_card_that_really_runs_out(corpus, tmp_path, checkpointing):  # noqa: F811
    """On a card that is made small: weights and gradients of 100M parameters fit, AdamW's states do not."""
    name = detect()
    assert name is not None, "an unknown card"
    shape = {**GPT2, "n_embd": 1024, "n_layer": 8, "n_head": 16}
    settings = {"enable_gradient_checkpointing": checkpointing, "optimizer": "adamw_torch_fused"}
    asked = config(corpus, tmp_path / "run", architecture=shape, training=settings)
    asked = asked.model_copy(update={"gpu": GPUParams.model_validate(read_card(name))})
    failed = pytest.raises(OutOfMemory, match=r"^out of memory in the first optimizer step \(step 1\): ")
    with capped_card(1.25 * 2**30) as limit, failed:
        train(asked)
    found = explain(tmp_path / "run")
    assert (found.phase, found.cause, found.is_first_step) == ("optimizer_step", "capacity", True)
    assert found.message.allowed_bytes == pytest.approx(limit, rel=0.01)
    assert "PyTorch CUDA memory summary" in (tmp_path / "run" / "oom.txt").read_text()
    with (tmp_path / "run" / SNAPSHOT).open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["segments"]
    actions = {event["action"] for trace in snapshot["device_traces"] for event in trace}
    assert {"alloc", "oom"} <= actions
