"""Many rehearsals: a process that has loaded the libraries once, and forks workers that keep the blocks they captured.

This module itself loads no torch: `Rehearsals` starts `serve` elsewhere. One line in (a list of configs), one line out
(a list of plans or of what is wrong).
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, NoReturn

from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.memory.rehearsal import Rehearsal
from framework.run.planning import plan_cache
from framework.run.planning.plan_process import failed
from framework.run.planning.python_process import python_command
from framework.run.rehearsal.block_settings import shared_rehearsal, shared_work
from framework.schema.config import TrainingConfig

PROCESSES = 2
"""Rehearsals at a time. Each takes a processor and up to a few GiB."""
CAPTURE_COST = 8
"""Rehearsals of few layers that take as long as to capture the blocks of one."""
_CODE = "import gc; gc.disable(); from framework.run.planning.plan_pool import serve; sys.exit(serve())"
_COMMAND = python_command(_CODE, flags=("-W", "ignore"))


class Rehearsals:
    """A `Measure` of the search, to be used as a context. The process starts with the first plan that is not stored.

    `made` counts the plans that were not. `faults` has what failed for no fault of the request, each once.
    """

    def __init__(self, use_cache: bool = True) -> None:
        self.made = 0
        self.faults: list[str] = []
        self._use_cache = use_cache
        self._process: subprocess.Popen[str] | None = None
        self._complaints: IO[str] | None = None

    def __enter__(self) -> "Rehearsals":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        if self._complaints is not None:
            self._complaints.close()

    def __call__(self, configs: Sequence[TrainingConfig], /) -> list[Plan | None]:
        """The plan of each, None for one that is refused. Raises TunesmithError when the process itself ended."""
        found = [plan_cache.read(config) if self._use_cache else None for config in configs]
        missing = [index for index, plan in enumerate(found) if plan is None]
        if missing:
            documents = self._ask([configs[index].model_dump(mode="json") for index in missing])
            for index, document in zip(missing, documents, strict=True):
                found[index] = self._read(configs[index], document)
        return found

    def _read(self, config: TrainingConfig, document: Mapping[str, Any]) -> Plan | None:
        if "plan" not in document:
            fault = document.get("fault")
            if fault and fault not in self.faults:
                self.faults.append(fault)
            return None
        plan = Plan.from_json(document["plan"])
        self.made += 1
        if self._use_cache:
            plan_cache.write(config, plan)
        return plan

    def _ask(self, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        try:
            process.stdin.write(json.dumps(configs) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line.endswith("\n"):
            assert self._complaints is not None
            process.wait()
            self._complaints.seek(0)
            raise failed(self._complaints.read(), f"exit {process.returncode}")
        documents: list[dict[str, Any]] = json.loads(line)
        return documents

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._complaints}
            self._process = subprocess.Popen(_COMMAND, text=True, **pipes)  # type: ignore[call-overload]
        return self._process


def serve() -> int:
    """Answer lines of configs from stdin on stdout until there are no more."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the documents
    import framework.run.rehearsal.rehearse

    workers: list[_Worker] = []
    with stdout:
        for line in sys.stdin:
            configs = json.loads(line)
            if "framework.run.rehearsal.compiled_blocks" not in sys.modules and any(map(shared_work, configs)):
                import framework.run.rehearsal.compiled_blocks  # noqa: F401 - once, and not in each fork

                workers = []
            while len(workers) < min(PROCESSES, len(configs)):
                workers.append(_Worker())
            print(json.dumps(_all(configs, workers)), file=stdout, flush=True)
    return 0


def _all(configs: Sequence[Mapping[str, Any]], workers: list["_Worker"]) -> list[dict[str, Any]]:
    """The answers to some configs, which the workers share."""
    shares = _shares(configs, workers)
    for worker, share in zip(workers, shares, strict=True):
        worker.ask([configs[index] for index in share])
    answers: dict[int, dict[str, Any]] = {}
    for number, share in enumerate(shares):
        found = workers[number].answers()
        if found is None:
            workers[number] = _Worker()
            found = [{"fault": "a rehearsal was ended from outside"}] * len(share)
        answers |= zip(share, found, strict=True)
    return [answers[index] for index in range(len(configs))]


def _shares(configs: Sequence[Mapping[str, Any]], workers: Sequence["_Worker"]) -> list[list[int]]:
    """Which configs each worker gets, by index: those of one rehearsal, and those whose blocks it has captured."""
    shares: list[list[int]] = [[] for _ in workers]
    costs = [0] * len(workers)
    given: dict[str, int] = {}
    for index, config in enumerate(configs):
        work, whole = shared_work(config), shared_rehearsal(config)
        has_it = [number for number, worker in enumerate(workers) if work in worker.captured]
        chosen = given.get(whole, has_it[0] if has_it else costs.index(min(costs)))
        if whole not in given:
            costs[chosen] += 1 if work is None or has_it else CAPTURE_COST
        given[whole] = chosen
        workers[chosen].captured |= {work} - {None}
        shares[chosen].append(index)
    return [sorted(share, key=lambda index: shared_rehearsal(configs[index])) for share in shares]


class _Worker:
    """A fork that rehearses, and keeps the compiled blocks that it has captured.

    A rehearsal leaves torch as it was, so one can follow another.
    """

    def __init__(self) -> None:
        self.captured: set[str | None] = set()
        gc.freeze()  # else each collection of the fork goes through, and so copies, all that was imported
        (reads, asks), (hears, says) = os.pipe(), os.pipe()
        if not os.fork():
            os.close(asks)
            os.close(hears)
            _work(os.fdopen(reads), os.fdopen(says, "w"))
        os.close(reads)
        os.close(says)
        self._asks, self._hears = os.fdopen(asks, "w"), os.fdopen(hears)

    def ask(self, configs: Sequence[Mapping[str, Any]]) -> None:
        with suppress(BrokenPipeError):  # then there are no answers
            print(json.dumps(configs), file=self._asks, flush=True)

    def answers(self) -> list[dict[str, Any]] | None:
        """What it found, in order; None when it has ended."""
        line = self._hears.readline()
        return json.loads(line) if line.endswith("\n") else None


def _work(questions: IO[str], answers: IO[str]) -> NoReturn:
    """What a fork does: plan what each line asks for until there are no more, end."""
    memory = _Memory()
    try:
        for line in questions:
            found = []
            for config in json.loads(line):
                found.append(_document(config, memory))
                gc.collect()
                gc.freeze()  # what is kept, which else is gone through after each of the next
            print(json.dumps(found), file=answers, flush=True)
    finally:
        os._exit(0)


@dataclass
class _Memory:
    """What a worker keeps: blocks that it captured, and its last rehearsal, which serves every setting of the allocator
    (they change what becomes of the recorded events, not the events)."""

    captured: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    rehearsal: Rehearsal | None = None

    def plan(self, config: Mapping[str, Any]) -> Plan:
        from framework.run.rehearsal.rehearse import record

        typed, name = TrainingConfig.model_validate(config), shared_rehearsal(config)
        if self.rehearsal is None or name != self.name:
            self.rehearsal = None  # one that fails must not leave the one before under its name
            self.rehearsal, self.name = record(typed, self.captured), name
        settled = self.rehearsal.config
        training = settled.training.model_copy(update={"allocator": typed.training.allocator})
        return make_plan(replace(self.rehearsal, config=settled.model_copy(update={"training": training})))


def _document(config: Mapping[str, Any], memory: _Memory) -> dict[str, Any]:
    try:
        return {"plan": memory.plan(config).to_json()}
    except RequestError as error:
        return {"errors": [problem.to_json() for problem in error.problems]}
    except Exception as error:
        traceback.print_exc()
        return {"fault": f"{type(error).__name__}: {error}".partition("\n")[0]}
