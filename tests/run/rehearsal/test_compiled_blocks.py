"""Plans of compiled runs against memory measured on an H100, and what a plan does where a block cannot be captured."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drawn import config_of, drawn
from framework.build.levers.compiled import WHOLE
from framework.compose import compose
from framework.memory.bands import Band
from framework.memory.planning import choose_band, make_plan
from framework.memory.step_time import steady_step
from framework.memory.trace import GRAPH, RECOMPUTED, Launcher
from framework.run.rehearsal import compiled_blocks
from framework.run.rehearsal.compiled_graph import Role, Schedule
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from tests.grids import slow
from tests.tiny import GPT2, LLAMA, tiny_config

MEASURED = json.loads((Path(__file__).parents[2] / "calibration" / "h100_compiled_step.json").read_text())
QUICK = "1b-compile-4x1024"
H100 = {"name": "h100_80gb", "capability": "9.0", "bandwidth_bytes_per_second": 3.35e12, "fp32_flops": 67e12}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row["name"], marks=() if row["name"] == QUICK else pytest.mark.slow)
        for row in MEASURED["rows"]
    ],
)
def test_a_measured_compiled_run(row: dict[str, Any], write: Any) -> None:
    if "chunked" in row["name"]:
        pytest.skip("measured when the chunked loss held float32 logits")
    recipe = write("schema_version: 1\n")
    config = compose(str(recipe), [*MEASURED["overrides"], *row["overrides"]]).config
    plan = make_plan(record(config))
    peak = plan.step_peak
    inside_a_block = "checkpointed" in row["name"]  # where kernels are fused side by side, which is left out
    assert peak.allocated_bytes == pytest.approx(row["allocated_bytes"], rel=0.009 if inside_a_block else 0.0002)
    assert peak.allocated_bytes >= row["allocated_bytes"] * 0.9999
    assert peak.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=0.065)
    assert peak.device_bytes_upper > row["reserved_bytes"] + config.gpu.context_bytes
    assert plan.step is not None
    assert plan.step.seconds == pytest.approx(row["step_seconds"], rel=0.16)
    assert compiled_blocks.PLANNED in plan.assumptions


@pytest.mark.slow
def test_a_compiled_step_with_a_chunked_loss_takes_what_an_h200_took(write: Any) -> None:
    """17.130 GiB, torch 2.11, transformers 5.17 (benchmarks/results/token_losses_h200.json)."""
    changes = ["model.model_max_length=2048", "model.chunked_loss=true"]
    config = compose(str(write("schema_version: 1\n")), [*MEASURED["overrides"], *changes]).config
    assert make_plan(record(config)).step_peak.allocated_bytes / 2**30 == pytest.approx(17.130, abs=0.001)


def rehearsed(
    architecture: dict[str, Any] = LLAMA,
    kept: compiled_blocks.Kept | None = None,
    model: dict[str, Any] | None = None,
    **training: Any,
) -> Any:
    model = {"torch_dtype_str": "float32", "model_max_length": 64, **(model or {})}
    training = {"mixed_precision_dtype": "none", **training}
    return record(tiny_config(architecture, model=model, training=training, gpu=H100), kept)


def kept(rehearsal: Any) -> int:
    """Bytes that forward leaves for backward."""
    return int(next(phase for phase in make_plan(rehearsal).phases if phase.name == "loss").allocated_bytes)


@pytest.mark.slow
def test_compiled_blocks_keep_less_and_a_budget_less_still() -> None:
    sizes = [kept(rehearsed()), kept(rehearsed(compile=True))]
    sizes += [kept(rehearsed(compile=True, activation_memory_budget=budget)) for budget in (0.5, 0.1)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@pytest.mark.slow
def test_equal_blocks_are_captured_once_and_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []
    original = compiled_blocks.CompiledBlocks._capture

    def counted(self: Any, *arguments: Any) -> Any:
        captured.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(compiled_blocks.CompiledBlocks, "_capture", counted)
    rehearsed({**LLAMA, "num_hidden_layers": 4}, compile=True)
    assert len(captured) == 1
    rehearsed({**LLAMA, "num_hidden_layers": 4}, compile=True, gradient_accumulation_steps=2, global_batch_size=None)
    assert len(captured) == 2


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, slow({"enable_gradient_checkpointing": True})], ids=["kept", "checkpointed"])
def test_a_rehearsal_may_use_what_another_captured_and_plans_the_same(others: dict[str, Any]) -> None:
    kept: compiled_blocks.Kept = {}
    deeper = {**LLAMA, "num_hidden_layers": 4}
    rehearsed(LLAMA, kept, compile=True)
    [captures] = kept.values()
    before = dict(captures)
    chunked = {"chunked_loss": 16}
    plans = [make_plan(rehearsed(deeper, memory, chunked, compile=True, **others)) for memory in (kept, None)]
    assert plans[0] == plans[1]
    assert captures == before
    plans = [make_plan(rehearsed(deeper, memory, compile=True, activation_memory_budget=0.5)) for memory in (kept, {})]
    assert plans[0] == plans[1]
    assert len(kept) == 2, "a budget cuts the same block elsewhere"
    rehearsed(LLAMA, kept, {"attn_implementation": "eager"}, compile=True)
    assert len(kept) == 3


@pytest.mark.parametrize("architecture", [LLAMA, slow(GPT2)], ids=["llama", "gpt2"])
def test_a_checkpoint_around_a_compiled_block_keeps_its_input_alone(architecture: dict[str, Any]) -> None:
    plain = rehearsed(architecture, enable_gradient_checkpointing=True)
    both = rehearsed(architecture, enable_gradient_checkpointing=True, compile=True)
    assert kept(both) == kept(plain)
    again = [item for item in both.trace.operations if item.phase == RECOMPUTED and item.flops]
    assert again
    assert {item.launcher for item in again} == {Launcher.COMPILED}


def rehearsed_in_4_bits(**peft: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    training = {"mixed_precision_dtype": "none", "use_peft": True, "compile": True}
    model = {"torch_dtype_str": "bfloat16", "model_max_length": 64}
    settings = {"q_lora": True, "lora_r": 4, **peft}
    return record(tiny_config(LLAMA, model=model, training=training, peft=settings, gpu=H100))


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_over_4_bit_weights_are_captured_and_unpack_them_again_in_backward(nested: bool) -> None:
    found = rehearsed_in_4_bits(use_bnb_nested_quant=nested)
    assert compiled_blocks.PLANNED in found.notes
    layers = LLAMA["num_hidden_layers"]
    calls = Counter((call.phase, call.name) for call in steady_step(found.trace))
    assert calls["forward", GRAPH] == layers
    assert calls["forward", "gemm_4bit"] == 7 * layers, "seven matrices a layer"
    assert calls["backward", "dequantize_4bit"] == 7 * layers - 3, "the first input's gradient is not asked for"
    assert (calls["backward", "dequantize_blockwise"] > 0) is nested


@pytest.mark.slow
def test_a_weight_that_dora_unpacks_in_forward_is_kept_for_backward() -> None:
    found = rehearsed_in_4_bits(peft_method="dora", use_bnb_nested_quant=False)
    calls = Counter((call.phase, call.name) for call in steady_step(found.trace))
    layers = LLAMA["num_hidden_layers"]
    assert calls["forward", "dequantize_4bit"] == 2 * layers, "queries and values have adapters"
    assert calls["backward", "dequantize_4bit"] == 5 * layers - 1, "the first keys' input has no gradient"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "measured", "error"),
    [
        ("qlora-09-llama", 9546081280, 0.0015),
        ("qlora-17-llama", 2609921536, 0.0025),
        ("qlora-13-llama", 1259339776, 0.02),
        ("odd-02-encoder", 543777280, 0.01),
        ("full-10-llama", 2683700736, 0.0005),
    ],
)
def test_compiled_blocks_take_what_an_h200_took(name: str, measured: int, error: float) -> None:
    """Allocated bytes with an empty cache of torch's compiler (torch 2.11, bitsandbytes 0.50, 2026-11-30)."""
    pytest.importorskip("bitsandbytes")
    [row] = [row for row in drawn("single", 20261129) if row["name"].startswith(name)]
    assert make_plan(record(config_of(row))).step_peak.allocated_bytes == pytest.approx(measured, rel=error)


def test_the_first_step_times_kernels_next_to_a_buffer_as_large_as_the_l2_cache() -> None:
    trace = rehearsed(compile=True).trace
    steps = [mark.event for mark in trace.marks if mark.phase == "forward"]
    timed = [block for block in trace.unrepeated if steps[0] < trace.events.index(block) < steps[1]]
    assert timed
    assert len(timed) == len(trace.unrepeated)
    assert {trace.sizes[block] for block in timed} == {TrainingConfig.model_validate({"gpu": H100}).gpu.l2_cache_bytes}


@pytest.mark.slow
def test_a_cpu_times_kernels_without_such_a_buffer() -> None:
    on_cpu = tiny_config(training={"compile": True, "mixed_precision_dtype": "none"}, gpu={"name": "cpu"})
    assert not record(on_cpu).trace.unrepeated


@pytest.mark.slow
def test_generated_kernels_replace_the_elementwise_ones() -> None:
    plain, compiled = rehearsed(), rehearsed(compile=True)
    launches = [[item for item in run.trace.operations if item.bytes] for run in (plain, compiled)]
    assert len(launches[1]) < 0.7 * len(launches[0])
    assert sum(item.bytes for item in launches[1]) < sum(item.bytes for item in launches[0])
    flops = [sum(item.flops for item in items if item.name == "mm") for items in launches]
    assert flops[0] == flops[1]
    assert make_plan(compiled).step.seconds < make_plan(plain).step.seconds  # type: ignore[union-attr]


def test_a_block_that_cannot_be_captured_is_planned_as_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no graph today")

    monkeypatch.setattr(compiled_blocks, "min_cut_rematerialization_partition", broken)
    found = rehearsed(compile=True)
    assert kept(found) == kept(rehearsed())
    [messages] = [line for line in found.notes if "no graph today" in line]
    assert "planned as eager code, an upper bound" in messages
    assert choose_band(found.config, set()) is Band.COMPILED


def test_the_worst_batch_is_padded_too() -> None:
    plans = []
    for multiple in (None, 64, 48):
        sections = {"model": {"model_max_length": 64}, "data": {"pad_to_multiple_of": multiple}}
        plans.append(make_plan(record(tiny_config(gpu=H100, **sections))))
    assert [plan.batch.sequence_length for plan in plans] == [64, 64, 96]
    assert plans[0].peak.allocated_bytes == plans[1].peak.allocated_bytes < plans[2].peak.allocated_bytes


@pytest.mark.slow
def test_a_model_compiled_as_a_whole_is_one_graph() -> None:
    """Which keeps nothing of its own between blocks."""
    whole = rehearsed(compile=True, compile_scope="model")
    graphs = [item for item in whole.trace.operations if item.name == GRAPH]
    steps = sum(mark.phase == "optimizer_step" for mark in whole.trace.marks)
    assert len(graphs) == 2 * steps + sum(item.phase == "eval" for item in graphs)
    assert kept(whole) != kept(rehearsed(compile=True))
    assert whole.notes == (compiled_blocks.PLANNED,)


@pytest.mark.slow
def test_a_whole_with_checkpoints_or_that_cannot_be_captured_is_planned_block_by_block_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = {"compile": True, "enable_gradient_checkpointing": True}
    whole = rehearsed(compile_scope="model", **checkpoints)
    assert kept(whole) == kept(rehearsed(**checkpoints))
    assert compiled_blocks.BY_BLOCK in whole.notes
    capture = compiled_blocks.CompiledBlocks._capture

    def broken(self: Any, region: Any, *args: Any) -> Any:
        if region.name == WHOLE:
            raise ValueError("no graph today")
        return capture(self, region, *args)

    monkeypatch.setattr(compiled_blocks.CompiledBlocks, "_capture", broken)
    whole = rehearsed(compile=True, compile_scope="model")
    assert kept(whole) == kept(rehearsed(compile=True))
    assert compiled_blocks.BY_BLOCK in whole.notes


@pytest.mark.slow
def test_a_model_that_an_h200_compiled_as_a_whole(write: Any) -> None:
    """benchmarks/results/levers_h200.json, m1/compile_scope=model: block by block it was planned 2.5 % short."""
    overrides = [*MEASURED["overrides"], "training.compile_scope=model", "model.model_max_length=2048"]
    config = compose(str(write("schema_version: 1\n")), overrides).config
    peak = make_plan(record(config)).step_peak
    assert peak.allocated_bytes == pytest.approx(30_947_549_184, rel=0.0001)
    assert peak.reserved_bytes == pytest.approx(32_421_969_920, rel=0.01)


@pytest.mark.slow
@pytest.mark.fresh_process
def test_nothing_of_the_compiler_is_loaded_for_a_plain_plan(tmp_path: Path) -> None:
    import subprocess
    import sys

    config: TrainingConfig = tiny_config(gpu=H100)
    code = (
        "import sys; from framework.run.rehearsal.rehearse import record;"
        "from framework.schema.config import TrainingConfig;"
        f"record(TrainingConfig.model_validate_json({config.model_dump_json()!r}));"
        "assert 'framework.run.rehearsal.compiled_blocks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_what_is_written_to_memory_and_what_one_kernel_does() -> None:
    """rms norm of x, then a product: one kernel reads x once; its square is written nowhere."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        root = torch.rsqrt((x * x).mean(-1, True) + 1e-6)
        return (x * root) @ weight

    x, weight = torch.empty(8, 4, device="meta"), torch.empty(4, 4, device="meta")
    graph = torch.fx.experimental.proxy_tensor.make_fx(norm)(x, weight).graph
    for node, value in zip([n for n in graph.nodes if n.op == "placeholder"], (x, weight), strict=True):
        node.meta.setdefault("val", value)
    schedule = Schedule(graph)
    written = [str(node.target) for node in schedule.nodes if node in schedule.written and node.op == "call_function"]
    assert written == ["aten.mean.dim", "aten.mul.Tensor", "aten.mm.default"]
    [kernel] = set(schedule.kernels.values())
    assert kernel.bytes == 4 * (8 * 4 + 8 * 1 + 8 * 4)  # x read, its mean and the normed rows written
    assert schedule.roles[schedule.nodes[-1]] is Role.BOUNDARY


@pytest.mark.parametrize(("reads", "is_written"), [(4, False), (5, True)])
def test_a_value_of_many_reads_that_is_used_twice_is_written(reads: int, is_written: bool) -> None:
    def summed(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = sum(inputs[1:], inputs[0]).exp()
        return total.sum(0), total.sum(1)

    inputs = [torch.empty(8, 4, device="meta") for _ in range(reads)]
    graph = torch.fx.experimental.proxy_tensor.make_fx(summed)(*inputs).graph
    schedule = Schedule(graph)
    [total] = [node for node in schedule.nodes if node.target is torch.ops.aten.exp.default]
    assert (total in schedule.written) is is_written
