"""Rehearse in a process of its own, because a rehearsal patches torch. This module itself loads no torch."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from framework.errors import Problem, RequestError, TunesmithError
from framework.memory.ledger import Plan
from framework.memory.unquantized import unquantized, without_gain
from framework.run.planning.python_process import python_command
from framework.schema.config import TrainingConfig
from framework.versions import require_versions

_CODE = "import gc; gc.disable(); from framework.run.rehearsal.rehearse import main; sys.exit(main())"
_COMMAND = python_command(_CODE, flags=("-W", "ignore"))
"""Without garbage collection the imports of torch and transformers take a fifth less time, and a plan lives shortly."""
_TAIL = 2000


@contextlib.contextmanager
def rehearsing_process() -> Iterator[subprocess.Popen[str]]:
    """A process that imports what one rehearsal needs, while its config is perhaps still being composed.

    Raises RequestError where an installed library has a version that is not supported.
    """
    require_versions()
    pipe = subprocess.PIPE
    with subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def plan_in_subprocess(config: TrainingConfig) -> Plan:
    """The plan of a composed config, made in a process of its own. Raises as `plan_by` does."""
    with rehearsing_process() as process:
        return plan_by(process, config)


def plan_by(process: subprocess.Popen[str], config: TrainingConfig) -> Plan:
    """The plan of a composed config, made by a `rehearsing_process`, which then ends.

    Raises RequestError with the problems that the rehearsal found, TunesmithError when the child itself failed.
    """
    stdout, stderr = process.communicate(config.model_dump_json())
    document = _read(subprocess.CompletedProcess(_COMMAND, process.returncode, stdout, stderr))
    if "errors" in document:
        raise RequestError([Problem(**problem) for problem in document["errors"]])
    return Plan.from_json(document["plan"])


def plan_with_warnings(config: TrainingConfig, process: subprocess.Popen[str] | None = None) -> Plan:
    """The plan of a config without `auto`, made by `process` where one is given. Raises as `plan_by` does.

    A quantized base is planned without quantization too, and it is a warning when that needs no more.
    """
    plain = unquantized(config)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(plan_in_subprocess, plain) if plain is not None else None
        made = plan_by(process, config) if process is not None else plan_in_subprocess(config)
        warning = without_gain(made, waited.result()) if waited is not None else None
    return replace(made, warnings=(*made.warnings, warning)) if warning else made


def _read(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        if finished.returncode not in (0, 2):
            raise ValueError(f"exit {finished.returncode}")
        document: dict[str, Any] = json.loads(finished.stdout)
        return document
    except ValueError as error:
        raise failed(finished.stderr, str(error)) from None


def failed(complaints: str, otherwise: str) -> TunesmithError:
    """What a rehearsing process that has failed said last; `otherwise` where it said nothing."""
    last = next((line for line in reversed(complaints.splitlines()) if line.strip()), otherwise)
    failure = TunesmithError(f"the rehearsal failed: {last} (--debug shows where; please report it)")
    failure.add_note(complaints[-_TAIL:])
    return failure
