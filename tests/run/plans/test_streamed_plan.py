"""A base on the host in the plan: two slots on the device, the rest in host bytes, and the link in the step's time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.cli import main
from framework.memory.planning import make_plan
from framework.memory.trace import Kind, Space
from framework.run.rehearsal.rehearse import record
from tests.cli.test_merge import logits
from tests.cli.test_train import RECIPE
from tests.grids import first
from tests.run.reference import H100
from tests.tiny import LLAMA, tiny_config

WIDE: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
BLOCK = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024 + 2 * 256)
"""Bytes of one block of WIDE in bfloat16."""


def rehearsed(offload: bool, card=H100, **training: Any):
    model = {"offload_frozen_base": offload, "torch_dtype_str": "bfloat16"}
    training = {"use_peft": True, "mixed_precision_dtype": "bf16", **training}
    peft = {"lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    return record(tiny_config(WIDE, model=model, training=training, peft=peft, gpu=card))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_device_holds_two_blocks_and_the_host_all(checkpointing: bool) -> None:
    plain, streamed = (
        make_plan(rehearsed(offload, enable_gradient_checkpointing=checkpointing)) for offload in (False, True)
    )
    saved = plain.peak.allocated_bytes - streamed.peak.allocated_bytes
    assert saved == pytest.approx(6 * BLOCK, rel=0.03), "nothing that backward keeps holds a block's weights"
    assert plain.peak.terms.weights - streamed.peak.terms.weights == pytest.approx(saved, rel=0.03)
    assert streamed.host_bytes - plain.host_bytes >= 8 * BLOCK - max(2 * 128 * 256, BLOCK)
    assert all(phase.host_bytes >= 8 * BLOCK for phase in streamed.phases), "at every moment of the run"
    assert {phase.name: phase.host_bytes for phase in streamed.phases}["load"] == 9 * BLOCK, "one block is there twice"
    assert [phase.name for phase in streamed.phases] == [phase.name for phase in plain.phases]


def test_the_blocks_are_bytes_of_the_host_and_not_of_powers_of_two() -> None:
    trace = rehearsed(True).trace
    born = zip(trace.sizes, trace.kinds, trace.spaces, strict=True)
    homes = [size for size, kind, space in born if kind is Kind.WEIGHTS and space is Space.HOST]
    assert homes == [BLOCK] * 8


@pytest.mark.slow
def test_a_slow_link_is_what_the_step_waits_for() -> None:
    slow = H100.model_copy(update={"host_link_bytes_per_second": 1e8})
    made = make_plan(rehearsed(True, slow, global_batch_size=16))
    assert made.step is not None
    assert made.step.bound_by == "communication"
    copies = 2 * 12 * BLOCK / (1e8 * 5.5 / 6.3)
    assert copies < made.step.seconds < copies + 0.011, "and what the host does between two steps"
    assert any("cross the link per micro-batch" in line for line in made.assumptions)
    unknown = make_plan(rehearsed(True))
    assert any("the rate of the link is not known" in line for line in unknown.assumptions)


def test_on_the_cpu_both_are_in_the_same_memory() -> None:
    cpu = {"name": "cpu"}
    plain, streamed = (make_plan(rehearsed(offload, cpu, mixed_precision_dtype="none")) for offload in (False, True))
    assert streamed.peak.terms.weights - plain.peak.terms.weights == pytest.approx(2 * BLOCK, rel=0.03)


@pytest.fixture
def train(write, monkeypatch):
    """Trains the tiny recipe with an adapter; gives the run folder."""
    from framework.run import trainer

    monkeypatch.setattr("framework.run.trainer.train.__kwdefaults__", {**trainer.train.__kwdefaults__, "planner": None})
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    recipe = write(RECIPE)

    def run(folder: str, *overrides: str) -> Path:
        keys = ["gpu=cpu", "peft=lora", "training.learning_rate=0.01", f"training.output_dir={folder}", *overrides]
        assert main(["train", str(recipe), *keys]) == 0
        return Path(folder)

    return run


OFFLOAD = "model.offload_frozen_base=true"


@pytest.mark.parametrize("mode", first(1, ["adapter_only", "adapter_and_base_model", "merged"]))
def test_a_run_leaves_the_same_files_behind(train, mode: str) -> None:
    from safetensors.torch import load_file

    plain, streamed = train("a", f"peft.peft_save_mode={mode}"), train("b", f"peft.peft_save_mode={mode}", OFFLOAD)
    files = sorted(path.relative_to(plain) for path in (plain / "final").rglob("*.safetensors"))
    assert files
    for file in files:
        expected, found = load_file(plain / file), load_file(streamed / file)
        assert set(expected) == set(found)
        assert all(torch.equal(expected[name], found[name]) for name in expected), file


@pytest.mark.slow
def test_a_run_resumes_and_is_merged(train, capsys) -> None:
    from transformers import AutoModelForCausalLM

    whole = train("whole", "training.max_steps=4")
    cut = train("cut", "training.max_steps=4", "training.save_steps=2", OFFLOAD)
    lines = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    import shutil

    shutil.rmtree(cut / "checkpoints" / "step-00000004")
    shutil.rmtree(cut / "final")
    train("cut", "training.max_steps=4", "training.save_steps=2", OFFLOAD, "--resume")
    again = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    losses = [[item["loss"] for item in each if "loss" in item] for each in (lines, again)]
    assert losses[0] == losses[1]
    capsys.readouterr()
    for folder in (whole, cut):
        assert main(["merge", str(folder)]) == 0
    merged = [logits(AutoModelForCausalLM.from_pretrained(folder / "merged")) for folder in (whole, cut)]
    assert torch.equal(*merged)
