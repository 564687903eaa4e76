"""Rehearsals in a server process, because a rehearsal patches torch. The server loads the libraries once and forks
workers, which keep the blocks they captured.

No context is created on this machine's card, whose memory others may measure or fill meanwhile: tensors are meta ones,
whose backward runs in the calling thread (in torch/csrc/autograd/engine.cpp a thread selects its device when it is
given work), compiled blocks are captured without dynamo, and questions to CUDA are answered (`fake_device`,
`compiled_blocks`).

This module itself loads no torch: `Rehearsals` starts `serve` in the child. The protocol is one line in (configs), one
line out (plans or errors). A command that will need plans starts the server while it reads its request (`prepared`).
"""

import contextlib
import gc
import json
import os
import sys
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
from framework.run.planning.server import Server, end_with_client
from framework.run.ranks.environment import python_command
from framework.run.rehearsal.block_settings import shared_rehearsal, shared_work
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

PROCESSES = 2
"""Parallel rehearsals. Each takes a processor and up to a few GiB."""
CAPTURE_COST = 8
"""Number of rehearsals of few layers that take as long as capturing the blocks of one."""
_CODE = "import gc; gc.disable(); from framework.run.planning.plan_pool import serve; sys.exit(serve())"
_COMMAND = python_command(_CODE, flags=("-W", "ignore"))
"""Without garbage collection the imports of torch and transformers take 20 % less time."""

_prepared: list[Server] = []
_asked: list[Server] = []
"""Servers whose answer is awaited."""


def _server() -> Server:
    return Server(_COMMAND, "rehearsal")


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Start a server that loads the libraries, for the next `Rehearsals` within the block.

    Raises RequestError if an installed library has an unsupported version.
    """
    require_versions()
    _prepared.append(_server())
    try:
        yield
    finally:
        dismiss()


def dismiss() -> None:
    """End a prepared server that was not used."""
    while _prepared:
        _prepared.pop().end()


def abandon() -> None:
    """Kill the servers that other threads wait for; these threads then raise TunesmithError."""
    for server in _asked:
        server.kill()


class Rehearsals:
    """The search's `Measure`, used as a context manager. The server starts with the first plan that is not cached.

    `made` counts the plans that were not cached. `faults` lists internal failures, each once.
    """

    def __init__(self, use_cache: bool = True) -> None:
        self.made = 0
        self.faults: list[str] = []
        self._use_cache = use_cache
        self._server: Server | None = None

    def __enter__(self) -> "Rehearsals":
        self._server = _prepared.pop() if _prepared else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.end()

    def __call__(self, configs: Sequence[TrainingConfig], /) -> list[Plan | None]:
        """The plan of each config, None for a refused one. Raises TunesmithError if the process ended."""
        return [made if isinstance(made, Plan) else None for made in self.tried(configs)]

    def plans(self, configs: Sequence[TrainingConfig]) -> list[Plan]:
        """The plan of each config. Raises RequestError for a refused one, TunesmithError for an internal fault."""
        plans = []
        for made in self.tried(configs):
            if not isinstance(made, Plan):
                raise made
            plans.append(made)
        return plans

    def tried(self, configs: Sequence[TrainingConfig]) -> list[Plan | TunesmithError]:
        """The plan of each config, or its error. Raises TunesmithError if the process ended."""
        made: list[Plan | TunesmithError | None]
        made = [plan_cache.read(config) if self._use_cache else None for config in configs]
        missing = [index for index, plan in enumerate(made) if plan is None]
        questions = {index: plan_cache.question(configs[index]) for index in missing}
        first = {text: index for index, text in reversed(questions.items())}  # of configs with equal plans
        if asked := sorted(first.values()):
            for index, answer in zip(asked, self._ask([configs[index] for index in asked]), strict=True):
                made[index] = self._read(configs[index], answer)
        for index, text in questions.items():
            same = made[first[text]]
            made[index] = plan_cache.for_card(same, configs[index]) if isinstance(same, Plan) else same
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
            self._server = _server()
        _asked.append(self._server)
        so_far = f" after {counted(self.made, 'other')}" if self.made else ""
        try:
            with doing(f"rehearsing {counted(len(configs), 'setting')}{so_far}"):
                answers: list[dict[str, Any]] = self._server.ask([config.model_dump(mode="json") for config in configs])
                return answers
        finally:
            _asked.remove(self._server)


def plan_in_subprocess(config: TrainingConfig) -> Plan:
    """The plan of a composed config, from the cache or a server process.

    Raises RequestError with the problems that the rehearsal found, TunesmithError if the server failed.
    """
    with Rehearsals() as rehearsals:
        return rehearsals.plans([config])[0]


def plan_with_warnings(config: TrainingConfig, rehearsals: Rehearsals) -> Plan:
    """The plan of a config without `auto`. Raises as `plan_in_subprocess` does.

    A quantized base is also planned without quantization, with a warning if that needs no more memory.
    """
    made, *plain = rehearsals.plans([each for each in (config, unquantized(config)) if each is not None])
    warning = without_gain(made, plain[0]) if plain else None
    return replace(made, warnings=(*made.warnings, warning)) if warning else made


def serve() -> int:
    """Answer lines of configs from stdin on stdout until stdin ends."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the answers
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
    """Load modules that only some of these configs need, here rather than in each fork. Returns whether any was."""
    before = len(sys.modules)
    if any(map(shared_work, configs)):
        import framework.run.rehearsal.compiled_blocks
    if any(config["training"]["use_peft"] for config in configs):
        from framework.build.adapters.without_bitsandbytes import without_bitsandbytes

        with without_bitsandbytes():
            import framework.run.rehearsal.adapter_size  # noqa: F401
    return len(sys.modules) > before


def _all(configs: Sequence[Mapping[str, Any]], workers: list["_Worker"]) -> list[dict[str, Any]]:
    """The answers for some configs, distributed over the workers."""
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
    """Indices of the configs for each worker: those that share a rehearsal or captured blocks go together."""
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
    """A fork that rehearses and keeps the compiled blocks that it has captured.

    A rehearsal leaves torch unchanged, so one can follow another.
    """

    def __init__(self) -> None:
        self.captured: set[str | None] = set()
        gc.freeze()  # otherwise each collection in the fork touches, and so copies, all imported objects
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
        """Its answers, in order; None if it has ended."""
        line = self._hears.readline()
        return json.loads(line) if line.endswith("\n") else None


def _work(questions: IO[str], answers: IO[str]) -> NoReturn:
    """Run a fork: plan the configs of each line until there are no more, then exit."""
    memory = _Memory()
    end_with_client()
    try:
        for line in questions:
            found = []
            for config in json.loads(line):
                found.append(_document(config, memory))
                gc.collect()
                gc.freeze()  # kept objects, which later collections would go through each time
            print(json.dumps(found), file=answers, flush=True)
    finally:
        os._exit(0)


@dataclass
class _Memory:
    """A worker's captured blocks and its last rehearsal, which serves all allocator settings, since these do not change
    the recorded events."""

    captured: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    rehearsal: Rehearsal | None = None

    def plan(self, config: Mapping[str, Any]) -> Plan:
        from framework.run.rehearsal.rehearse import record

        typed, name = TrainingConfig.model_validate(config), shared_rehearsal(config)
        if self.rehearsal is None or name != self.name:
            self.rehearsal = None  # a failure must not leave the previous one under its name
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
    """The same run with its base not quantized; None if it is not."""
    if not (config.training.use_peft and config.peft.q_lora):
        return None
    changes: dict[str, object] = {"q_lora": False}
    if config.peft.peft_method is PeftMethod.LOFTQ:  # LoftQ starts from the quantization error
        changes["peft_method"] = PeftMethod.LORA
    return config.model_copy(update={"peft": config.peft.model_copy(update=changes)})


def without_gain(quantized: Plan, plain: Plan) -> str | None:
    """A sentence if quantization does not lower the peak, naming the term that grew most; else None."""
    ours, theirs = quantized.peak, plain.peak
    if ours.device_bytes < theirs.device_bytes:
        return None
    grown = {term.name: getattr(ours.terms, term.name) - getattr(theirs.terms, term.name) for term in fields(Terms)}
    worst = max(grown, key=lambda name: grown[name])
    sizes = f"{_gib(ours.device_bytes)} with a quantized base, {_gib(theirs.device_bytes)} without"
    return f"peft.q_lora saves nothing here: {sizes}; {worst.replace('_', ' ')} grew by {_gib(grown[worst])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
