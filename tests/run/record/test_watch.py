"""Memory growth from step to step: reported within 20 steps, and distinguished from varying lengths."""

import json
import mmap
import random
import re

import pytest
import torch

from framework.build.place import real_place
from framework.memory.explain.causes import growth_per_step
from framework.run import trainer
from framework.run.oom import report as out_of_memory
from framework.run.oom.report import Growth, Watch
from framework.run.record.meter import Meter
from framework.run.step import launch_step
from tests.run.test_trainer import config, corpus, train  # noqa: F401

MIB, GIB = 1 << 20, 1 << 30
STEPS = 20


@pytest.fixture
def watch(monkeypatch):
    """`watch(floors, headroom)`: (step, growth) of each report while these floors are observed."""

    def see(floors, headroom=10 * GIB):
        seen, messages = iter(floors), []
        monkeypatch.setattr(out_of_memory, "held_bytes", lambda place: next(seen))
        monkeypatch.setattr(out_of_memory, "headroom_bytes", lambda meter: headroom)
        watcher = Watch(Meter(real_place(torch.device("cpu"))))
        for step in range(1, len(floors) + 1):
            watcher.begin(step, [64])
            if (growth := watcher.end()) is not None:
                messages.append((step, growth))
        return messages

    return see


def test_a_leak_is_reported_within_20_steps_with_its_rate_and_the_step_of_death(watch):
    warnings = watch([GIB + 40 * MIB * step for step in range(60)], headroom=40 * MIB * 100 + 5)
    assert warnings == [(15, Growth(40 * MIB, 15, 115))]
    assert str(warnings[0][1]).startswith(
        "memory that stays allocated grows by 40.0 MiB per step: at this rate it is full at step"
    )


@pytest.mark.parametrize(("leak", "noise"), [(20, 100), (40, 100), (5, 5)])
def test_a_leak_is_reported_beneath_lengths_that_vary(watch, leak, noise):
    drawn = random.Random(leak)
    floors = [GIB + leak * MIB * step + drawn.randrange(noise * MIB) for step in range(40)]
    step, growth = watch(floors)[0]
    assert step <= STEPS
    assert growth.per_step == pytest.approx(leak * MIB, rel=0.5)


def test_a_leak_that_begins_late_is_reported_within_20_steps(watch):
    warnings = watch([GIB] * 100 + [GIB + 40 * MIB * step for step in range(40)])
    assert 100 < warnings[0][0] <= 100 + STEPS


@pytest.mark.parametrize(
    "floors",
    [
        [GIB + random.Random(7).randrange(512) * MIB] * 60,
        [GIB + length * MIB for length in random.Random(3).choices(range(512), k=400)],
        [GIB + 64 * MIB * (step % 7) for step in range(100)],
        [GIB] * 10 + [3 * GIB] * 50,
        [GIB - int(GIB * 0.8**step) for step in range(60)],
        [int(5000 * MIB * (1 - 0.9**step)) for step in range(120)],
        [int(5000 * MIB * (1 - 0.95**step)) for step in range(120)],
        [GIB] * 8 + [4 * GIB] * 8 + [7 * GIB] * 150,
        [GIB + 512 * MIB * sum(step >= at for at in (3, 9, 30, 100)) for step in range(160)],
        [GIB - 40 * MIB * step for step in range(20)],
        [GIB + 4096 * step for step in range(60)],
    ],
    ids=["level", "lengths", "cycle", "once", "rest", "slowly", "slower", "stairs", "records", "falls", "counters"],
)
def test_what_is_no_leak_is_not_reported(watch, floors):
    assert watch(floors) == []


@pytest.mark.parametrize("noise", [1, 256])
@pytest.mark.parametrize("every", [8, 25, 40])
def test_a_leak_in_stairs_is_reported_at_the_third(watch, every, noise):
    """3 GiB more every so many steps, such as after each evaluation: reported once, within two steps of the third."""
    drawn = random.Random(every)
    floors = [GIB + step // every * 3 * GIB + drawn.randrange(noise * MIB) for step in range(5 * every)]
    warnings = watch(floors, headroom=100 * GIB)
    assert len(warnings) == 1
    step, growth = warnings[0]
    assert 3 * every < step <= 3 * every + 2
    assert growth.per_step == pytest.approx(3 * GIB / every, rel=0.1)


def test_it_is_reported_again_when_the_end_is_near(watch, monkeypatch):
    room = {"left": 4000 * MIB}

    def headroom(meter):
        room["left"] -= 40 * MIB
        return room["left"]

    floors = iter([GIB + 40 * MIB * step for step in range(120)])
    monkeypatch.setattr(out_of_memory, "held_bytes", lambda place: next(floors))
    monkeypatch.setattr(out_of_memory, "headroom_bytes", headroom)
    watcher, messages = Watch(Meter(real_place(torch.device("cpu")))), []
    for step in range(1, 110):
        watcher.begin(step, [64])
        messages += [growth] if (growth := watcher.end()) else []
    assert len(messages) == 2
    assert messages[1].full_at - messages[1].step <= 20 < messages[0].full_at - messages[0].step


def test_the_latest_steps_count_and_not_how_it_began():
    assert growth_per_step([GIB] * 30 + [GIB + 20 * MIB * step for step in range(20)]) == 20 * MIB


def test_a_run_that_really_keeps_memory_is_warned_and_its_folder_says_so(
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    """16 MiB more of this process a step, by its resident memory."""
    kept = []

    def leaking(*arguments):
        kept.append(
            mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )  # malloc may have a free block
        kept[-1][::4096] = bytes([1]) * (16 * MIB // 4096)
        return launch_step(*arguments)

    monkeypatch.setattr(trainer, "launch_step", leaking)
    train(config(corpus, tmp_path / "run", training={"max_steps": STEPS}), quiet=False)
    warned = re.search(
        r"warning   step (\d+): memory that stays allocated grows by ([\d.]+) MiB per step", capsys.readouterr().err
    )
    assert warned is not None
    assert int(warned[1]) <= STEPS
    assert float(warned[2]) == pytest.approx(16, rel=0.2)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["growth"]["per_step"] == pytest.approx(16 * MIB, rel=0.2)
    assert memory["growth"]["full_at"] > STEPS
    assert (memory["floors"]["last_step"], len(memory["floors"]["bytes"])) == (STEPS, STEPS)
    kept.clear()


def test_a_run_that_keeps_nothing_is_not_warned(corpus, tmp_path, capsys):  # noqa: F811
    train(config(corpus, tmp_path / "run", training={"max_steps": 40}), quiet=False)
    assert "stays allocated" not in capsys.readouterr().err
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["growth"] is None
    names = [phase["name"] for phase in memory["timeline"]]
    assert names == ["load", "forward", "loss", "backward", "optimizer_step", "eval", "save"]
