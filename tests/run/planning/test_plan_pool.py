"""Assignment of rehearsals to workers, and reports of workers that ended."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.errors import RequestError, TunesmithError
from framework.memory.cards import read_card
from framework.run.planning import plan_cache, plan_pool
from framework.run.planning.plan_pool import Rehearsals, _all, _Memory, _Worker, plan_in_subprocess, prepared
from framework.run.ranks.environment import python_command
from framework.run.rehearsal.block_settings import shared_work
from framework.run.rehearsal.rehearse import rehearse
from framework.schema.config import TrainingConfig
from tests.card import own_card
from tests.processes import is_working, wait_for
from tests.tiny import LLAMA, tiny_config


class Noted(_Worker):
    """A worker that answers with its number and what it was asked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.captured = set()
        self.asked: list[Any] = []

    def ask(self, configs: Any) -> None:
        self.asked = list(configs)

    def answers(self) -> list[dict[str, Any]] | None:
        return [
            {"worker": self.number, "rows": config["training"]["per_device_train_batch_size"]} for config in self.asked
        ]


def config(rows: int = 1, layers: int = 3, compiled: bool = False, **model: Any) -> dict[str, Any]:
    training = {"per_device_train_batch_size": rows, "global_batch_size": 16, "compile": compiled}
    architecture = {**LLAMA, "num_hidden_layers": layers}
    return tiny_config(architecture, training=training, model=model).model_dump(mode="json")


def test_rehearsals_of_the_same_compiled_blocks_go_to_one_worker() -> None:
    workers: list[_Worker] = [Noted(0), Noted(1)]
    asked = [config(rows, layers, True) for rows in (1, 8) for layers in (2, 3)] + [config(), config()]
    assert [answer["worker"] for answer in _all(asked, workers)] == [0, 0, 1, 1, 0, 0], "two equal ones are one"
    later = [config(8, 30, True), config(1, 30, True), config(16, 2, True)]
    answers = _all(later, workers)
    assert [answer["worker"] for answer in answers] == [1, 0, 0]
    assert [answer["rows"] for answer in answers] == [8, 1, 16]


def test_configs_that_build_equal_blocks_share_work() -> None:
    assert shared_work(config()) is None
    assert shared_work(config(compiled=True)) == shared_work(config(layers=7, compiled=True, chunked_loss=16))
    others = [config(2, compiled=True), config(compiled=True, attn_implementation="eager")]
    others += [config(compiled=True, model_max_length=32)]
    assert len({shared_work(config(compiled=True)), *map(shared_work, others)}) == 4


def test_one_rehearsal_serves_every_setting_of_the_allocator() -> None:
    plain = {**config(), "gpu": read_card("h100_80gb")}
    expandable = {**plain, "training": {**plain["training"], "allocator": {"expandable_segments": True}}}
    memory = _Memory()
    plans = []
    for document in (plain, expandable):
        before = memory.rehearsal
        plans.append(memory.plan(document))
        assert before is None or memory.rehearsal is before
    assert plans == [rehearse(TrainingConfig.model_validate(document)) for document in (plain, expandable)]
    assert plans[0].peak.reserved_bytes != plans[1].peak.reserved_bytes
    memory.plan({**config(layers=2), "gpu": plain["gpu"]})
    assert memory.rehearsal is not before


def test_a_worker_that_was_ended_is_reported_and_replaced(monkeypatch: Any) -> None:
    ended = Noted(0)
    monkeypatch.setattr(ended, "answers", lambda: None)
    monkeypatch.setattr("framework.run.planning.plan_pool._Worker", lambda: Noted(7))
    workers: list[_Worker] = [ended, Noted(1)]
    answers = _all([config(), config(layers=2)], workers)
    assert answers == [{"fault": "a rehearsal was ended from outside"}, {"worker": 1, "rows": 1}]
    assert _all([config()], workers)[0]["worker"] == 7


def test_a_rehearsal_ends_with_the_server_that_asked_for_it(monkeypatch: Any, tmp_path: Path) -> None:
    begun = tmp_path / "pid"
    lines = ["import os, time", "from framework.run.planning import plan_pool"]
    lines += [f"def slow(*_): open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(40)"]
    lines += ["plan_pool._document = slow", "plan_pool.serve()"]
    monkeypatch.setattr(plan_pool, "_COMMAND", python_command("\n".join(lines), flags=("-W", "ignore")))
    with Rehearsals(use_cache=False) as rehearsals, ThreadPoolExecutor() as pool:
        asked = pool.submit(rehearsals.tried, [tiny_config()])
        working = int(wait_for(lambda: begun.exists() and begun.read_text()))
        assert is_working(working)
        plan_pool.abandon()
        assert isinstance(asked.exception(timeout=20), TunesmithError)
    wait_for(lambda: not is_working(working))


@pytest.mark.gpu
def test_rehearsals_take_no_memory_of_the_card() -> None:
    card = read_card("h100_80gb")
    configs = [tiny_config(gpu=card, training={"compile": compiled}) for compiled in (False, True)]
    with own_card(), Rehearsals(use_cache=False) as rehearsals, ThreadPoolExecutor() as pool:
        before, _ = torch.cuda.mem_get_info()
        least, made = before, pool.submit(rehearsals.plans, configs)
        while not made.done():
            least = min(least, torch.cuda.mem_get_info()[0])
            time.sleep(0.02)
        assert all(plan.fits for plan in made.result())
    assert before - least < 64 * 2**20, "a context takes hundreds of MiB"


def answering(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any], then: str = "") -> None:
    """A process that gives these answers, whatever it is asked, and does something else."""
    line = json.dumps(answers) + "\n" if answers else ""
    code = f"import sys; sys.stdin.readline(); sys.stdout.write({line!r}); sys.stdout.flush(); {then}"
    monkeypatch.setattr(plan_pool, "_COMMAND", [sys.executable, "-c", code])


def test_what_is_wrong_with_a_request_or_with_the_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tiny_config(training={"max_steps": 17})
    answering(monkeypatch, {"errors": [{"key": "a.b", "message": "is odd"}]})
    with pytest.raises(RequestError, match=r"a\.b: is odd"):
        plan_in_subprocess(asked)
    answering(monkeypatch, {"fault": "ValueError: no shape"})
    with pytest.raises(TunesmithError, match="the rehearsal failed: ValueError: no shape"):
        plan_in_subprocess(asked)
    answering(monkeypatch, then="sys.exit('no torch today')")
    with pytest.raises(TunesmithError, match="the rehearsal failed: no torch today"):
        plan_in_subprocess(asked)


def test_a_process_that_was_prepared_is_taken_once_and_ended_where_it_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, then="import time; time.sleep(600)")
    with prepared():
        [server] = plan_pool._prepared
        with Rehearsals() as rehearsals:
            assert rehearsals._server is server
            assert not plan_pool._prepared
        assert server._process.returncode is not None
    with prepared():
        [server] = plan_pool._prepared
        assert server._process.poll() is None
    assert server._process.returncode is not None


def test_a_plan_that_is_stored_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tiny_config(training={"max_steps": 18})
    plan_cache.write(asked, made := rehearse(asked))
    monkeypatch.setattr(plan_pool, "_COMMAND", ["/nowhere/python"])
    assert plan_in_subprocess(asked) == made


def test_the_libraries_are_loaded_before_anything_is_asked() -> None:
    code = plan_pool._CODE.replace("from ", "sys.modules['framework.run.rehearsal.rehearse'] = None; from ", 1)
    command = python_command(code)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(timeout=60) == 1, "it has met what it cannot load, with nothing on its standard input"
        assert "framework.run.rehearsal.rehearse" in process.stderr.read()
