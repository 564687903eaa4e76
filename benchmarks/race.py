"""Training steps on one card, compared with other trainers: tokens per second and memory for the same shapes.

python benchmarks/race.py run OUT.jsonl [--only NAME ...] [--steps N]    a CUDA card; names are patterns
python benchmarks/race.py summary OUT.jsonl results/race_h200.json       ratios to Trainer's pure bfloat16 of a shape
python benchmarks/race.py plot results/race_h200.json race.svg           tokens per second against memory
python benchmarks/race.py kernels OUT.jsonl [--only NAME ...]            milliseconds of ours by kind of kernel
python benchmarks/race.py cases                                          names of the cases

Shapes: m1 is Llama 3.2 1B in full, 4 rows of 2,048 tokens; m2 Llama 3.1 8B, LoRA of rank 16 on all linear layers, 4 x
2,048; m3 Qwen3 0.6B in full, 1 x 8,192; s1 SmolLM2 135M and s2 SmolLM2 360M in full, 8 x 512. Weights are random, and
all rows have one length, so nothing is padded. A CUDA event is recorded at the end of each step, and nothing else waits
for the card; the median of the steps after the first WARM is kept. Rivals are in rivals.py, which imports nothing of
the package.
"""

import argparse
import importlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch

WARM, STEPS, TIMEOUT = 5, 25, 240
IMPORTS = {
    "ours": ("framework.build.assembly", "framework.run.step", "torch._inductor.compile_fx", "peft"),
    "trainer": ("transformers.trainer", "accelerate", "peft"),
    "trl": ("trl",),
    "unsloth": ("unsloth", "trl"),
}
"""Imports of a case before it asks for the card."""
ROWS = 64
"""Number of different rows, used in turn."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "liger-kernel", "trl", "unsloth", "torchao", "triton")


@dataclass(frozen=True)
class Shape:
    """A model of `conf/model` and the batch of a step; `rank` of the adapter, 0 for full fine-tuning."""

    model: str
    rows: int
    length: int
    rank: int = 0


SHAPES = {
    "m1": Shape("llama3.2_1b", 4, 2048),
    "m2": Shape("llama3.1_8b", 4, 2048, rank=16),
    "m3": Shape("qwen3_0.6b", 1, 8192),
    "s1": Shape("smollm2_135m", 8, 512),
    "s2": Shape("smollm2_360m", 8, 512),
}


@dataclass(frozen=True)
class Case:
    """One trainer on a shape. `options`: overrides of a recipe for ours, keyword arguments of a rival's function."""

    system: str
    shape: str
    options: dict[str, Any] = field(default_factory=dict)


BF16 = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}
PURE = BF16 | {"training.optimizer": "anyprecision_adamw", "training.rounding": "stochastic"}
MASTERS = {"model.torch_dtype_str": "float32", "training.mixed_precision_dtype": "bf16"}
FAST = {"training.compile": True, "model.chunked_loss": True}
RECORDED = FAST | {"training.cuda_graphs": True}
FUSED = {"training.optimizer": "adamw_torch_fused"}
CHECKPOINTS = {"training.enable_gradient_checkpointing": True}
FLOOR = {
    "training.optimizer": "anyprecision_adamw_8bit",
    "training.rounding": "stochastic",
    "training.optimizer_in_backward": True,
    "training.max_grad_norm": 0,
}
CASES: dict[str, Case] = {
    "m1 trainer": Case("trainer", "m1"),
    "m1 trainer checkpoints": Case("trainer", "m1", {"checkpoints": True}),
    "m1 trainer liger": Case("trainer", "m1", {"liger": True}),
    "m1 unsloth": Case("unsloth", "m1"),
    "m1 trl": Case("trl", "m1"),
    "m1 ours": Case("ours", "m1", PURE | FAST),
    "m1 ours graphs": Case("ours", "m1", PURE | RECORDED),
    "m1 ours masters": Case("ours", "m1", MASTERS | FAST | FUSED),
    "m1 ours eager": Case("ours", "m1", PURE | {"model.chunked_loss": True}),
    "m1 ours fp8": Case("ours", "m1", PURE | FAST | {"training.fp8": "tensorwise"}),
    "m1 ours fp8 graphs": Case("ours", "m1", PURE | RECORDED | {"training.fp8": "tensorwise"}),
    "m1 ours floor": Case("ours", "m1", BF16 | FAST | CHECKPOINTS | FLOOR),
    "m1 ours 16 rows": Case("ours", "m1", PURE | FAST | {"training.per_device_train_batch_size": 16}),
    "m2 trainer": Case("trainer", "m2", {"checkpoints": True}),
    "m2 trainer liger": Case("trainer", "m2", {"checkpoints": True, "liger": True}),
    "m2 unsloth": Case("unsloth", "m2", {"checkpoints": True}),
    "m2 ours checkpoints": Case("ours", "m2", BF16 | FAST | FUSED | CHECKPOINTS),
    "m2 ours": Case("ours", "m2", BF16 | FAST | FUSED),
    "m2 ours graphs": Case("ours", "m2", BF16 | RECORDED | FUSED),
    "m2 ours dora": Case("ours", "m2", BF16 | FAST | FUSED | {"peft.peft_method": "dora"}),
    "m2 ours fp8": Case("ours", "m2", BF16 | FAST | FUSED | {"training.fp8": "rowwise"}),
    "m2 ours fp8 graphs": Case("ours", "m2", BF16 | RECORDED | FUSED | {"training.fp8": "rowwise"}),
    "m2 ours fp8 checkpoints": Case("ours", "m2", BF16 | FAST | FUSED | CHECKPOINTS | {"training.fp8": "rowwise"}),
    "m3 trainer": Case("trainer", "m3"),
    "m3 trainer liger": Case("trainer", "m3", {"liger": True}),
    "m3 unsloth": Case("unsloth", "m3"),
    "m3 ours": Case("ours", "m3", PURE | FAST),
    "m3 ours graphs": Case("ours", "m3", PURE | RECORDED),
    "s1 trainer liger": Case("trainer", "s1", {"liger": True}),
    "s1 ours": Case("ours", "s1", PURE | FAST),
    "s1 ours graphs": Case("ours", "s1", PURE | RECORDED),
    "s2 trainer liger": Case("trainer", "s2", {"liger": True}),
    "s2 ours": Case("ours", "s2", PURE | FAST),
    "s2 ours graphs": Case("ours", "s2", PURE | RECORDED),
}


class Clock:
    """Events at the ends of steps, and the allocator's peaks since `start`."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Start counting peaks, as everything is built."""
        torch.cuda.reset_peak_memory_stats()
        self.tick()

    def tick(self) -> None:
        """Record the end of a step, as the card sees it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def document(self, tokens: int) -> dict[str, Any]:
        """Median of the steps after the first WARM, in seconds; peaks in bytes."""
        torch.cuda.synchronize()
        spans = [before.elapsed_time(after) / 1000 for before, after in zip(self.events, self.events[1:], strict=False)]
        seconds = statistics.median(spans[WARM:])
        return {
            "step_seconds": seconds,
            "slowest_step_seconds": max(spans[WARM:]),
            "first_step_seconds": spans[0],
            "tokens_per_second": tokens / seconds,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }


KINDS = {
    "compiled elementwise": r"^triton_",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma|splitK",
    "attention": r"fmha|flash|sdpa|cudnn",
    "optimizer and norm": r"adam|update|norm_|multi_tensor|lpnorm|^_step",
    "loss": r"token_loss|softmax|nll",
    "copies": r"memcpy|memset|copy",
}
"""Kind of kernel -> a pattern of its names; the first that matches counts."""
PROFILED = 4
"""Steps under the profiler, the last ones."""


class Profiler(Clock):
    """The kernels of the last PROFILED of `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first = steps - PROFILED
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def tick(self) -> None:
        super().tick()
        if len(self.events) == self.first + 1:
            torch.cuda.synchronize()
            self.profile.start()

    def document(self, tokens: int) -> dict[str, Any]:
        """Milliseconds a step by kind, and of the 30 longest kernels."""
        torch.cuda.synchronize()
        self.profile.stop()
        kernels = {each.key: each.self_device_time_total / 1000 / PROFILED for each in self.profile.key_averages()}
        kinds: dict[str, float] = {}
        for name, taken in kernels.items():
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
            kinds[kind] = kinds.get(kind, 0.0) + taken
        longest = sorted(kernels.items(), key=lambda item: -item[1])[:30]
        rounded = {kind: round(taken, 2) for kind, taken in sorted(kinds.items(), key=lambda item: -item[1])}
        named = {name[:120]: round(taken, 3) for name, taken in longest}
        return {"kernel_ms": round(sum(kernels.values()), 1), "by_kind_ms": rounded, "longest": named}


def architecture_of(shape: Shape) -> dict[str, Any]:
    """The Hugging Face config that `conf/model` has for the model."""
    import yaml

    from framework.installation import shipped

    preset = yaml.safe_load((shipped("conf") / "model" / f"{shape.model}.yaml").read_text())
    architecture: dict[str, Any] = preset["model"]["architecture"]
    return architecture


def rows_of(shape: Shape, vocabulary: int) -> torch.Tensor:
    """The same random tokens for every trainer: int64 `[ROWS, length]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (ROWS, shape.length), generator=generator)


def written(options: dict[str, Any]) -> list[str]:
    """Options as overrides of a recipe."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]


def ours(shape: Shape, options: dict[str, Any], steps: int, clock: Clock) -> int:
    """Train as `tunesmith train` does, without its log. Returns the tokens of a step."""
    from framework import load
    from framework.build.assembly import assemble
    from framework.build.data.batches import full_batch
    from framework.build.levers.allocator import choose_allocator
    from framework.build.place import real_place
    from framework.build.resolve_model import settle
    from framework.run.step import launch_step

    adapter = {"peft.lora_r": shape.rank, "peft.lora_alpha": 2 * shape.rank, "peft.lora_target_modules": "[all-linear]"}
    base = {
        "model.load_pretrained_weights": False,
        "model.model_max_length": shape.length,
        "data.pad_to_multiple_of": shape.length,
        "training.per_device_train_batch_size": shape.rows,
        "training.max_steps": 1000,
        "training.learning_rate": 1e-5,
    }
    flat = base | (adapter if shape.rank else {}) | options
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "race.yaml"
        recipe.write_text("training: {task: sft}\n")
        groups = [f"model={shape.model}", *(["peft=lora"] if shape.rank else [])]
        config, architecture = settle(load(str(recipe), [*groups, *written(flat)]))
    choose_allocator(config)
    place = real_place(torch.device("cuda", 0))
    torch.manual_seed(0)
    assembly = assemble(config, architecture, place, total_steps=1000)
    rows = rows_of(shape, architecture.get_text_config().vocab_size).cuda()
    count = config.batch.per_device
    clock.start()
    before = None
    for step in range(1, steps + 1):
        chosen = torch.arange((step - 1) * count, step * count) % ROWS
        launched = launch_step(assembly, [full_batch(config, rows[chosen])], step)
        clock.tick()
        if before is not None:
            before.result()  # figures are read one step late, as `train` does
        before = launched
    return count * shape.length


def run_case(name: str, steps: int, clock: Clock) -> dict[str, Any]:
    """Run one case in this process."""
    case = CASES[name]
    started = time.perf_counter()
    for module in IMPORTS[case.system]:
        importlib.import_module(module)
    imported = time.perf_counter()
    print("ready", flush=True)
    sys.stdin.readline()
    shape = SHAPES[case.shape]
    if case.system == "ours":
        tokens = ours(shape, case.options, steps, clock)
    else:
        import rivals

        architecture = architecture_of(shape)
        rows = rows_of(shape, architecture["vocab_size"])
        train = getattr(rivals, f"by_{case.system}")
        train(rivals.Job(architecture, rows, shape.rows, shape.rank, steps, clock), **case.options)
        tokens = shape.rows * shape.length
    found = clock.document(tokens)
    times = {"import_seconds": imported - started, "process_seconds": time.perf_counter() - started}
    return found | times | {"machine": torch.cuda.get_device_name()}


def run(out: Path, only: list[str], steps: int, verb: str = "case") -> None:
    """Run each case in a fresh process; its line is written when it ends. All import their libraries first, in
    parallel, so that a step that waits for the host does not compete with imports."""
    names = list(dict.fromkeys(name for word in only or [".*"] for name in CASES if re.fullmatch(word, name)))
    processes = {name: _begin(verb, name, steps) for name in names}
    for process in processes.values():
        assert process.stdout is not None
        process.stdout.readline()
    for name, process in processes.items():
        try:
            printed, errors = process.communicate("go\n", timeout=TIMEOUT)
            line = printed.strip().splitlines()[-1:] or ["{}"]
            document = json.loads(line[0]) if process.returncode == 0 else {"error": errors.strip()[-900:]}
        except subprocess.TimeoutExpired:
            process.kill()
            document = {"error": f"no end in {TIMEOUT} s"}
        case = CASES[name]
        row = {"name": name, "system": case.system, "shape": case.shape, "options": case.options, **document}
        row |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "packages": _packages()}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {key: document.get(key) for key in ("tokens_per_second", "allocated_bytes", "error") if key in document}
        print(name, json.dumps(shown), flush=True)


def _begin(verb: str, name: str, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, verb, name, "--steps", str(steps)]
    return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def summary(measured: Path, out: Path) -> None:
    """The rows of one call and their ratios to Trainer's and Unsloth's rows of the same shape."""
    rows = [json.loads(line) for line in measured.read_text().splitlines()]
    speeds = {row["name"]: row["tokens_per_second"] for row in rows if "error" not in row}
    for row in rows:
        for rival in ("trainer", "unsloth", "trainer liger"):
            base = speeds.get(f"{row['shape']} {rival}")
            if base and "error" not in row:
                row[f"over_{rival.replace(' ', '_')}"] = round(row["tokens_per_second"] / base, 3)
    some = next(row for row in rows if "error" not in row)
    document = {"machine": some["machine"], "date": some["date"], "packages": some["packages"], "rows": rows}
    out.write_text(json.dumps(document, indent=1) + "\n")


def plot(results: Path, out: Path) -> None:
    """Plot tokens per second against allocated GiB, one panel per shape; rivals as crosses, ours as dots with their
    frontier."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in json.loads(results.read_text())["rows"] if "error" not in row]
    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in rows)]
    figure, axes = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for row in (row for row in rows if row["shape"] == shape):
            x, y = row["allocated_bytes"] / 2**30, row["tokens_per_second"] / 1000
            axis.scatter(x, y, marker="o" if row["system"] == "ours" else "x")
            axis.annotate(row["name"].partition(" ")[2], (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
        best, frontier = 0.0, []
        for row in sorted(
            (r for r in rows if r["shape"] == shape and r["system"] == "ours"), key=lambda row: row["allocated_bytes"]
        ):
            if row["tokens_per_second"] > best:
                best = row["tokens_per_second"]
                frontier.append((row["allocated_bytes"] / 2**30, best / 1000))
        axis.plot(*zip(*frontier, strict=True), linewidth=0.8) if frontier else None
        axis.set(title=shape, xlabel="allocated GiB", ylabel="thousand tokens/s")
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Run one of the commands of the docstring, or `case` or `profile`, which `run` and `kernels` start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "case", "kernels", "profile", "summary", "plot", "cases"])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    match asked.verb:
        case "run":
            run(Path(asked.paths[0]), asked.only, asked.steps)
        case "kernels":
            run(Path(asked.paths[0]), asked.only, asked.steps, "profile")
        case "case":
            print(json.dumps(run_case(asked.paths[0], asked.steps, Clock())))
        case "profile":
            print(json.dumps(run_case(asked.paths[0], asked.steps, Profiler(asked.steps))))
        case "summary":
            summary(Path(asked.paths[0]), Path(asked.paths[1]))
        case "plot":
            plot(Path(asked.paths[0]), Path(asked.paths[1]))
        case _:
            print("\n".join(CASES))


if __name__ == "__main__":
    main()
