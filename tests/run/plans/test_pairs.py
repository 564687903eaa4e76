"""Every pair of settings of the levers table is refused with both keys named, or trains, saves and resumes exactly.

The quick suite checks the rules of all pairs and trains a seeded sample; `make test-all` trains all that need no card,
`make gpu-test` those that do (`pytest tests/run/plans/test_pairs.py -m gpu --collect-only` lists them).
"""

import itertools
import json
import multiprocessing
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.backends.debugging import aot_eager

from framework.build.levers import compiled
from framework.build.loading.model import read_architecture
from framework.memory.cards import read_card
from framework.memory.levers import every_setting, format_value
from framework.memory.requirements import is_installed, suits
from framework.memory.resolve import resolve
from framework.run import trainer
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams
from framework.schema.optimizers import FACTS
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.every import Needs, find_conflicts, find_derived_conflicts
from tests.grids import slow
from tests.optimizers import LOW_RANK, WIDE
from tests.settings import sections

SEED, SAMPLE = 7, 7
TEXT = [f"row {number} of the text " * (1 + number % 2) for number in range(60)]
ANSWERS = [{"prompt": text, "chosen": f"yes {number}", "rejected": "no"} for number, text in enumerate(TEXT)]
CPU = GPUParams(name="cpu")
CARD = GPUParams.model_validate(read_card("h100_80gb"))
ROUNDED = {format_value(choice) for choice, facts in FACTS.items() if facts.keeps_small_updates}
"""Optimizers that a rounding goes with: its setting names one of them."""
BATCH = ("training.global_batch_size", "training.max_grad_norm")
"""Keys next to a setting that make it legal or comparable; without them it still has its effect."""


def is_default(key: str, value: Any) -> bool:
    found: Any = TrainingConfig()
    for name in key.split("."):
        found = getattr(found, name)
    return bool(found == value)


CHOICES = [
    (row.key, setting)
    for row, setting in every_setting()
    if not (is_default(row.key, setting.value) or row.key.startswith("fsdp."))  # tests/run/ranks/test_sharded.py
]
NAMES = [f"{key}={format_value(setting.value)}" for key, setting in CHOICES]
PAIRS = [(i, j) for i, j in itertools.combinations(range(len(CHOICES)), 2) if CHOICES[i][0] != CHOICES[j][0]]
"""Numbers of two settings of different keys."""


def on_cpu(*numbers: int) -> bool:
    return all(suits(CHOICES[number][1].hardware, CPU) for number in numbers)


def missing(*numbers: int) -> list[str]:
    """Packages that the settings need and that are not here."""
    wanted = [name for number in numbers for name in CHOICES[number][1].package.split(", ") if name]
    return [name for name in wanted if not is_installed(name)]


def compiles(*numbers: int) -> bool:
    """Whether torch.compile traces the model, which takes ten times as long as the rest of a tiny run."""
    return any("training.compile" in keys(number) for number in numbers)


def keys(number: int) -> set[str]:
    """The key of a setting and those that it brings along: a conflict names one of them."""
    key, setting = CHOICES[number]
    return {key, *setting.requires}


def compose(folder: Path, *numbers: int, gpu: GPUParams = CPU) -> TrainingConfig:
    """A tiny Llama on short rows with these settings."""
    file = folder / "rows.txt"
    if not file.exists():
        file.write_text("\n".join(TEXT))
    chosen = []
    for number in numbers:
        key, setting = CHOICES[number]
        requires = dict(setting.requires)
        if "training.optimizer_offload_folder" in requires:
            requires["training.optimizer_offload_folder"] = str(folder)
        chosen.append((key, replace(setting, requires=requires)))
    tree = sections(*chosen)
    base = {
        "task": "pretrain",
        "max_steps": 3,
        "save_steps": 2,
        "learning_rate": 1e-3,
        **LOW_RANK,
        "projection_rank": 2,
    }
    architecture = {name: value for name, value in WIDE.items() if name != "vocab_size"}
    if any(NAMES[number] == "model.sdpa_backend=efficient" for number in numbers):  # it takes no grouped heads
        architecture["num_key_value_heads"] = architecture["num_attention_heads"]
    model = {"architecture": {**architecture, "max_position_embeddings": 2048}, "load_pretrained_weights": False}
    model |= {"tokenizer": {"train": "bpe", "vocab_size": 300}, "model_max_length": 32}
    if tree.get("training", {}).get("task") == "preference":
        file = folder / "answers.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    data = {"train": [{"path": str(file)}], "eval_fraction": 0.1}
    tree["training"] = {**base, "output_dir": str(folder / "run"), **tree.get("training", {})}
    tree["model"], tree["data"] = {**model, **tree.get("model", {})}, {**data, **tree.get("data", {})}
    return TrainingConfig.model_validate({**tree, "gpu": gpu})


def conflicts_of(config: TrainingConfig) -> tuple[list[Conflict], list[Conflict]]:
    """The refusals of the config, and its warnings."""
    found = find_conflicts(config, Needs(model=True, data="required"))
    return [item for item in found if not item.is_warning], [item for item in found if item.is_warning]


def derived_conflicts(config: TrainingConfig) -> list[Conflict]:
    """The refusals of the config with derived values: the dtype of its weights."""
    return find_derived_conflicts(resolve(config, read_architecture(config).get_text_config().to_dict()))


def rule_fault(config: TrainingConfig, *numbers: int) -> str | None:
    """A refusal that does not name both keys, or a setting that silently has no effect next to the other."""
    refused, warned = conflicts_of(config)
    if refused:
        if any(all(keys(number).intersection(item.keys) for number in numbers) for item in refused):
            return None
        return "refused without both keys: " + "; ".join(f"{item.keys} {item.message}" for item in refused)
    chosen = dict(CHOICES[number] for number in numbers)
    for key, setting in chosen.items():
        for other, needed in setting.requires.items():
            is_overruled = other in chosen and chosen[other].value != needed and other not in BATCH
            is_overruled = is_overruled and not {chosen[other].value, needed} <= ROUNDED
            if is_overruled and not any({key, other} <= set(item.keys) for item in warned):
                return f"{key} needs {other}={format_value(needed)}, and nothing says so"
    return None


def fault(folder: Path, *numbers: int, gpu: GPUParams = CPU) -> str | None:
    """The fault of a pair; None if it is refused as it should be, or trains and resumes."""
    config = compose(folder, *numbers, gpu=gpu)
    if (found := rule_fault(config, *numbers)) or conflicts_of(config)[0]:
        return found
    if any(all(keys(number).intersection(item.keys) for number in numbers) for item in derived_conflicts(config)):
        return None
    try:
        return resume_fault(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)


def resume_fault(config: TrainingConfig) -> str | None:
    """Trains three steps, then the third again from the checkpoint of the second: both must end the same."""
    folder = Path(config.training.output_dir or "")
    trainer.train(config, planner=None, quiet=True)
    last = folder / "checkpoints" / "step-00000003"
    files = ("model.safetensors", "optimizer.safetensors")
    before = {file: load_file(last / file) for file in files}
    shutil.rmtree(last)
    trainer.train(config, planner=None, quiet=True, resume=True)
    for file in files:
        after = load_file(last / file)
        if after.keys() != before[file].keys():
            return f"{file} has other tensors when resumed"
        exact = config.gpu.name == "cpu"
        for name, tensor in after.items():
            same = torch.equal if exact else torch.allclose
            if not same(tensor, before[file][name]):
                return f"{file}: {name} differs when resumed"
    return None


RUNNABLE = [pair for pair in PAIRS if on_cpu(*pair) and not missing(*pair)]
FAILED_ONCE = {
    ("model.chunked_loss=256", "peft.lora_modules_to_save=[lm_head]"),
    ("peft.peft_method=vera", "peft.adapter_dtype=bfloat16"),
    ("model.attn_implementation=eager", "model.sdpa_backend=flash"),
    ("peft.peft_method=dora", "peft.q_lora_bits=8"),
}
"""Pairs whose faults this test has found: they are always in the sample."""
QUICK = {pair for pair in RUNNABLE if (NAMES[pair[0]], NAMES[pair[1]]) in FAILED_ONCE}
QUICK |= set(random.Random(SEED).sample([pair for pair in RUNNABLE if not compiles(*pair)], SAMPLE - len(QUICK)))
PARAMETERS = [
    pytest.param(pair, id=" ".join(NAMES[number] for number in pair), marks=() if pair in QUICK else pytest.mark.slow)
    for pair in RUNNABLE
]
ON_CARD = [pair for pair in PAIRS if not on_cpu(*pair)]


@pytest.fixture
def eager(monkeypatch):
    """Compiled code is traced and cut as always but run operator by operator: a C++ compiler takes a minute."""
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)
    monkeypatch.setattr(compiled, "lower", aot_eager)
    torch._dynamo.reset()
    return monkeypatch


@pytest.mark.parametrize("every", [9, slow(1)])
def test_every_rule_names_both_keys_and_no_setting_is_silently_without_effect(tmp_path, every):
    configs = {pair: compose(tmp_path, *pair, gpu=CPU if on_cpu(*pair) else CARD) for pair in PAIRS[::every]}
    faults = {pair: found for pair, config in configs.items() if (found := rule_fault(config, *pair))}
    assert {" ".join(NAMES[number] for number in pair): found for pair, found in faults.items()} == {}


@pytest.mark.parametrize("pair", PARAMETERS)
def test_a_pair_trains_and_resumes(tmp_path, eager, pair):
    is_torchao = any(str(CHOICES[number][1].value).startswith("adamw_torchao") for number in pair)
    torch.compiler.set_stance("force_eager" if is_torchao else "default")
    try:
        assert fault(tmp_path, *pair) is None
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ON_CARD, ids=lambda pair: " ".join(NAMES[number] for number in pair))
def test_a_pair_that_needs_a_card_trains_and_resumes(tmp_path, pair, monkeypatch):
    """One after the other in a process, to start CUDA and import everything once; an allocator takes its settings
    before CUDA is started, so those pairs have a process each."""
    if missing(*pair):
        pytest.skip(f"{', '.join(missing(*pair))} not installed")
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)
    torch._dynamo.reset()
    is_separate = any(key.startswith("training.allocator") for number in pair for key in keys(number))
    assert (_fault_apart(tmp_path, pair) if is_separate else fault(tmp_path, *pair, gpu=CARD)) is None


def _fault_apart(folder: Path, pair: tuple[int, int]) -> str | None:
    # Inductor and bitsandbytes start CUDA as they are imported: after the fork, and no sooner. So does torchao, which
    # transformers imports where it is installed.
    context = multiprocessing.get_context("spawn" if is_installed("torchao") else "forkserver")
    context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "datasets"])
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_send_fault, args=(send, folder, pair))
    child.start()
    found: str | None = receive.recv() if receive.poll(240) else "no answer in 240 s"
    child.kill()
    child.join()
    return found


def _send_fault(send: Any, folder: Path, pair: tuple[int, int]) -> None:
    trainer.SAMPLE_NEW_TOKENS = 1
    send.send(fault(folder, *pair, gpu=CARD))
