"""Fit the host's costs of the step-time model to measured steps, and judge them on others.

python -m benchmarks.fit_step_time     prints the constants, writes results/step_time_fit_h200.json; half a minute

Everything is read from results/step_time_steps_h200.xz (`recorded_steps.py`). Two kinds of measurements fit: whole
steps, with a speed for each machine's host, and, of steps in which the host alone decides, what it took to issue
forward, loss, backward and update, with a speed for each step. The card's shares are those of
`framework/memory/roofline.py`, and stay.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded_steps import CARD, Measured, archive
from framework.memory.cards import read_card
from framework.memory.host_time import FITTED, HostCosts, host_seconds
from framework.memory.roofline import CALIBRATED, kernel_seconds
from framework.memory.trace import EXCHANGE, GATHER, HOLD, MODULE, REDUCE, TRANSFER, WAIT, Launcher, Operation
from framework.schema.config import TrainingConfig

RESULT = Path(__file__).parent / "results" / "step_time_fit_h200.json"
BEFORE: Mapping[str, float] = {
    **{"module": 4.99e-6, "recomputed_module": 9.28e-6, "forward": 16.6e-6, "recompute": 19.4e-6, "backward": 21.8e-6},
    **{"optimizer": 23.2e-6, "in_place": 4.39e-6, "forward_view": 1.71e-6, "recompute_view": 14.7e-6},
    **{"backward_view": 2.74e-6, "unpack": 34.6e-6, "product": 12.9e-6, "compiled": 25.8e-6, "graph": 0.217e-3},
    **{"recomputed_graph": 1.19e-3, "triton": 0.204e-3, "bitsandbytes": 72.7e-6, "bitsandbytes_update": 54.5e-6},
    **{"prefetch": 34.6e-6, "listed": 1.65e-6, "wait": 18.7e-6, "step": 0.8e-3},
    **{"pack": 8e-6, "walk": 6e-6, "micro_batch": 0.5e-3, "update": 0.5e-3},
}
"""Where the fit begins, which holds what no row tells of: the costs that whole steps alone had given. The last four
only the fit has: what a checkpoint's hook takes to put a tensor away, a module in the search for trained parameters
(which a step made twice until rows of `call 4`), and what a micro-batch and an update have once."""
COSTS = tuple(BEFORE)
PART_OF = {"pack": "unpack", "micro_batch": "step", "update": "step"}
"""Cost that only the fit has -> the one of HostCosts that it is counted with."""
PROBED = {"2026-11-29 b": 0.87, "call 3": 1.335}
"""Machine -> its host's time as a share of the reference of `doctor --calibrate`, the mean over its kinds. The level of
the costs is that reference's: a host that is measured at 1 takes them as they are."""
LOOSENESS, LOOSENESS_OF_SPEEDS, LOOSENESS_OF_STEPS = 0.5, 0.3, 0.2
"""Standard deviations of the logarithms around the beginning: of costs, of machines' speeds and of single steps'."""
STEP_BEGINS = 0.35
"""Logarithm of the speed at which a step of `phases` begins: its hosts were slow ones."""
NOISE = 0.08
"""Relative error at which a whole step begins to count less: one is measured so far apart."""
PHASES = {"forward": 0.06, "backward": 0.06, "optimizer_step": 0.12, "loss": 0.3}
"""Phase -> the same."""
WAITING = ("8bit", "paged", "in-backward", "states-on-host", "offload")
"""Words of names whose update waits for the card, so that its time is not the host's alone."""
ROUNDS, STEP, ENOUGH = 20, 0.02, 5e-4
FEW = 8
"""Calls between two waits for which an array is slower than a loop: those of an optimizer that waits each time."""
DECIDES = 0.6
"""Share of a step that the card may be busy where the host alone decides."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """A measured step: counts of each cost by call (`host`), by phase, and once; seconds of each call's kernel."""

    row: Measured
    host: Array
    order: NDArray[np.int64]
    kernels: Array
    stops: Sequence["Stop"]
    once: Array
    phases: Mapping[str, Array]

    def planned(self, costs: Array, share: float = 1.0) -> float:
        """What `framework.memory.step_time.estimate_step` gives; a test holds the two together."""
        host, kernels = (self.host @ costs)[self.order] * share, self.kernels[self.order]
        at, done, arrivals = float(self.once @ costs) * share, 0.0, list[float]()
        for begin, end in pairwise([Stop(0, "", 0.0), *self.stops, Stop(len(host), "", 0.0)]):
            if begin.name == TRANSFER:
                arrivals.append(max([at, done, *arrivals[-1:]]) + begin.value)
            elif begin.name == HOLD and begin.value < len(arrivals):
                done = max(done, arrivals[-1 - int(begin.value)])
            elif begin.name == WAIT:
                at = max([at, done, *arrivals[-1:]] if begin.value else [at, done])
            if end.at - begin.at < FEW:
                few = slice(begin.at, end.at)
                for seconds, busy in zip(host[few].tolist(), kernels[few].tolist(), strict=True):
                    at += seconds
                    done = max(at, done) + busy if busy else done
                continue
            issued, busy_for = at + np.cumsum(host[begin.at : end.at]), kernels[begin.at : end.at]
            launched = busy_for > 0
            if launched.any():
                ends = np.cumsum(busy_for[launched])
                done = float(ends[-1] + max(done, np.max(issued[launched] - ends + busy_for[launched])))
            at = float(issued[-1])
        return max(at, done, sum(stop.value for stop in self.stops if stop.name == TRANSFER))


class Stop(NamedTuple):
    """A WAIT or HOLD before call `at`, or a TRANSFER before it: whether the host waits for transfers too, which of them
    kernels wait for, or its seconds."""

    at: int
    name: str
    value: float


@dataclass(frozen=True)
class Phase:
    """What the host took to issue one phase of a step: counts of each cost, seconds, and whose speed they have."""

    counts: Array
    seconds: float
    noise: float
    speed: str


@cache
def _table() -> tuple[Array, Array]:
    """(counts of each cost, seconds of the kernel) of every call in the archive."""
    card = TrainingConfig.model_validate({"gpu": read_card(CARD)}).gpu
    none = HostCosts(**{item.name: 0.0 for item in fields(HostCosts)})
    units = [replace(none, **{name: 1.0}) if hasattr(none, name) else none for name in COSTS]
    calls = archive().calls
    host = np.array([[host_seconds(call, unit) for unit in units] for call in calls])
    moves = (GATHER, REDUCE, EXCHANGE)
    kernels = [
        max(kernel_seconds(call, card)) + CALIBRATED.launch_seconds if call.bytes and call.name not in moves else 0.0
        for call in calls
    ]
    return host, np.array(kernels)


def _stops(numbers: Sequence[int]) -> Iterator[Stop]:
    """Where the calls of a step with these numbers are more than kernels in order."""
    calls, (_, kernels) = archive().calls, _table()
    for at, number in enumerate(numbers):
        call = calls[number]
        if call.name == TRANSFER:
            yield Stop(at + 1, TRANSFER, kernels[number])
        elif call.name == HOLD:
            yield Stop(at, HOLD, call.tensors)
        elif call.name == WAIT:
            yield Stop(at, WAIT, call.launcher is Launcher.BITSANDBYTES)


def step_of(row: Measured) -> Step:
    """The counts of a measured step."""
    known, (host, kernels) = archive(), _table()
    numbers, order = np.unique(known.orders[row.name], return_inverse=True)
    calls = [known.calls[number] for number in numbers]
    micro_batches = known.micro_batches[row.name]
    kinds = np.array([_phase(call) for call in calls])[order]
    phases = {kind: host[numbers][order[kinds == kind]].sum(0) for kind in PHASES}
    phases["forward"][COSTS.index("pack")] = phases["backward"][COSTS.index("unpack")]
    walked = 0.0 if row.machine == "call 4" else 2.0
    modules = sum(calls[number].name == MODULE and kinds[at] in ("forward", "loss") for at, number in enumerate(order))
    phases["optimizer_step"] += _counts(walk=walked * modules / micro_batches, update=1)
    phases["loss"] += _counts(micro_batch=micro_batches)
    counts = host[numbers].copy()
    counts[:, COSTS.index("pack")] = counts[:, COSTS.index("unpack")]
    return Step(
        row,
        counts,
        order,
        np.where([call.name == TRANSFER for call in calls], 0.0, kernels[numbers]),
        tuple(_stops(known.orders[row.name])),
        _counts(walk=walked * modules / micro_batches, micro_batch=micro_batches, update=1, step=1),
        phases,
    )


def _phase(call: Operation) -> str:
    return "backward" if call.phase == "recompute" else call.phase


def _counts(**counts: float) -> Array:
    return np.array([counts.get(name, 0.0) for name in COSTS])


def steps(use: str) -> list[Step]:
    """The measured steps of one use."""
    return [step_of(row) for row in archive().rows if row.use == use]


def phases_of(step: Step) -> list[Phase]:
    """What the host took for the phases of a step in which it alone decides; none for another step."""
    row = step.row
    if (row.busy_seconds or 0) >= DECIDES * row.seconds or "in-backward" in row.name or "offload" in row.name:
        return []
    seconds = {key: median(each.get(key, 0.0) for each in row.steps) for key in row.steps[0]}
    speed = f"{row.name} {row.machine}"
    return [
        Phase(step.phases[name], seconds[name], noise, speed)
        for name, noise in PHASES.items()
        if seconds.get(name, 0) >= 0.2e-3
        and not (name == "optimizer_step" and any(word in row.name for word in WAITING))
    ]


class Fit:
    """Logarithms of the costs, of the speeds of machines' hosts, and of those of single steps."""

    def __init__(self, whole: Sequence[Step], parts: Sequence[Phase]) -> None:
        self.whole, self.parts = whole, parts
        machines, speeds = sorted({step.row.machine for step in whole}), sorted({part.speed for part in parts})
        self.names = [*COSTS, *machines, *speeds]
        self.of_whole = [self.names.index(step.row.machine) for step in whole]
        self.of_parts = [self.names.index(part.speed) for part in parts]
        self.begins = np.array(
            [*np.log(list(BEFORE.values())), *(0.0 for _ in machines), *(STEP_BEGINS for _ in speeds)]
        )
        loose = [LOOSENESS] * len(COSTS) + [LOOSENESS_OF_SPEEDS] * len(machines) + [LOOSENESS_OF_STEPS] * len(speeds)
        self.loose = np.array(loose)
        self.noise = np.array([NOISE] * len(whole) + [part.noise for part in parts])

    def errors(self, at: Array) -> Array:
        """Logarithms of planned over measured: of whole steps, then of phases."""
        return np.concatenate([self._of_whole(at, range(len(self.whole))), self._of_phases(at)])

    def _of_whole(self, at: Array, which: Sequence[int]) -> Array:
        values, steps = np.exp(at), [(self.whole[number], self.of_whole[number]) for number in which]
        ratios = [step.planned(values[: len(COSTS)], values[speed]) / step.row.seconds for step, speed in steps]
        return np.log(ratios)

    def _of_phases(self, at: Array) -> Array:
        costs = np.exp(at[: len(COSTS)])
        return np.array(
            [
                at[speed] + np.log(part.counts @ costs / part.seconds)
                for part, speed in zip(self.parts, self.of_parts, strict=True)
            ]
        )

    def slopes(self, at: Array, errors: Array) -> Array:
        """Derivatives of the errors, by differences."""
        found = np.zeros((len(errors), len(at)))
        whole = len(self.whole)
        for axis in range(len(at)):
            moved = at.copy()
            moved[axis] += STEP
            which = [number for number in range(whole) if axis < len(COSTS) or self.of_whole[number] == axis]
            found[which, axis] = (self._of_whole(moved, which) - errors[which]) / STEP
            found[whole:, axis] = (self._of_phases(moved) - errors[whole:]) / STEP
        return found

    def loss(self, at: Array, errors: Array) -> float:
        """Squares of small errors, sizes of large ones, and how far all has moved."""
        robust = 2 * (np.sqrt(1 + (errors / self.noise) ** 2) - 1)
        return float(robust.sum() + (((at - self.begins) / self.loose) ** 2).sum())

    def run(self) -> Array:
        """Gauss-Newton steps with damping (Levenberg-Marquardt)."""
        at, damping = self.begins.copy(), 1.0
        errors = self.errors(at)
        for round_number in range(ROUNDS):
            loss, slopes = self.loss(at, errors), self.slopes(at, errors)
            weights = 1 / np.sqrt(1 + (errors / self.noise) ** 2) / self.noise**2
            curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(self.loose**-2)
            gradient = slopes.T @ (weights * errors) + (at - self.begins) / self.loose**2
            while damping < 1e6:
                damped = curvature + damping * np.diag(np.diag(curvature))
                moved = at + np.linalg.solve(damped, -gradient).clip(-0.7, 0.7)
                next_errors = self.errors(moved)
                if self.loss(moved, next_errors) < loss:
                    break
                damping *= 4
            else:
                break
            at, errors, damping = moved, next_errors, damping / 8
            print(f"round {round_number + 1}: loss {self.loss(at, errors):.1f}", flush=True)
            if loss - self.loss(at, errors) < ENOUGH * loss:
                break
        return at


@dataclass(frozen=True)
class Fitted:
    """`costs` as the fit has them, at the level of the reference host; machine -> its host's share of them."""

    costs: Array
    hosts: Mapping[str, float]

    @property
    def constants(self) -> dict[str, float]:
        """What belongs into `framework.memory.host_time.FITTED`: three digits, without what only the fit has."""
        found = dict(zip(COSTS, self.costs.tolist(), strict=True))
        for name, part in PART_OF.items():
            found[part] += found[name]
        return {name: float(f"{value:.3g}") for name, value in found.items() if hasattr(FITTED, name)}

    @property
    def unknown(self) -> tuple[float, ...]:
        """The sixth, the half and five sixths of the hosts: what HOST_SHARES are."""
        return tuple(round(float(np.quantile(list(self.hosts.values()), part)), 2) for part in (1 / 6, 1 / 2, 5 / 6))


def fitted() -> Fitted:
    """The fit to the rows of the archive that fit; those that judge are not read."""
    of_phases = [(step, phases_of(step)) for step in steps("phases")]
    parts = [part for _, found in of_phases for part in found]
    problem = Fit(steps("fits"), parts)
    at = np.exp(problem.run())
    speeds = dict(zip(problem.names[len(COSTS) :], at[len(COSTS) :].tolist(), strict=True))
    hosts = defaultdict[str, list[float]](list)
    for name in {step.row.machine for step in problem.whole}:
        hosts[name].append(speeds[name])
    for step, found in of_phases:
        if found:
            hosts[step.row.machine].append(speeds[found[0].speed])
    shares = {name: geometric_mean(values) for name, values in sorted(hosts.items())}
    level = geometric_mean(shares[name] / probed for name, probed in PROBED.items())
    return Fitted(at[: len(COSTS)] * level, {name: round(share / level, 3) for name, share in shares.items()})


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Errors of planned over measured, in per cent."""
    sizes = np.abs(errors)
    return {
        "rows": len(errors),
        "median": round(float(np.median(sizes)), 1),
        "within_10": int(np.sum(sizes <= 10)),
        "within_25": int(np.sum(sizes <= 25)),
        "worst": max(errors, key=abs),
        "median_signed": round(median(errors), 1),
    }


def told(found: Fitted) -> dict[str, Any]:
    """The constants, and planned over measured of every row: for its host as fitted, and for one that is not known."""
    costs, rows = _counts(**found.constants), []
    for step in (step for use in ("fits", "judges", "phases") for step in steps(use)):
        unknown = mean(step.planned(costs, share) for share in found.unknown)
        row = {key: getattr(step.row, key) for key in ("name", "machine", "use", "seconds")}
        row["error_unknown"] = _per_cent(unknown / step.row.seconds)
        if step.row.machine in found.hosts:
            row["error"] = _per_cent(step.planned(costs, found.hosts[step.row.machine]) / step.row.seconds)
        rows.append(row)
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        groups[row["use"]].append(row)
        groups[f"{row['use']}, {row['machine']}"].append(row)
    summaries = {name: _summaries(groups[name]) for name in sorted(groups)}
    constants = {"host": found.constants, "machines": dict(found.hosts), "unknown": found.unknown}
    return constants | {"summary": summaries, "rows": rows}


def _summaries(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {key: [row[key] for row in rows if key in row] for key in ("error", "error_unknown")}
    return {key: summary(errors) for key, errors in found.items() if errors}


def _per_cent(ratio: float) -> float:
    return round(100 * (ratio - 1), 1)


def main() -> None:
    result = told(fitted())
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result.pop("rows"))
    RESULT.write_text(json.dumps(result, indent=1)[:-2] + f',\n "rows": [\n{rows}\n ]\n}}\n')


if __name__ == "__main__":
    main()
