"""Fit the host's costs and the card's shares of the step-time model to measured steps, and judge them on others.

python benchmarks/fit_step_time.py record ROWS.jsonl STEPS_DIR   rehearse each row's step; any machine, minutes a row
python benchmarks/fit_step_time.py fit STEPS_DIR RESULT.json     split by SEED, fit, judge, print the constants

A row of ROWS.jsonl has `name`, `config` (without `gpu`), `measured.step_seconds`, and may have `machine`: rows of one
machine share a speed of its host, which is fitted too.
"""

import json
import os
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from framework.memory.cards import read_card
from framework.memory.host_time import FITTED, HostCosts, host_seconds
from framework.memory.roofline import CALIBRATED, Efficiency, kernel_seconds
from framework.memory.step_time import last_micro_batch, steady_step
from framework.memory.trace import EXCHANGE, GATHER, REDUCE, TRANSFER, WAIT, Operation, Rehearsal
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams

SEED = 18
"""Splits the rows: every third one of the shuffled names judges, the others fit."""
CARD = "h200_141gb"
HOST = tuple(item.name for item in fields(HostCosts) if item.name != "collective")
EXCHANGES = ("link", "card_link", "card_link_busy", "collective_seconds", "sharded_update_seconds")
SHARES = tuple(item.name for item in fields(Efficiency) if item.name not in EXCHANGES)
"""What rows of one card tell of."""
NOISE = 0.06
"""Relative error at which a row begins to count less: two rows of equal work were measured this far apart."""
LOOSENESS_OF_HOST, LOOSENESS_OF_SHARES, LOOSENESS_OF_MACHINES = 0.4, 0.05, 0.3
"""Standard deviations of the logarithms around the constants of today, which hold what no row tells of. The card's
shares are nearly held: kernels of twelve steps were timed one by one. So is the time between
two steps, which else pays for what long steps lack."""
ROUNDS, STEP = 8, 0.02
FEW = 8
"""Calls between two waits for which an array is slower than a loop: those of an optimizer that waits each time."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """One measured step: its different calls, which of them comes when, and between which waits."""

    name: str
    machine: str
    measured: float
    config: dict[str, Any]
    card: GPUParams
    calls: tuple[Operation, ...]
    order: NDArray[np.int64]


def record(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Rehearse each row in a process of its own, which a fork starts with torch imported."""
    from framework.run.rehearsal.rehearse import record as rehearse

    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        target = folder / f"{row['name'].replace('/', '_')}.pkl"
        if target.exists():
            continue
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            config = TrainingConfig.model_validate({**row["config"], "gpu": read_card(CARD)})
            operations = whole_step(rehearse(config))
            target.write_bytes(pickle.dumps({**row, "operations": [tuple(operation) for operation in operations]}))
        except Exception as error:  # one row that cannot be planned must not stop the others
            print(row["name"], repr(error)[:200], flush=True)
        os._exit(0)


def whole_step(rehearsal: Rehearsal) -> list[Operation]:
    """The calls of a step with all its micro batches, of which two were rehearsed."""
    operations = steady_step(rehearsal.trace)
    start, end = last_micro_batch(operations)
    more = max(0, rehearsal.config.batch.accumulation - rehearsal.micro_batches)
    return [*operations[:end], *operations[start:end] * more, *operations[end:]]


def load(folder: Path) -> Iterator[Step]:
    """The recorded steps."""
    card = TrainingConfig.model_validate({"gpu": read_card(CARD)}).gpu
    for path in sorted(folder.glob("*.pkl")):
        row = pickle.loads(path.read_bytes())
        numbers: dict[Operation, int] = {}
        operations = [Operation(*values) for values in row["operations"]]
        order = np.array([numbers.setdefault(operation, len(numbers)) for operation in operations])
        machine, measured = row.get("machine", "h200"), row["measured"]["step_seconds"]
        yield Step(row["name"], machine, measured, row["config"], card, tuple(numbers), order)


def planned(step: Step, costs: HostCosts, efficiency: Efficiency) -> float:
    """What `framework.memory.timeline.estimate_step` gives, over arrays; tests hold the two together."""
    host = np.array([host_seconds(call, costs) for call in step.calls])[step.order]
    kernels = np.array([_kernel(call, step.card, efficiency) for call in step.calls])[step.order]
    waits = np.flatnonzero(np.array([call.name == WAIT for call in step.calls])[step.order])
    at, done = costs.step, 0.0
    for begin, end in zip([0, *waits], [*waits, len(host)], strict=True):
        if begin:
            at = max(at, done)
        if end - begin < FEW:
            for seconds, busy_for in zip(host[begin:end].tolist(), kernels[begin:end].tolist(), strict=True):
                at += seconds
                done = max(at, done) + busy_for if busy_for else done
            continue
        issued = at + np.cumsum(host[begin:end])
        busy = kernels[begin:end]
        launched = busy > 0
        if launched.any():
            ends = np.cumsum(busy[launched])
            done = float(ends[-1] + max(done, np.max(issued[launched] - ends + busy[launched])))
        at = float(issued[-1]) if end > begin else at
    sent = np.array([call.bytes if call.name == TRANSFER else 0 for call in step.calls])[step.order].sum()
    return max(at, done, float(sent) / ((step.card.host_link_bytes_per_second or 1.0) * efficiency.link))


def _kernel(call: Operation, card: GPUParams, efficiency: Efficiency) -> float:
    if not call.bytes or call.name in (TRANSFER, GATHER, REDUCE, EXCHANGE):
        return 0.0
    return max(kernel_seconds(call, card, efficiency)) + efficiency.launch_seconds


class Fit:
    """Constants as logarithms: the host's, the card's, and the speed of each machine's host but the first's."""

    def __init__(self, machines: Sequence[str]) -> None:
        self.machines = tuple(machines)[1:]
        start = [getattr(FITTED, name) for name in HOST] + [getattr(CALIBRATED, name) for name in SHARES]
        self.start = np.log([*start, *(1.0 for _ in self.machines)])
        loose = [LOOSENESS_OF_HOST if name != "step" else LOOSENESS_OF_SHARES for name in HOST]
        loose += [LOOSENESS_OF_SHARES] * len(SHARES)
        self.loose = np.array(loose + [LOOSENESS_OF_MACHINES] * len(self.machines))

    def constants(self, at: Array) -> tuple[HostCosts, Efficiency, dict[str, float]]:
        """The constants at a point, and machine -> share of the first machine's host."""
        values = [float(value) for value in np.exp(at)]
        host, shares = len(HOST), len(HOST) + len(SHARES)
        costs = replace(FITTED, **dict(zip(HOST, values[:host], strict=True)))
        efficiency = replace(CALIBRATED, **dict(zip(SHARES, values[host:shares], strict=True)))
        return costs, efficiency, dict(zip(self.machines, values[shares:], strict=True))

    def errors(self, at: Array, steps: Sequence[Step]) -> Array:
        """Logarithm of planned over measured."""
        costs, efficiency, speeds = self.constants(at)
        hosts = {machine: costs.scaled(share) for machine, share in speeds.items()}
        return np.log([planned(step, hosts.get(step.machine, costs), efficiency) / step.measured for step in steps])

    def loss(self, at: Array, errors: Array) -> float:
        """Squares of small errors, sizes of large ones, and how far the constants have moved."""
        robust = 2 * (np.sqrt(1 + (errors / NOISE) ** 2) - 1)
        return float(robust.sum() + (((at - self.start) / self.loose) ** 2).sum())

    def run(self, steps: Sequence[Step]) -> Array:
        """Gauss-Newton steps with damping (Levenberg-Marquardt), with differences for derivatives."""
        at, damping = self.start.copy(), 1.0
        errors = self.errors(at, steps)
        for round_number in range(ROUNDS):
            loss = self.loss(at, errors)
            slopes = np.stack([(self.errors(at + STEP * axis, steps) - errors) / STEP for axis in np.eye(len(at))], 1)
            weights = 1 / np.sqrt(1 + (errors / NOISE) ** 2) / NOISE**2
            curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(self.loose**-2)
            gradient = slopes.T @ (weights * errors) + (at - self.start) / self.loose**2
            while damping < 1e6:
                move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient).clip(-0.7, 0.7)
                next_errors = self.errors(at + move, steps)
                if self.loss(at + move, next_errors) < loss:
                    break
                damping *= 4
            else:
                break
            at, errors, damping = at + move, next_errors, damping / 4
            print(f"round {round_number + 1}: loss {self.loss(at, errors):.1f}", flush=True)
            if loss - self.loss(at, errors) < 1e-3 * loss:
                break
        return at


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """(rows that fit, rows that judge), by SEED."""
    names = sorted(step.name for step in steps)
    random.Random(SEED).shuffle(names)
    judges = set(names[2::3])
    return [step for step in steps if step.name not in judges], [step for step in steps if step.name in judges]


def summary(errors: Array) -> dict[str, float]:
    """Errors of planned over measured, in per cent."""
    shares = np.expm1(errors)
    sizes = np.abs(shares)
    return {
        "rows": len(errors),
        "median": round(100 * float(np.median(sizes)), 1),
        "within_10": round(100 * float(np.mean(sizes <= 0.10)), 1),
        "within_25": round(100 * float(np.mean(sizes <= 0.25)), 1),
        "worst": round(100 * float(shares[np.argmax(sizes)]), 1),
        "median_signed": round(100 * float(np.median(shares)), 1),
    }


def fit(steps: Sequence[Step]) -> dict[str, Any]:
    """Fit on one part of the rows, judge on the other."""
    fitting, judging = split(steps)
    problem = Fit(sorted({step.machine for step in fitting}))
    at = problem.run(fitting)
    costs, efficiency, speeds = problem.constants(at)
    errors = {"fitted": problem.errors(at, fitting), "judged": problem.errors(at, judging)}
    rows = [
        {"name": step.name, "judges": kind == "judged", "measured": step.measured, "error_per_cent": _per_cent(error)}
        for kind, part in (("fitted", fitting), ("judged", judging))
        for step, error in zip(part, errors[kind], strict=True)
    ]
    return {
        "seed": SEED,
        "card": CARD,
        **{kind: summary(part) for kind, part in errors.items()},
        "host": {name: float(f"{getattr(costs, name):.3g}") for name in HOST},
        "shares": {name: float(f"{getattr(efficiency, name):.3g}") for name in SHARES},
        "machines": speeds,
        "rows": sorted(rows, key=lambda row: str(row["name"])),
    }


def _per_cent(error: float) -> float:
    return round(100 * float(np.expm1(error)), 1)


def main() -> None:
    verb, source, target = sys.argv[1:]
    if verb == "record":
        record([json.loads(line) for line in Path(source).read_text().splitlines()], Path(target))
        return
    result = fit(list(load(Path(source))))
    Path(target).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
