"""`fit` on this machine's card under caps of memory: each proposal is run.

    python benchmarks/fit_caps.py OUT.jsonl [CAP_GB ...]        (a CUDA card; a minute or two a cap and shape)

A line for each cap: what was proposed, what was predicted, what was measured, whether it ran out of memory. The cap is
`gpu.usable_bytes`, so a proposal fits if its measured device bytes stay below.
"""

import json
import sys
import time

from framework.compose import load
from framework.errors import OutOfMemory
from framework.memory.installed import detect
from framework.run.fit import fit
from framework.run.measure import measure_in_subprocess

SHAPES = {
    "1b_full": ["model=llama3.2_1b", "~peft", "training.global_batch_size=64"],
    "8b_lora": ["model=llama3.1_8b", "training.global_batch_size=32"],
    "0.6b_full": ["model=qwen3_0.6b", "~peft", "training.global_batch_size=64"],
}
CAPS = (8, 12, 16, 24, 40, 80)


def main() -> None:
    """Measure the proposal of each shape under each cap."""
    out, *caps = sys.argv[1:]
    with open(out, "a", encoding="utf-8") as file:
        for name, words in SHAPES.items():
            for cap in map(int, caps or CAPS):
                usable = ["gpu.usable_bytes=" + str(int(cap * 1e9))] if cap < 80 else []
                config = load("finetune_local", [*words, f"gpu={detect()}", *usable, "data.eval_fraction=0"])
                start = time.perf_counter()
                found = fit(config, runs_here=True)
                line = {"shape": name, "cap_gb": cap, "seconds": time.perf_counter() - start, **_facts(found)}
                if found.fits:
                    try:
                        line["measured"] = measure_in_subprocess(found.config).to_json()
                    except OutOfMemory as error:
                        line["out_of_memory"] = str(error)
                print(json.dumps(line), file=file, flush=True)


def _facts(found) -> dict:
    step = found.plan.step
    return {
        "fits": found.fits,
        "overrides": found.overrides,
        "upper_bytes": found.plan.peak.device_bytes_upper,
        "tokens_per_second": step.tokens_per_second if step else None,
        "tried": found.tried,
        "planned": found.planned,
        "frontier": [point.to_json() for point in found.frontier],
    }


if __name__ == "__main__":
    main()
