"""An adapter starts from the same numbers on one process and on several, split or not; all in one start of two."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework.build.assembly import assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks
from framework.build.verify import verify
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from tests.grids import chosen, to_make
from tests.sharded import on_two, settings, sharded, trained, weights
from tests.tiny import LLAMA, tiny_assembly, tiny_config

METHODS = [method for method in PeftMethod if method is not PeftMethod.LOFTQ]  # which needs quantized weights
SAVED = ("lora", "dora")
QUICK = (PeftMethod.LORA, PeftMethod.PISSA)
UNSHARDED = (PeftMethod.VERA, PeftMethod.OFT)
"""Refused next to shards, or not split alike."""


def adapted(world: int, folder: Path, method: str, shards: bool, first: str | None = None) -> TrainingConfig:
    peft: dict[str, Any] = {"peft_method": method, "lora_r": 4}
    if first is not None:
        peft["adapter_path"] = str(folder / first)
    if method not in ("prefix", "prompt"):
        peft["lora_target_modules"] = ["q_proj", "v_proj", "down_proj"]
    model = {"model_name": str(folder / "base"), "load_pretrained_weights": True}
    fsdp = {} if shards else {"enable_fsdp": False}
    training = {"use_peft": True, "mixed_precision_dtype": "none"}
    return settings(world, LLAMA, peft=peft, model=model, fsdp=fsdp, training=training)


def start_of(assembly: Any) -> dict[str, torch.Tensor]:
    names = {name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in weights(assembly).items() if name in names}


def look(methods: Sequence[PeftMethod], saved: Sequence[str], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in methods:
        for shards in (True, False):
            torch.manual_seed(1000 + ranks.rank)  # what else was drawn does not matter
            config = adapted(2, folder, str(method), shards)
            place = real_place(torch.device("cpu"))
            assembly = assemble(config, read_architecture(config), place, 10, ranks)
            start = start_of(assembly)
            if ranks.is_main:
                torch.save(start, folder / f"{method}-{shards}.pt")
            found[f"{method}-{shards}"] = trained(assembly)[0]
    for method in saved:
        config = adapted(2, folder, method, shards=True, first=f"saved-{method}")
        assembly = assemble(config, read_architecture(config), real_place(torch.device("cpu")), 10, ranks)
        found[f"saved-{method}"] = [item.found for item in verify(assembly) if item.key == "peft.adapter_path"]
        start = start_of(assembly)
        if ranks.is_main:
            torch.save(start, folder / f"saved-{method}.pt")
    return found


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("start")
    base: AutoModelForCausalLM = tiny_assembly(tiny_config()).model
    base.save_pretrained(folder / "base")
    for method in SAVED:
        own = AutoModelForCausalLM.from_pretrained(folder / "base")
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(own, LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=method == "dora"))
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * (0.1 if parameter.requires_grad else 0)
        model.save_pretrained(folder / f"saved-{method}")
    made = to_make(request, QUICK, METHODS), to_make(request, (), SAVED)
    return folder, on_two(partial(look, *made), folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_shards_resume_from_a_saved_adapter(ran, method):
    folder, found = ran
    saved = load_file(folder / f"saved-{method}" / "adapter_model.safetensors")
    start = {name.replace(".default", ""): item for name, item in torch.load(folder / f"saved-{method}.pt").items()}
    assert len(start) == len(saved)
    for name, item in start.items():
        torch.testing.assert_close(item, saved[name.replace("magnitude_vector.weight", "magnitude_vector")])
    assert found[f"saved-{method}"] == [f"{len(saved)} tensors as saved"]


@pytest.mark.parametrize("shards", [True, False], ids=["shards", "copies"])
@pytest.mark.parametrize("method", chosen(QUICK, METHODS))
def test_it_starts_and_learns_as_one_process_does(ran, method, shards):
    folder, found = ran
    one = sharded(adapted(1, folder, str(method), shards=False), Ranks())
    expected = start_of(one)
    start = torch.load(folder / f"{method}-{shards}.pt")
    assert start.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(start[name], values, rtol=0, atol=0)
    assert found[f"{method}-{shards}"] == pytest.approx(trained(one)[0], abs=1e-5)


def test_another_seed_is_another_start(ran):
    folder, _ = ran
    config = adapted(1, folder, "lora", shards=False)
    other = config.model_copy(update={"training": config.training.model_copy(update={"seed": 7})})
    one, two = (start_of(sharded(item, Ranks())) for item in (config, other))
    moved = [name for name in one if not torch.equal(one[name], two[name])]
    assert moved
    assert all("lora_A" in name for name in moved)
    assert json.dumps(sorted(one)) == json.dumps(sorted(two))
