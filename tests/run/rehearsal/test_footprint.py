"""Weights on their way from files to the device: never twice in host memory, and what the plan says of it."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from framework.memory.planning import make_plan
from framework.memory.trace import Kind, Space
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from tests.grids import first
from tests.run.reference import H100
from tests.tiny import LLAMA

LARGE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "vocab_size": 8192,
    "dtype": "bfloat16",
}
MIB = 1 << 20
_CODE = """
import json, sys, threading, time
import torch
from framework.build.assembly import assemble
from framework.build.resolve_model import settle
from framework.build.place import real_place
from framework.schema.config import TrainingConfig

def resident():
    lines = (line.split() for line in open("/proc/self/status") if line.startswith("Rss"))
    return {words[0][3:-1].lower(): int(words[1]) // 1024 for words in lines}

def watch():
    while not done.is_set():
        now = resident()
        peak.update({name: max(peak[name], now[name]) for name in peak})
        time.sleep(0.001)

config, architecture = settle(TrainingConfig.model_validate_json(sys.argv[1]))
warm = TrainingConfig.model_validate({"training": {"use_peft": True}, "model": {"architecture": json.loads(sys.argv[2]),
    "load_pretrained_weights": False, "torch_dtype_str": "float32"}, "peft": {"lora_target_modules": ["q_proj"]}})
assemble(*settle(warm), real_place(torch.device("cpu")), 1)
start, peak, done = resident(), resident(), threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
made = assemble(config, architecture, real_place(torch.device(sys.argv[3])), 1)
done.set()
watcher.join()
held = sum(p.numel() * p.element_size() for p in made.model.parameters()) >> 20
print(json.dumps({"held": held, **{name: peak[name] - start[name] for name in peak}}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder of 217 MiB of weights, in three files."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = AutoConfig.for_model(**LARGE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    model.save_pretrained(folder, max_shard_size="80MB")
    return folder


def loaded(checkpoint, dtype: str, device: str = "cpu", **model: Any) -> dict[str, int]:
    """MiB of anonymous and of file-backed memory that building took at most, in a process of its own."""
    config = TrainingConfig.model_validate(
        {
            "model": {"model_name": str(checkpoint), "torch_dtype_str": dtype, **model},
            "training": {"use_peft": True, "mixed_precision_dtype": "none"},
            "peft": {"lora_target_modules": ["q_proj"]},
        }
    )
    command = [sys.executable, "-W", "ignore", "-c", _CODE, config.model_dump_json(), json.dumps(LLAMA), device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_weights_of_the_checkpoints_dtype_are_its_files_pages(checkpoint) -> None:
    found = loaded(checkpoint, "bfloat16")
    assert found["held"] > 180
    assert found["anon"] < 0.25 * found["held"]
    assert found["file"] < 1.25 * found["held"]


def test_weights_of_another_dtype_are_there_once(checkpoint) -> None:
    found = loaded(checkpoint, "float32")
    assert found["held"] > 360
    assert found["anon"] < 1.25 * found["held"]


@pytest.mark.slow
def test_a_base_that_stays_on_the_host_is_there_once_and_a_block(checkpoint) -> None:
    found = loaded(checkpoint, "float32", offload_frozen_base=True)
    blocks = 3  # two slots, which are host memory here, and the block that is being moved
    assert found["anon"] < (1.15 + blocks / 6) * found["held"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", first(1, ["bfloat16", "float32"]))
def test_weights_for_a_card_pass_through_the_host(checkpoint, dtype) -> None:
    """CUDA's own host memory comes on top, so that the bound is loose: far from the weights' size twice."""
    found = loaded(checkpoint, dtype, device="cuda")
    assert found["anon"] < 0.8 * found["held"] + 600


def events(**sections: Any) -> list[tuple[int, Kind, Space]]:
    """Sizes that a rehearsed load takes and gives back."""
    model = {"architecture": {**LARGE, **sections.pop("architecture", {})}, **sections.pop("model", {})}
    training = {"use_peft": True, "max_steps": 1, **sections.pop("training", {})}
    peft = {"lora_target_modules": ["q_proj"], **sections.pop("peft", {})}
    card = H100.model_copy(update=sections.pop("gpu", {}))
    base = {"model_name": "somewhere/some-model", "model_max_length": 16}
    config = {"model": {**base, **model}, "training": training, "peft": peft, "gpu": card}
    trace = record(TrainingConfig.model_validate(config)).trace
    end = next(mark.event for mark in trace.marks if mark.phase == "end")
    started = trace.events[:end]
    return [
        (trace.sizes[event], trace.kinds[event], trace.spaces[event])
        for event in started
        if event >= 0 and ~event in started
    ]


BASE = 6 * (2 * 1024 * 1024 + 2 * 512 * 1024 + 3 * 4096 * 1024 + 2 * 1024) + 2 * 8192 * 1024 + 1024


def test_the_plans_load_asks_once_for_all_and_gives_it_back() -> None:
    found = events()
    (size,) = [size for size, _, space in found if space is Space.DEVICE]
    assert size == pytest.approx(2 * BASE, rel=0.001), "the base alone, not its adapter"
    assert not [item for item in found if item[2] is Space.HOST]


def test_a_small_card_keeps_a_part_free() -> None:
    (size,) = [size for size, _, space in events(gpu={"capacity_bytes": int(1.3 * 2**30)}) if space is Space.DEVICE]
    assert size == pytest.approx(0.1 * 2**30, rel=0.001)


def test_another_dtype_is_made_on_the_host_four_tensors_at_a_time() -> None:
    found = events(model={"torch_dtype_str": "float32"}, training={"mixed_precision_dtype": "none"})
    (size,) = [size for size, _, space in found if space is Space.HOST]
    assert size == 4 * 4 * 8192 * 1024 - 2 * 4 * (8192 - 4096) * 1024, "head and embedding, and two of the MLP"


def test_loftq_holds_the_whole_base_on_the_host() -> None:
    found = events(peft={"peft_method": "loftq", "q_lora": True})
    (size,) = [size for size, _, space in found if space is Space.HOST]
    assert size == pytest.approx(2 * BASE, rel=0.01)


def test_each_quantized_matrix_is_on_the_card_next_to_its_original() -> None:
    found = events(peft={"q_lora": True, "use_bnb_nested_quant": True})
    _, *passing = [size for size, _, space in found if space is Space.DEVICE]  # the first is asked for at once
    counts = [1024 * 1024, 512 * 1024, 512 * 1024, 1024 * 1024, *[4096 * 1024] * 3]
    assert passing == 6 * [size for count in counts for size in (2 * count, count // 16, count // 16)], (
        "and to the scales of 64 weights each as float32, and their distances from the mean"
    )


def test_a_tied_heads_own_matrix_is_drawn_and_freed() -> None:
    random = {"load_pretrained_weights": False, "model_name": None}
    assert events(model=random, architecture={"tie_word_embeddings": False}) == []
    assert events(model=random, architecture={"tie_word_embeddings": True}) == [
        (2 * 8192 * 1024, Kind.TEMPORARIES, Space.DEVICE)
    ]


@pytest.mark.parametrize(("method", "phase"), [("dora", "load"), ("lora", "forward")])
def test_dora_takes_cublas_workspace_before_the_first_step(method: str, phase: str) -> None:
    config = {
        "model": {"architecture": LARGE, "model_name": "a/b", "model_max_length": 16},
        "training": {"use_peft": True, "max_steps": 1},
        "peft": {"lora_target_modules": ["q_proj"], "peft_method": method},
        "gpu": H100,
    }
    trace = record(TrainingConfig.model_validate(config)).trace
    taken = trace.events.index(trace.sizes.index(H100.cublas_workspace_bytes))
    assert [mark.phase for mark in trace.marks if mark.event <= taken][-1] == phase


def test_a_plan_says_each_phases_host_bytes() -> None:
    config = {
        "model": {"architecture": LARGE, "model_name": "a/b", "model_max_length": 16, "torch_dtype_str": "float32"},
        "training": {"use_peft": True, "max_steps": 1, "mixed_precision_dtype": "none"},
        "peft": {"lora_target_modules": ["q_proj"]},
        "gpu": H100,
    }
    made = make_plan(record(TrainingConfig.model_validate(config)))
    by_phase = {phase["name"]: phase["host_bytes"] for phase in made.to_json()["phases"]}
    assert by_phase["load"] > 90 * MIB
    assert by_phase["forward"] == 0
    assert any("files are mapped" in line for line in made.assumptions)
