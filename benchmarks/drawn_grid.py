"""The rows of `drawn.py`: planned, then measured, then compared.

python benchmarks/drawn_grid.py predict single|sharded SEED PLANS.jsonl                 any machine; resumes
python benchmarks/drawn_grid.py commit PLANS.jsonl results/PREDICTIONS.json NOTE ...    before anything is measured
python benchmarks/drawn_grid.py measure results/PREDICTIONS.json MEASURED.jsonl TOTAL_SECONDS   one or two cards
python benchmarks/drawn_grid.py compare results/PREDICTIONS.json MEASURED.jsonl results/OUT.json NOTE ...

On a machine with two cards, one-card rows run on both in parallel; two-card rows are measured one by one.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.drawn import config_of, drawn
from benchmarks.rows import Queue, run_rows
from framework.errors import RequestError
from framework.memory.requirements import needs_package

BYTES = ("allocated_bytes", "reserved_bytes", "device_bytes")
LIMITS = {"allocated_bytes": (0.1, 1), "reserved_bytes": (1, 3), "device_bytes": (1, 3), "step_seconds": (10, 25)}
"""Limits in percent; rows within each are counted."""
SECONDS = 60
"""Timeout of a row; most of it is for compilation."""


def plan_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the row's plan, or the reason for the lack of one under `refused`."""
    from framework.run.rehearsal.rehearse import rehearse

    start = time.perf_counter()
    try:
        config = config_of(row)
        if not needs_package(config, "bitsandbytes"):  # as a plan's own process does: else peft imports it
            sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
        plan = rehearse(config).to_json()
    except (ValueError, RequestError) as error:
        return {"refused": " ".join(str(error).split())[:300]}
    peak = plan["step_peak"]
    found = {key: peak[key] for key in (*BYTES, "device_bytes_upper")} | {"step_seconds": plan["step"]["seconds"]}
    return {"planned": found, "sections": row["sections"], "planning_seconds": round(time.perf_counter() - start, 1)}


def measure_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Measured figures of one card."""
    from framework.run.planning.measure import measure

    return {"measured": measure(config_of(row)).to_json()}


def predict(kind: str, seed: int, out: Path) -> None:
    known = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    rows = [row for row in drawn(kind, seed) if row["name"] not in known]
    run_rows(rows, plan_row, out, [Queue((0,), threads=1)] * 2, seconds=600)


def commit(plans: Path, out: Path, notes: list[str]) -> None:
    """The plans as one document, one line per row."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    made = {"made": datetime.now(UTC).isoformat(timespec="minutes"), "commit": head.strip(), "notes": notes}
    made["packages"] = {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}
    rows = sorted(map(json.loads, plans.read_text().splitlines()), key=_turn)
    lines = ",\n".join(json.dumps({k: v for k, v in row.items() if not k.endswith("seconds")}) for row in rows)
    out.write_text(json.dumps(made, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n')


def _turn(row: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Measuring order: 4-bit bases first, compiled rows last, as the device time may end before the rows do."""
    return "-compile" in row["name"], not row["name"].startswith("qlora"), row["name"]


def measure(predictions: Path, out: Path, total: float) -> None:
    import torch

    rows = sorted((row for row in json.loads(predictions.read_text())["rows"] if "planned" in row), key=_turn)
    if rows[0]["sections"].get("gpu", {}).get("count", 1) > 1:
        from benchmarks.sharded import measure_drawn

        run_rows(
            rows, measure_drawn, out, [Queue((0, 1), threads_of_launch())], seconds=SECONDS, kept=len(rows), total=total
        )
        return
    queues = [Queue((card,)) for card in range(torch.cuda.device_count())]
    run_rows(rows, measure_row, out, queues, seconds=SECONDS, total=total)


def threads_of_launch() -> int:
    """Threads per rank, as `train --nproc 2` sets them."""
    return max(1, (os.cpu_count() or 1) // 2)


def compare(predictions: Path, measured: Path, out: Path, notes: list[str]) -> None:
    """Errors of each row in percent, and how many are within the limits."""
    plans = json.loads(predictions.read_text())
    found = {row["name"]: row for row in map(json.loads, measured.read_text().splitlines())}
    rows, failed = [], {}
    for plan in plans["rows"]:
        real = found.get(plan["name"], {"error": "not measured"})
        if "planned" not in plan or "measured" not in real:
            failed[plan["name"]] = plan.get("refused") or plan.get("error") or real.get("error")
            continue
        planned, took = plan["planned"], real["measured"]
        errors = {key: round(100 * (planned[key] / took[key] - 1), 3) for key in LIMITS if took.get(key)}
        row = {"name": plan["name"], "error_per_cent": errors, "planned": planned}
        if took.get("device_bytes"):
            row["covered"] = took["device_bytes"] <= planned["device_bytes_upper"]
        rows.append(row | {"measured": {key: took[key] for key in LIMITS if key in took}})
    document = {"date": datetime.now(UTC).date().isoformat(), "notes": notes, "planned_by": plans["commit"]}
    document |= {"summary": summary(rows), "without_figures": failed}
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(json.dumps(document, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n')
    print(json.dumps(document["summary"], indent=1))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest error of each figure, shares within its limits, and rows above their upper bound."""
    covered = [row["covered"] for row in rows if "covered" in row]
    found: dict[str, Any] = {"rows": len(rows), "above_upper_end": f"{covered.count(False)} of {len(covered)}"}
    for key, limits in LIMITS.items():
        errors = [abs(row["error_per_cent"][key]) for row in rows if key in row["error_per_cent"]]
        if errors:
            found[key] = {"median": round(statistics.median(errors), 3), "largest": max(errors)}
            found[key] |= {f"within_{limit}": sum(error <= limit for error in errors) for limit in limits}
    return found


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "predict":
        predict(arguments[0], int(arguments[1]), Path(arguments[2]))
    elif command == "commit":
        commit(Path(arguments[0]), Path(arguments[1]), arguments[2:])
    elif command == "measure":
        measure(Path(arguments[0]), Path(arguments[1]), float(arguments[2]))
    else:
        compare(Path(arguments[0]), Path(arguments[1]), Path(arguments[2]), arguments[3:])


if __name__ == "__main__":
    main()
