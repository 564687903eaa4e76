"""Duration of `fit`: with an empty cache, then for other limits of the same model and card, with some plans cached.

    python benchmarks/fit_time.py OUT.json          (any machine, two to three minutes of two free cores)

LoRA of Qwen3 8B for an H100, then with 40 and 24 GB of it usable, each in a fresh process; the cache is empty before
the first. `candidates` counts those of the search, `computed` those with their own bytes and seconds.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECIPE = ["chat", "model=qwen3_8b", "peft=lora", "gpu=h100_80gb"]
LIMITS: tuple[tuple[str, ...], ...] = ((), ("gpu.usable_bytes=40000000000",), ("gpu.usable_bytes=24000000000",))


def one(limit: tuple[str, ...], cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "framework", "fit", *RECIPE, *limit, "--json"]
    start = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = round(time.perf_counter() - start, 1)
    found = json.loads(done.stdout)
    facts = {"candidates": found["tried"], "computed": found["computed"], "overrides": found["overrides"]}
    return {"limit": list(limit), "seconds": seconds, **facts}


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        rows = [one(limit, cache) for limit in LIMITS]
    document = {
        "what": "seconds of `tunesmith fit`, each in a process of its own, one after the other",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: version(name) for name in ("torch", "transformers", "peft")},
        "date": datetime.now(UTC).date().isoformat(),
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print({key: value for key, value in row.items() if key != "overrides"})


if __name__ == "__main__":
    main()
