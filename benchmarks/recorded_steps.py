"""Steps as their calls, which a rehearsal recorded, next to what they took on a card: the archive that
`fit_step_time.py` reads, results/step_time_steps_h200.xz.

python -m benchmarks.recorded_steps ROWS.jsonl     rehearse each row's step and add it; any machine, seconds a row

A row of ROWS.jsonl has `name`, `config` (without `gpu`), `machine` (measurements of one host share a speed), `seconds`,
and `use`: "fits", "judges" or "phases" (fits by what the host took for each phase). The calls of a step in the archive
are those of the code that was measured: a step that runs other kernels today is not rehearsed again. `one_by_one` of
calls recorded before 2026-11-30 was filled in later, from calls alike in all else of the same step or of others.
"""

import json
import lzma
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from framework.memory.cards import read_card
from framework.memory.step_time import last_micro_batch, steady_step
from framework.memory.trace import Launcher, Operation, Rehearsal
from framework.schema.config import TrainingConfig

ARCHIVE = Path(__file__).parent / "results" / "step_time_steps_h200.xz"
CARD = "h200_141gb"
LAUNCHER = Operation._fields.index("launcher")


@dataclass(frozen=True)
class Measured:
    """One measurement of one step.

    `steps`: seconds of the host by phase, of each step or their median; `speed_ms`: of a millisecond of Python,
    dispatcher and autograd before each of the steps and after the last. `busy_seconds`: of the card.
    """

    name: str
    machine: str
    use: str
    seconds: float
    busy_seconds: float | None = None
    steps: tuple[Mapping[str, float], ...] = ()
    speed_ms: tuple[float, ...] = ()


@dataclass
class Archive:
    """`calls`: all that differ; `orders`: step -> the numbers of its calls, in order; `micro_batches`: of a step."""

    calls: list[Operation] = field(default_factory=list)
    orders: dict[str, list[int]] = field(default_factory=dict)
    micro_batches: dict[str, int] = field(default_factory=dict)
    rows: list[Measured] = field(default_factory=list)

    def add(self, row: Measured, operations: list[Operation], micro_batches: int) -> None:
        """A measured step and its calls, in place of one of the same name and machine."""
        numbers = {call: number for number, call in enumerate(self.calls)}
        self.orders[row.name] = [numbers.setdefault(operation, len(numbers)) for operation in operations]
        self.calls, self.micro_batches[row.name] = list(numbers), micro_batches
        self.rows = [known for known in self.rows if (known.name, known.machine) != (row.name, row.machine)] + [row]

    def operations(self, name: str) -> Iterator[Operation]:
        """The calls of a step, one after the other."""
        return (self.calls[number] for number in self.orders[name])

    def write(self, path: Path = ARCHIVE) -> None:
        document = {
            "calls": [[*call[:LAUNCHER], call.launcher.value, *call[LAUNCHER + 1 :]] for call in self.calls],
            "orders": self.orders,
            "micro_batches": self.micro_batches,
            "rows": [{key: value for key, value in vars(row).items() if value not in (None, ())} for row in self.rows],
        }
        text = json.dumps(document, separators=(",", ":"))
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


@cache
def archive(path: Path = ARCHIVE) -> Archive:
    """The archive as it is committed."""
    document = json.loads(lzma.decompress(path.read_bytes()))
    calls = [_operation(values) for values in document["calls"]]
    rows = [Measured(**{key: _frozen(value) for key, value in row.items()}) for row in document["rows"]]
    return Archive(calls, document["orders"], document["micro_batches"], rows)


def _operation(values: list[Any]) -> Operation:
    call = Operation(*values)
    return call._replace(shape=tuple(call.shape), launcher=Launcher(call.launcher))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def whole_step(rehearsal: Rehearsal) -> list[Operation]:
    """The calls of a step with all its micro-batches, of which two were rehearsed."""
    operations = steady_step(rehearsal.trace)
    start, end = last_micro_batch(operations)
    more = max(0, rehearsal.config.batch.accumulation - rehearsal.micro_batches)
    return [*operations[:end], *operations[start:end] * more, *operations[end:]]


def main() -> None:
    from framework.run.rehearsal.rehearse import record

    known = archive() if ARCHIVE.exists() else Archive()
    for line in Path(sys.argv[1]).read_text().splitlines():
        row = json.loads(line)
        config = TrainingConfig.model_validate({**row.pop("config"), "gpu": read_card(CARD)})
        measured = Measured(**{key: _frozen(value) for key, value in row.items()})
        known.add(measured, whole_step(record(config)), config.batch.accumulation)
    known.write()


if __name__ == "__main__":
    main()
