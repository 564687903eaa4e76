"""Killed at any moment, a run goes on to the same bits: at times drawn at random, and at each change of its folder."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.faults.profile import throws
from tests.faults.tiny_runs import go_on, request

SECONDS = 120
"""That a run of nine steps may take on a machine with much else to do."""
SAVES = [{}, {"async_save": True}, {"save_steps": 1}]
"""Settings that change when is saved and how, and nothing that is learned."""


def _train(corpus: Path, folder: Path, training: dict, deadly: int | None, counted: Path | None) -> None:
    """Train in this process, which kills itself at the change of the run folder with that number."""
    from framework.run.checkpoints import export, read_back
    from tests.faults import commands
    from tests.run.test_trainer import train

    numbers = itertools.count()

    def change(in_part: Path | None = None) -> None:
        if next(numbers) == deadly:
            if in_part is not None:
                os.truncate(in_part, in_part.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def listen(event: str, arguments: tuple) -> None:
        if any(str(folder) in path for path in commands.touched(event, arguments)):
            change()

    def half_written(save):
        def save_file(tensors, file, *arguments, **options):
            save(tensors, file, *arguments, **options)
            change(Path(file))

        return save_file

    for module in (read_back, export):
        module.save_file = half_written(module.save_file)
    sys.addaudithook(listen)
    train(request(corpus, folder, **training))
    if counted is not None:
        counted.write_text(str(next(numbers)))


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with everything imported, and with no thread of this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["framework.run.trainer", "tests.run.test_trainer", __name__])

    def start(*arguments):
        process = context.Process(target=_train, args=arguments)
        process.start()
        return process

    return start


def ended(process) -> int:
    process.join(SECONDS)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(processes, whole, tmp_path_factory):
    """Of each setting, how often a run changes its folder, and how many seconds it takes."""

    @cache
    def measure(setting):
        folder = tmp_path_factory.mktemp("counted")
        start = time.monotonic()
        assert ended(processes(whole.corpus, folder / "run", SAVES[setting], None, folder / "count")) == 0
        return int((folder / "count").read_text()), time.monotonic() - start

    return measure


@pytest.mark.parametrize("number", throws(1, 300, "kills at changes of the folder"))
def test_killed_at_a_change_of_its_folder(processes, whole, uninterrupted, tmp_path, number):
    dice = random.Random(number)
    setting = dice.randrange(len(SAVES))
    deadly = dice.randrange(uninterrupted(setting)[0])
    process = processes(whole.corpus, tmp_path / "run", SAVES[setting], deadly, None)
    assert ended(process) == -signal.SIGKILL
    go_on(whole, tmp_path / "run", **SAVES[setting])


@pytest.mark.parametrize("number", throws(1, 60, "kills at moments"))
def test_killed_at_any_moment(processes, whole, uninterrupted, tmp_path, number):
    dice = random.Random(number)
    setting = dice.randrange(len(SAVES))
    process = processes(whole.corpus, tmp_path / "run", SAVES[setting], None, None)
    process.join(dice.random() * uninterrupted(setting)[1])
    process.kill()
    assert ended(process) in (0, -signal.SIGKILL)
    go_on(whole, tmp_path / "run", **SAVES[setting])
