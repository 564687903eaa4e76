"""Summary of `sharded.py`: measurements compared with plans of the same rows, and curves with that of one card.

    python benchmarks/sharded_summary.py MEASURED.jsonl benchmarks/results/sharded_h200.json [NOTE ...]     any machine

Plans are made here, by this code and its versions, after the rows were measured.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.sharded_rows import curve_of_one_card, step_config
from framework.run.planning.plan_pool import plan_in_subprocess

CARDS = {"NVIDIA H200": "h200_141gb", "NVIDIA H100 80GB HBM3": "h100_80gb"}
MEASURED = ("allocated_bytes", "reserved_bytes", "beside_torch", "step_seconds")


def step(row: dict[str, Any]) -> dict[str, Any]:
    """A row's measured and planned figures, and the errors."""
    plan = plan_in_subprocess(step_config(row, row["cards"], CARDS[row["card"]])).to_json()
    peak, measured = plan["step_peak"], {key: row[key] for key in MEASURED}
    measured["device_bytes"] = row["reserved_bytes"] + row["beside_torch"]
    planned = {key: peak[key] for key in ("allocated_bytes", "reserved_bytes")}
    planned |= {"device_bytes_upper": peak["device_bytes_upper"], "step_seconds": plan["step"]["seconds"]}
    keys = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "step": "step_seconds"}
    errors = {name: round(100 * (planned[key] / measured[key] - 1), 4) for name, key in keys.items()}
    covered = measured["device_bytes"] <= planned["device_bytes_upper"]
    return {"name": row["name"], "measured": measured, "planned": planned, "error_per_cent": errors, "covered": covered}


def curve(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Largest difference of a row's losses from those of one card."""
    one = rows[curve_of_one_card(row)]["losses"]
    furthest = max(abs(loss / other - 1) for loss, other in zip(row["losses"], one, strict=True))
    found = {"name": row["name"], "largest_relative_difference": furthest}
    return found | {"first": row["losses"][0], "last": row["losses"][-1], "steps": len(row["losses"])}


def main() -> None:
    measured, out, *notes = sys.argv[1:]
    rows = {row["name"]: row for row in map(json.loads, Path(measured).read_text().splitlines())}
    [machine] = {f"{row['cards']} x {row['card']}" for row in rows.values() if "cards" in row}
    [measured_with] = {row["torch"] for row in rows.values() if "torch" in row}
    document = {
        "machine": machine,
        "date": datetime.now(UTC).date().isoformat(),
        "packages": {"torch": measured_with, "planned with torch": torch.__version__},
        "notes": [f"planned with transformers {transformers.__version__}", *notes],
        "steps": [step(row) for row in rows.values() if "step_seconds" in row],
        "curves": [curve(row, rows) for row in rows.values() if "losses" in row],
        "failed": {row["name"]: row["error"] for row in rows.values() if "error" in row},
    }
    Path(out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
