"""A run killed at any moment resumes to the same bits: at random times, and at each change of its folder."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
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


ROOT = Path(__file__).parents[2]
CODE = "import json, sys; from tests.faults import test_kills; test_kills.train_and_die(*json.loads(sys.argv[1]))"


def train_and_die(corpus: str, run: str, training: dict, deadly: int | None, counted: str | None) -> None:
    """Train in this process, which kills itself at the change of the run folder with that number."""
    from framework.run.checkpoints import export, read_back
    from tests.faults import commands
    from tests.run.test_trainer import train

    folder, numbers = Path(run), itertools.count()

    def change(in_part: Path | None = None) -> None:
        if next(numbers) == deadly:
            if in_part is not None:
                os.truncate(in_part, in_part.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def listen(event: str, arguments: tuple) -> None:
        if any(run in path for path in commands.touched(event, arguments)):
            change()

    def half_written(save):
        def save_file(tensors, file, *arguments, **options):
            save(tensors, file, *arguments, **options)
            change(Path(file))

        return save_file

    for module in (read_back, export):
        module.save_file = half_written(module.save_file)
    sys.addaudithook(listen)
    train(request(Path(corpus), folder, **training))
    if counted is not None:
        Path(counted).write_text(str(next(numbers)))


def begun(corpus: Path, run: Path, training: dict, deadly: int | None = None, counted: Path | None = None):
    """A process that trains."""
    given = [str(corpus), str(run), training, deadly, counted and str(counted)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-P", "-c", CODE, json.dumps(given)], env=environment)


def ended(process) -> int:
    """The exit code, which has to come in time."""
    try:
        return process.wait(SECONDS)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def uninterrupted(whole, tmp_path_factory):
    """Of each setting, how often a run changes its folder, and how many seconds it takes."""

    @cache
    def measure(setting):
        folder = tmp_path_factory.mktemp("counted")
        start = time.monotonic()
        assert ended(begun(whole.corpus, folder / "run", SAVES[setting], None, folder / "count")) == 0
        return int((folder / "count").read_text()), time.monotonic() - start

    return measure


@pytest.mark.parametrize("number", throws(1, 300, "kills at changes of the folder"))
def test_killed_at_a_change_of_its_folder(whole, uninterrupted, tmp_path, number):
    dice = random.Random(number)
    setting = dice.randrange(len(SAVES))
    deadly = dice.randrange(uninterrupted(setting)[0])
    assert ended(begun(whole.corpus, tmp_path / "run", SAVES[setting], deadly)) == -signal.SIGKILL
    go_on(whole, tmp_path / "run", **SAVES[setting])


@pytest.mark.slow
@pytest.mark.parametrize("number", throws(1, 60, "kills at moments"))
def test_killed_at_any_moment(whole, uninterrupted, tmp_path, number):
    dice = random.Random(number)
    setting = dice.randrange(len(SAVES))
    process = begun(whole.corpus, tmp_path / "run", SAVES[setting])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(dice.random() * uninterrupted(setting)[1])
    process.kill()
    assert ended(process) in (0, -signal.SIGKILL)
    go_on(whole, tmp_path / "run", **SAVES[setting])
