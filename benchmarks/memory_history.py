"""Cost per step of recording the allocator's events, also with checkpointing and compilation.

    python benchmarks/memory_history.py > history.json        # on a machine with a CUDA card

Every row runs in its own process: tokens per second of the 1B shape, with and without the recording that `train`
enables for its snapshot (`framework.run.oom.report.recorded_memory`).
"""

import contextlib
import json
import subprocess
import sys

ROWS = {
    "plain": [],
    "checkpointing": ["training.enable_gradient_checkpointing=true"],
    "compiled, checkpointing": ["training.enable_gradient_checkpointing=true", "training.compile=true"],
}
RECIPE = ["finetune_local", "model=llama3.2_1b", "training.use_peft=false", "model.model_max_length=2048"]


def measured(overrides: list[str], is_recorded: bool) -> float:
    """Tokens per second on this card."""
    import torch

    from framework import load
    from framework.build.place import real_place
    from framework.run.oom.report import recorded_memory
    from framework.run.planning.measure import measure

    config = load(RECIPE[0], [*RECIPE[1:], "training.optimizer=adamw_torch_fused", *overrides])
    place = real_place(torch.device("cuda", 0))
    with recorded_memory(place) if is_recorded else contextlib.nullcontext():
        return measure(config, steps=12).tokens_per_second


def main() -> None:
    """Run all rows twice, alternating, so that a card that warms up does not favor one side."""
    if len(sys.argv) > 1:
        name, is_recorded = sys.argv[1:]
        print(measured(ROWS[name], is_recorded == "recorded"))
        return
    found = {}
    for name in ROWS:
        for side in ("plain", "recorded") * 2:
            done = subprocess.run([sys.executable, __file__, name, side], capture_output=True, text=True, check=False)
            speed = done.stdout.split()[-1] if done.returncode == 0 else done.stderr[-500:]
            found.setdefault(name, {}).setdefault(side, []).append(speed)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
