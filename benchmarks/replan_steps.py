"""Steps that were measured and that nothing was fitted to, planned again by the code of today:
results/step_time_replanned_cpu.json.

python -m benchmarks.replan_steps OUT.jsonl      ten minutes of one core; goes on where it ended

The rows are those of `step_time_phases_h200.json` that judge the fit of the host's costs (one card), and those of
`drawn_sharded_h200.json` (two cards). Each is planned for a host that is not known, and where the host of a call was
measured (`hosts` there), for that one.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.drawn import config_of, drawn
from benchmarks.fit_step_time import summary
from benchmarks.recorded_steps import archive
from benchmarks.rows import Queue, run_rows
from framework.memory.requirements import needs_package
from framework.memory.step_time import estimate_step, hosts_of, step_cost
from framework.schema.config import TrainingConfig
from framework.schema.gpu import HostParams

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "step_time_replanned_cpu.json"
TWO_CARDS = "two cards"
SEEDS = {"A-": 20261129, "B-": 20261130}
"""How names of rows begin -> what drew them."""
JUDGES = "B-"
"""Nothing was fitted to any row of this seed; of the other one, to none that says so."""
SECONDS = 600
"""After which a plan is ended."""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())  # type: ignore[no-any-return]


def plan_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of the row's step for each of its hosts; for one that is not known under `unknown`."""
    from framework.run.rehearsal.rehearse import record

    config = config_of(row)
    if not needs_package(config, "bitsandbytes"):  # as a plan's own process does: else peft imports it
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    configs = {"unknown": config}
    for name, host in row["hosts"].items():
        configs[name] = config.model_copy(update={"gpu": config.gpu.model_copy(update={"host": HostParams(**host)})})
    if needs_package(config, "liger-kernel") and find_spec("liger_kernel") is None:
        return {"planned": {name: _as_recorded(row["name"], on_host) for name, on_host in configs.items()}}
    rehearsal, found = record(config), {}
    for name, on_host in configs.items():
        cost = step_cost(replace(rehearsal, config=on_host))
        assert cost is not None
        found[name] = cost.seconds
    return {"planned": found}


def _as_recorded(name: str, config: TrainingConfig) -> float:
    """Seconds from the calls in the archive: for what cannot be rehearsed without kernels that are not here."""
    operations = list(archive().operations(name))
    return mean(estimate_step(operations, config.gpu, costs=costs).seconds for costs in hosts_of(config))


def measured() -> Iterator[tuple[str, str, float]]:
    """(group, name, seconds) of each measurement; the group of one card is its call."""
    for row in read("step_time_phases_h200.json")["rows"]:
        if row.get("judges", row["name"].startswith(JUDGES)):
            yield str(row["call"]), row["name"], row["step_seconds"]
    for row in read("drawn_sharded_h200.json")["rows"]:
        yield TWO_CARDS, row["name"], row["measured"]["step_seconds"]


def asked() -> Iterator[dict[str, Any]]:
    """Each row once, with its hosts."""
    calls: dict[str, list[str]] = {}
    for group, name, _ in measured():
        calls.setdefault(name, []).append(group)
    hosts = read("step_time_phases_h200.json")["hosts"]
    rows = [{**row, "name": first + row["name"]} for first, seed in SEEDS.items() for row in drawn("single", seed)]
    for row in [*rows, *read("drawn_sharded_predictions.json")["rows"]]:
        if row["name"] in calls:
            of_row = {call: hosts[call] for call in calls[row["name"]] if call in hosts}
            yield {"name": row["name"], "sections": row["sections"], "hosts": of_row}


def told(plans: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Errors of each measurement in per cent, and of groups of them."""
    rows = []
    for group, name, seconds in measured():
        if name in plans:
            errors = {"unknown": plans[name]["unknown"], "host": plans[name].get(group)}
            shown = {key: round(100 * (value / seconds - 1), 1) for key, value in errors.items() if value}
            rows.append({"group": group, "name": name, "seconds": seconds, **shown})
    groups = {group: [row for row in rows if row["group"] == group] for group in sorted({row["group"] for row in rows})}
    groups["one card"] = [row for row in rows if row["group"] != TWO_CARDS]
    return {"summary": {group: _summaries(of_group) for group, of_group in groups.items()}, "rows": rows}


def _summaries(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {key: [row[key] for row in rows if key in row] for key in ("unknown", "host")}
    return {key: summary(errors) for key, errors in found.items() if errors}


def main() -> None:
    out = Path(sys.argv[1])
    done = [json.loads(line)["name"] for line in out.read_text().splitlines()] if out.exists() else []
    run_rows(
        [row for row in asked() if row["name"] not in done], plan_row, out, [Queue((0,), threads=1)], seconds=SECONDS
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    document = {"date": datetime.now(UTC).date().isoformat()}
    document |= {"packages": {name: version(name) for name in ("torch", "transformers", "peft")}}
    document |= {"without_plan": {line["name"]: line["error"][:200] for line in lines if "error" in line}}
    document |= told({line["name"]: line["planned"] for line in lines if "planned" in line})
    listed = ",\n".join(f"  {json.dumps(row)}" for row in document.pop("rows"))
    OUT.write_text(json.dumps(document, indent=1)[:-2] + f',\n "rows": [\n{listed}\n ]\n}}\n')
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
