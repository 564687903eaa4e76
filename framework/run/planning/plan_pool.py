"""Rehearsals in a process of their own, because a rehearsal patches torch: one that has loaded the libraries once, and
forks workers that keep the blocks they captured.

This module itself loads no torch: `Rehearsals` starts `serve` elsewhere. One line in (configs), one line out (plans, or
what is wrong). A command that will need plans has the libraries loaded while it reads its request: `prepared`.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import IO, Any, NoReturn

from framework.activity import doing
from framework.errors import Problem, RequestError, TunesmithError
from framework.installation import require_versions
from framework.memory.ledger import Plan, Terms
from framework.memory.planning import make_plan
from framework.memory.trace import Rehearsal
from framework.run.planning import plan_cache
from framework.run.ranks.environment import python_command
from framework.run.rehearsal.block_settings import shared_rehearsal, shared_work
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

PROCESSES = 2
"""Rehearsals at a time. Each takes a processor and up to a few GiB."""
CAPTURE_COST = 8
"""Rehearsals of few layers that take as long as to capture the blocks of one."""
_CODE = "import gc; gc.disable(); from framework.run.planning.plan_pool import serve; sys.exit(serve())"
_COMMAND = python_command(_CODE, flags=("-W", "ignore"))
"""Without garbage collection the imports of torch and transformers take a fifth less time."""
_TAIL = 2000


class _Server:
    """The process that runs `serve`."""

    def __init__(self) -> None:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(_COMMAND, text=True, stdin=pipe, stdout=pipe, stderr=self._complaints)
        except OSError:
            self._complaints.close()
            raise

    def ask(self, configs: Sequence[TrainingConfig]) -> list[dict[str, Any]]:
        """The answer to each. Raises TunesmithError when the process itself ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([config.model_dump(mode="json") for config in configs]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self.failure(f"exit {self._process.wait()}")
        answers: list[dict[str, Any]] = json.loads(line)
        return answers

    def failure(self, otherwise: str) -> TunesmithError:
        """What the process said last; `otherwise` where it said nothing."""
        self._complaints.seek(0)
        complaints = self._complaints.read()
        last = next((line for line in reversed(complaints.splitlines()) if line.strip()), otherwise)
        failure = TunesmithError(f"the rehearsal failed: {last} (--debug shows where; please report it)")
        failure.add_note(complaints[-_TAIL:])
        return failure

    def kill(self) -> None:
        """Whoever waits for an answer then raises TunesmithError."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._complaints.close()


_prepared: list[_Server] = []
_asked: list[_Server] = []
"""Those whose answer is waited for."""


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A process loads the libraries from now on, which the next `Rehearsals` takes. Within the block alone.

    Raises RequestError where an installed library has a version that is not supported.
    """
    require_versions()
    _prepared.append(_Server())
    try:
        yield
    finally:
        dismiss()


def dismiss() -> None:
    """End what was prepared and not taken."""
    while _prepared:
        _prepared.pop().end()


def abandon() -> None:
    """End the processes whose plans are waited for in other threads, where these then raise TunesmithError."""
    for server in _asked:
        server.kill()


class Rehearsals:
    """A `Measure` of the search, to be used as a context. The process starts with the first plan that is not stored.

    `made` counts the plans that were not. `faults` has what failed for no fault of the request, each once.
    """

    def __init__(self, use_cache: bool = True) -> None:
        self.made = 0
        self.faults: list[str] = []
        self._use_cache = use_cache
        self._server: _Server | None = None

    def __enter__(self) -> "Rehearsals":
        self._server = _prepared.pop() if _prepared else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.end()

    def __call__(self, configs: Sequence[TrainingConfig], /) -> list[Plan | None]:
        """The plan of each, None for one that is refused. Raises TunesmithError when the process itself ended."""
        return [made if isinstance(made, Plan) else None for made in self.tried(configs)]

    def plans(self, configs: Sequence[TrainingConfig]) -> list[Plan]:
        """The plan of each. Raises RequestError for what is refused, TunesmithError for a fault of ours."""
        plans = []
        for made in self.tried(configs):
            if not isinstance(made, Plan):
                raise made
            plans.append(made)
        return plans

    def tried(self, configs: Sequence[TrainingConfig]) -> list[Plan | TunesmithError]:
        """The plan of each, or why there is none. Raises TunesmithError when the process itself ended."""
        found = [plan_cache.read(config) if self._use_cache else None for config in configs]
        missing = [index for index, plan in enumerate(found) if plan is None]
        made: list[Plan | TunesmithError | None] = [*found]
        if missing:
            for index, answer in zip(missing, self._ask([configs[index] for index in missing]), strict=True):
                made[index] = self._read(configs[index], answer)
        return [each for each in made if each is not None]

    def _read(self, config: TrainingConfig, answer: Mapping[str, Any]) -> Plan | TunesmithError:
        if "errors" in answer:
            return RequestError([Problem(**problem) for problem in answer["errors"]])
        if (fault := answer.get("fault")) is not None:
            self.faults += [fault] if fault not in self.faults else []
            assert self._server is not None
            return self._server.failure(fault)
        plan = Plan.from_json(answer["plan"])
        self.made += 1
        if self._use_cache:
            plan_cache.write(config, plan)
        return plan

    def _ask(self, configs: Sequence[TrainingConfig]) -> list[dict[str, Any]]:
        if self._server is None:
            require_versions()
            self._server = _Server()
        _asked.append(self._server)
        so_far = f" after {self.made} others" if self.made else ""
        try:
            with doing(f"rehearsing {counted(len(configs), 'setting')}{so_far}"):
                return self._server.ask(configs)
        finally:
            _asked.remove(self._server)


def plan_in_subprocess(config: TrainingConfig) -> Plan:
    """The plan of a composed config: a stored one, else made in a process of its own.

    Raises RequestError with the problems that the rehearsal found, TunesmithError when the child itself failed.
    """
    with Rehearsals() as rehearsals:
        return rehearsals.plans([config])[0]


def plan_with_warnings(config: TrainingConfig, rehearsals: Rehearsals) -> Plan:
    """The plan of a config without `auto`. Raises as `plan_in_subprocess` does.

    A quantized base is planned without quantization too, and it is a warning when that needs no more.
    """
    made, *plain = rehearsals.plans([each for each in (config, unquantized(config)) if each is not None])
    warning = without_gain(made, plain[0]) if plain else None
    return replace(made, warnings=(*made.warnings, warning)) if warning else made


def serve() -> int:
    """Answer lines of configs from stdin on stdout until there are no more."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the documents
    import framework.run.rehearsal.rehearse  # noqa: F401 - before it is asked, and once for all forks

    workers: list[_Worker] = []
    with stdout:
        for line in sys.stdin:
            configs = json.loads(line)
            if _loads_more(configs):
                workers = []
            while len(workers) < min(PROCESSES, len(configs)):
                workers.append(_Worker())
            print(json.dumps(_all(configs, workers)), file=stdout, flush=True)
    return 0


def _loads_more(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Load what only some configs need once, and not in each fork. Whether anything was."""
    before = len(sys.modules)
    if any(map(shared_work, configs)):
        import framework.run.rehearsal.compiled_blocks
    if any(config["training"]["use_peft"] for config in configs):
        from framework.build.adapters.without_bitsandbytes import without_bitsandbytes

        with without_bitsandbytes():
            import framework.run.rehearsal.adapter_size  # noqa: F401
    return len(sys.modules) > before


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


def unquantized(config: TrainingConfig) -> TrainingConfig | None:
    """The same run on a base that is not quantised; None where none is."""
    if not (config.training.use_peft and config.peft.q_lora):
        return None
    changes: dict[str, object] = {"q_lora": False}
    if config.peft.peft_method is PeftMethod.LOFTQ:  # which starts from what quantising loses
        changes["peft_method"] = PeftMethod.LORA
    return config.model_copy(update={"peft": config.peft.model_copy(update=changes)})


def without_gain(quantized: Plan, plain: Plan) -> str | None:
    """A sentence when the quantised run needs no less at its peak, with the term that took back what weights gave."""
    ours, theirs = quantized.peak, plain.peak
    if ours.device_bytes < theirs.device_bytes:
        return None
    grown = {term.name: getattr(ours.terms, term.name) - getattr(theirs.terms, term.name) for term in fields(Terms)}
    worst = max(grown, key=lambda name: grown[name])
    sizes = f"{_gib(ours.device_bytes)} with a quantised base, {_gib(theirs.device_bytes)} without"
    return f"peft.q_lora saves nothing here: {sizes}; {worst.replace('_', ' ')} grew by {_gib(grown[worst])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
