"""Hooks of a Python program: their arguments, and that their exceptions lose no work."""

import pytest

from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.hooks import Hooks
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401


class Stop(Exception):
    """Exception of a hook in these tests."""


def stop_at(step):
    def look(line):
        if line["step"] == step:
            raise Stop(f"seen {step}")

    return look


@pytest.mark.parametrize("async_save", [False, True])
def test_each_step_evaluation_and_checkpoint_is_reported_once(corpus, tmp_path, async_save):  # noqa: F811
    steps, evals, saved = [], [], []
    training = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "async_save": async_save, "save_total_limit": 9}
    hooks = Hooks(steps.append, evals.append, lambda folder: saved.append((folder.name, folder.is_dir())))
    result = train(config(corpus, tmp_path / "run", training=training), hooks=hooks)
    assert {line["step"]: line["loss"] for line in steps} == metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert tuple(evals) == result.evals
    assert saved == [(f"step-0000000{step}", True) for step in (2, 4, 6)]


def test_an_exception_of_a_hook_ends_the_run_after_saving_it(corpus, tmp_path):  # noqa: F811
    whole = config(corpus, tmp_path / "whole", training={"max_steps": 6})
    train(whole)
    made, messages = config(corpus, tmp_path / "run", training={"max_steps": 6}), []
    with pytest.raises(Stop) as raised:
        train(made, hooks=Hooks(stop_at(3), on_save=messages.append))
    step = int(checkpoints(tmp_path / "run")[-1].name.removeprefix("step-"))
    assert step in (3, 4)  # the device may have been at the next one
    assert f"stopped after step {step}; continue with --resume" in raised.value.__notes__[0]
    assert messages == []  # no hook is called once one has failed
    train(made, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_an_exception_after_the_last_step_comes_when_the_run_is_complete(corpus, tmp_path):  # noqa: F811
    made = config(corpus, tmp_path / "run", training={"max_steps": 3})
    with pytest.raises(Stop) as raised:
        train(made, hooks=Hooks(stop_at(3)))
    assert raised.value.__notes__ == [f"the run is complete in {tmp_path / 'run'}"]
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_hook_cannot_change_what_is_logged(corpus, tmp_path):  # noqa: F811
    train(config(corpus, tmp_path / "run", training={"max_steps": 2}), hooks=Hooks(lambda line: line.clear()))
    assert sorted(metrics(tmp_path / "run")) == [1, 2]
