"""Ctrl-C and SIGTERM: one line about what was left, at once before the first step, and no process stays behind."""

import os
import signal
import sys
import threading
import time

import pytest

from framework.errors import Interrupted, TunesmithError
from framework.run import evaluate, trainer
from framework.run.planning import plan_pool
from framework.run.ranks.signals import announced_interrupt, noted_signals, watched_interrupt
from framework.run.setup import start as opening
from framework.run.trainer import train
from tests.run.test_trainer import config, corpus  # noqa: F401


@pytest.fixture(autouse=True)
def _interrupts_arrive():
    """A shell that starts the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(number: object = signal.SIGINT, *_: object, **__: object) -> None:
    os.kill(os.getpid(), number if isinstance(number, signal.Signals) else signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_either_signal_is_reported_by_the_innermost_handler(number):
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(Interrupted, match="inner"),
        announced_interrupt(lambda: "outer"),
        announced_interrupt(lambda: "inner"),
    ):
        press(number)
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_are_noted_and_end_nothing():
    with noted_signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        press()
        assert noted == [signal.SIGTERM, signal.SIGINT]


def test_a_dropped_session_hangs_up_as_often_as_it_likes_and_the_run_still_saves():
    """bash and the kernel send SIGHUP each, systemd SIGTERM and SIGHUP: neither is a second Ctrl-C."""
    before = signal.getsignal(signal.SIGHUP)
    with announced_interrupt(lambda: "left"), watched_interrupt() as interrupt:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            press(number)
        assert interrupt.asked
    assert signal.getsignal(signal.SIGHUP) == before
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(Interrupted, match="left"), announced_interrupt(lambda: "left"), watched_interrupt():
        [press(number) for number in numbers]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_nohup_and_handlers_of_others_stay_in_effect(number):
    came: list[int] = []
    before = signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else lambda found, _: came.append(found))
    try:
        with announced_interrupt(lambda: "left"), watched_interrupt() as interrupt, noted_signals() as noted:
            press(number)
            assert not interrupt.asked
            assert not noted
    finally:
        signal.signal(number, before)
    assert came == ([] if number == signal.SIGHUP else [number])


def test_while_rows_are_read_nothing_is_written(corpus, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(opening, "read_inputs", press)
    with pytest.raises(Interrupted, match="interrupted before the first step; nothing was written"):
        train(config(corpus, tmp_path / "run"), planner=None, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("at", ["know_reference", "try_longest_rows"])
def test_before_the_first_step_nothing_is_waited_for(corpus, tmp_path, monkeypatch, at):  # noqa: F811
    monkeypatch.setattr(trainer, at, press)
    monkeypatch.setattr(trainer, "launch_step", lambda *_: pytest.fail("went on"))
    with pytest.raises(Interrupted, match=r"interrupted before the first step, and nothing was saved; .*--overwrite"):
        train(config(corpus, tmp_path / "run"), planner=None, quiet=True)


def test_a_second_ctrl_c_leaves_at_once_and_names_the_newest_checkpoint(corpus, tmp_path, monkeypatch):  # noqa: F811
    real, steps = trainer.launch_step, []

    def pressed_twice(*arguments):
        steps.append(arguments[2])
        if len(steps) == 4:
            press()
            press()
        return real(*arguments)

    monkeypatch.setattr(trainer, "launch_step", pressed_twice)
    made = config(corpus, tmp_path / "run", training={"max_steps": 6, "save_steps": 2})
    with pytest.raises(Interrupted, match="interrupted after step 3; continue with --resume from step 2"):
        train(made, planner=None, quiet=True)


def test_an_evaluation_is_left_out_for_the_save(corpus, tmp_path, monkeypatch):  # noqa: F811
    launch_step, eval_step, steps, seen = trainer.launch_step, evaluate.eval_step, [], []

    def counted(*arguments):
        steps.append(arguments[2])
        return launch_step(*arguments)

    def pressed(*arguments):
        if steps:
            seen.append(steps[-1])
            press()
        return eval_step(*arguments)

    monkeypatch.setattr(trainer, "launch_step", counted)
    monkeypatch.setattr(evaluate, "eval_step", pressed)
    training = {"max_steps": 6, "eval_steps": 2, "per_device_eval_batch_size": 1}
    made = config(corpus, tmp_path / "run", training=training)
    with pytest.raises(Interrupted, match="stopped after step 2; continue with --resume"):
        train(made, planner=None, quiet=True)
    assert seen == [2], "one batch, and no other"
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()


def test_a_signal_that_reaches_only_this_process_ends_the_wait_for_a_plan(monkeypatch):
    monkeypatch.setattr(plan_pool, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(opening, "read_inputs", lambda *_: None)

    def interrupt() -> None:
        while not plan_pool._asked:
            time.sleep(0.01)
        time.sleep(0.1)  # it is waited for
        press()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        opening._read_and_plan(config("x", "y"), plan_pool.plan_in_subprocess, opening.NO_ROWS, opening.Console())
    assert not plan_pool._asked


def test_a_plan_that_is_waited_for_is_given_up(monkeypatch):
    """Ctrl-C may reach only this process: the child would continue for as long as its rehearsal takes."""
    monkeypatch.setattr(plan_pool, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    raised: list[BaseException] = []

    def plan() -> None:
        try:
            plan_pool.plan_in_subprocess(config("x", "y"))
        except TunesmithError as error:
            raised.append(error)

    waiting = threading.Thread(target=plan)
    waiting.start()
    while not plan_pool._asked:
        time.sleep(0.01)
    child = plan_pool._asked[0]._process
    plan_pool.abandon()
    waiting.join(200)
    assert raised
    assert child.returncode == -signal.SIGKILL
    assert not plan_pool._asked
