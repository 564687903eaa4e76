"""Many rehearsals: a process that has loaded the libraries once, and forks.

A fork of a process that has imported everything costs a third of a second. This module itself loads no torch:
`Rehearsals` starts `serve` elsewhere. One line in (a list of configs), one line out (a list of plans or of what is
wrong).
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any

from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.run import plan_cache
from framework.run.child import failed
from framework.schema.config import TrainingConfig

PROCESSES = 2
"""Rehearsals at a time. Each takes a processor and up to a few GiB."""
_CODE = "import gc, sys; gc.disable(); from framework.run.rehearsals import serve; sys.exit(serve())"
_COMMAND = (sys.executable, "-W", "ignore", "-c", _CODE)


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
    import framework.run.rehearse

    with stdout:
        for line in sys.stdin:
            configs = json.loads(line)
            if any(config["training"]["compile"] is True for config in configs):
                import framework.run.compiled_blocks  # noqa: F401
            gc.freeze()  # else each collection of a fork goes through, and so copies, all that was imported
            print(json.dumps(_all(configs)), file=stdout, flush=True)
    return 0


def _all(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers to some configs, which a few forks share. A rehearsal leaves torch as it was, so one can follow
    another; what a fork does goes with it."""
    files: list[IO[str]] = []
    children: list[int] = []
    for first in range(min(PROCESSES, len(configs))):
        files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - read and closed below
        child = os.fork()
        if not child:
            _answer(configs[first::PROCESSES], files[-1])
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    answers = [_finished(file) for file in files]
    lost = {"fault": "a rehearsal was ended from outside"}
    return [
        answers[index % PROCESSES][index // PROCESSES] if index // PROCESSES < len(answers[index % PROCESSES]) else lost
        for index in range(len(configs))
    ]


def _answer(configs: Sequence[Mapping[str, Any]], file: IO[str]) -> None:
    """What a fork does: plan, write a line for each, end."""
    for config in configs:
        print(json.dumps(_document(config)), file=file, flush=True)
        gc.collect()
    os._exit(0)


def _document(config: Mapping[str, Any]) -> dict[str, Any]:
    from framework.run.rehearse import rehearse

    try:
        return {"plan": rehearse(TrainingConfig.model_validate(config)).to_json()}
    except RequestError as error:
        return {"errors": [problem.to_json() for problem in error.problems]}
    except Exception as error:
        traceback.print_exc()
        return {"fault": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _finished(file: IO[str]) -> list[dict[str, Any]]:
    with file:
        file.seek(0)
        return [json.loads(line) for line in file if line.endswith("\n")]
