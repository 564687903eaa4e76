"""A run that continues from an adapter: its initial weights, the reference of a preference, and its outputs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework import load
from framework.build.adapters.adapter import adapter_state
from framework.build.assembly import assemble
from framework.build.loading.bases import weights_digest
from framework.build.loading.model import read_architecture
from framework.build.losses.loss import ignore_phases
from framework.build.place import real_place, rehearsal_place
from framework.build.resolve_model import settle
from framework.build.tasks import reference_of
from framework.build.verify import verify
from framework.build.verify.frozen_models import read_reference
from framework.errors import RequestError
from framework.memory.resolve import resolve
from framework.run.checkpoints.merge import merge_run
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.folders import save_model
from tests.run.test_trainer import train
from tests.tiny import pairs, split_pairs, unequal_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and a LoRA of it that peft has saved, its B not zero."""
    folder = tmp_path_factory.mktemp("first")
    save_model(folder / "base", vocab_size=128)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    for name, extra in (("lora", {}), ("dora", {"use_dora": True}), ("whole", {"modules_to_save": ["norm"]})):
        targets = ["q_proj", "down_proj"]
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=targets, **extra))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.3
        adapted.save_pretrained(folder / name)
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
    return folder


def config(folder: Path, adapter: str = "lora", **sections: Any) -> TrainingConfig:
    dora = {"peft_method": "dora"} if adapter == "dora" else {}
    whole = {"lora_modules_to_save": ["norm"]} if adapter == "whole" else {}
    peft = {"lora_r": 4, "lora_alpha": 12, "lora_target_modules": ["q_proj", "down_proj"], **dora, **whole}
    training = {"use_peft": True, "per_device_train_batch_size": 8, "global_batch_size": 8, "learning_rate": 1e-2}
    return resolve(
        TrainingConfig(
            model={"model_name": str(folder / "base"), "torch_dtype_str": "float32", "model_max_length": 32},
            training={**training, "mixed_precision_dtype": "none", **sections.pop("training", {})},
            peft={"adapter_path": str(folder / adapter), **peft, **sections.pop("peft", {})},
            **sections,
        )
    )


def built(config: TrainingConfig) -> Any:
    return assemble(config, read_architecture(config), real_place(CPU), 10)


def as_peft(folder: Path, adapter: str) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / adapter).eval()


@pytest.mark.parametrize("adapter", ["lora", "dora", "whole"])
def test_it_computes_what_peft_computes_with_the_saved_adapter(folder, adapter):
    assembly, ids = built(config(folder, adapter)), unequal_rows()["input_ids"]
    with torch.no_grad():
        expected = as_peft(folder, adapter)(input_ids=ids).logits
        found = assembly.model.eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["peft.adapter_path"].holds


def test_another_start_than_the_saved_one_stops_the_run(folder):
    assembly = built(config(folder))
    next(parameter for parameter in assembly.trained).data[0, 0] += 1
    with pytest.raises(Exception, match=r"peft.adapter_path"):
        verify(assembly)


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"lora_r": 8}, "other shapes"),
        ({"lora_target_modules": ["q_proj"]}, "has weights for model.layers.0.mlp.down_proj"),
        (
            {"lora_target_modules": ["q_proj", "v_proj", "down_proj"]},
            "has no weights for model.layers.0.self_attn.v_proj",
        ),
        ({"lora_alpha": 8}, "lora_alpha: 12, here it is 8"),
        ({"peft_method": "rslora"}, "use_rslora: False, here it is True"),
    ],
)
@pytest.mark.parametrize("place", [real_place(CPU), rehearsal_place("cpu")], ids=["run", "plan"])
def test_a_config_that_does_not_fit_the_adapter_is_refused_by_run_and_plan(folder, peft, message, place):
    wrong = config(folder, peft=peft)
    with pytest.raises(RequestError, match=message):
        assemble(wrong, read_architecture(wrong), place, 10)


def dpo(folder: Path, adapter: str = "lora", **preference: Any) -> TrainingConfig:
    return config(folder, adapter, training={"task": "preference", "preference": preference})


@pytest.mark.parametrize("adapter", ["lora", "dora", "whole"])
def test_a_preference_is_measured_against_the_base_with_the_first_adapter(folder, adapter):
    assembly, batch = built(dpo(folder, adapter)), pairs()
    reference = reference_of(assembly.objective)
    before = reference(assembly.model, batch)
    losses = [train_step(assembly, split_pairs(batch, 4), step, ignore_phases).loss for step in (1, 2, 3)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert losses[2] < losses[0] - 0.001
    with torch.no_grad():
        logits = as_peft(folder, adapter)(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    chosen = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(before, (chosen * (labels >= 0)).sum(1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(reference(assembly.model, batch), before, rtol=0, atol=0)
    assert all(reading.holds for reading in read_reference(assembly))


@pytest.mark.slow
def test_compiled_blocks_compute_with_the_first_adapter_too(folder):
    plain, batch = dpo(folder), pairs()
    made = plain.model_copy(update={"training": plain.training.model_copy(update={"compile": True})})
    found = []
    for assembly in (built(plain), built(made)):
        losses = [train_step(assembly, split_pairs(batch, 4), step, ignore_phases).loss for step in (1, 2, 3)]
        found.append((torch.tensor(losses), reference_of(assembly.objective)(assembly.model, batch)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-4)


def test_the_copy_is_planned_as_large_as_the_adapter(folder):
    plain = dpo(folder)
    without = plain.model_copy(update={"peft": plain.peft.model_copy(update={"adapter_path": None})})
    sizes = [sum(record(settle(each)[0]).footprint.weight_sizes) for each in (plain, without)]
    matrices = (32 * 4 + 4 * 32) + (64 * 4 + 4 * 32)  # A and B of q_proj, of down_proj
    assert sizes[0] - sizes[1] == 2 * matrices * 4


@pytest.fixture
def recipe(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "hello ", "completion": "world" + "!" * (n % 5)} for n in range(16)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    save_model(tmp_path / "base")
    Path("sft.yaml").write_text(
        "model: {model_name: base, model_max_length: 32}\n"
        "training: {use_peft: true, max_steps: 2, per_device_train_batch_size: 4, output_dir: sft}\n"
        "peft: {lora_r: 4, lora_target_modules: [q_proj]}\n"
        "data: {train: [{path: rows.jsonl}]}\n"
    )
    train(load("sft.yaml"))
    Path("on.yaml").write_text(
        "model: {model_max_length: 32}\n"
        "training: {max_steps: 2, per_device_train_batch_size: 4, output_dir: on}\n"
        "peft: {adapter_path: sft}\n"
        "data: {train: [{path: rows.jsonl}]}\n"
    )
    return Path("on.yaml")


def test_a_run_continues_another_and_its_own_result_needs_no_first_adapter(recipe):
    train(load(recipe))
    first, last = (load_file(Path(run, "final", "adapter_model.safetensors")) for run in ("sft", "on"))
    assert first.keys() == last.keys()
    assert any(not torch.equal(first[name], last[name]) for name in first)
    Path("sft").rename("elsewhere")
    merged = merge_run(Path("on"))
    assert (merged.folder / "model.safetensors").exists()
    weights = weights_digest([Path("on/final/adapter_model.safetensors")])
    assert json.loads((merged.folder / "merged_from.json").read_text()) == {"adapter": weights}
    base = AutoModelForCausalLM.from_pretrained("base")
    assert dict(adapter_state(PeftModel.from_pretrained(base, "on/final"))).keys() == last.keys()


def test_another_base_than_was_recorded_is_refused_unless_allowed(recipe, tmp_path):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained("base")
    model.lm_head.weight.data += 1
    model.save_pretrained("base")
    with pytest.raises(RequestError, match=r"not what the adapter in .* was trained on: its weights have other values"):
        train(load(recipe))
    train(load(recipe), allow=["model.base"])
