"""`peft.lora_init: eva` in a run: the A matrices are the principal components of their modules' inputs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework.errors import RequestError
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.setup import eva
from framework.run.trainer import train
from tests.run.test_best import config

PEFT = {
    "lora_init": "eva",
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "down_proj"],
    "peft_save_mode": "adapter_and_base_model",
}


def asked(folder, peft=PEFT, **training):
    made = config(
        folder, use_peft=True, eval_steps=None, save_first=True, max_steps=2, per_device_train_batch_size=10, **training
    )
    return type(made).model_validate({**made.model_dump(exclude_unset=True), "peft": peft})


def inputs_of(model, name, ids):
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return seen[0]


def test_the_first_checkpoint_has_the_principal_components(tmp_path, monkeypatch):
    looked = []
    batches = eva._batches_for_start
    one = lambda session: looked.extend(batches(session)) or looked[:1]  # noqa: E731
    monkeypatch.setattr(eva, "_batches_for_start", one)
    folder = train(asked(tmp_path), planner=None, quiet=True).folder
    start = load_file(checkpoints(folder)[0] / "model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(folder / "final" / "base_model")
    ids, counted = looked[0]["input_ids"], looked[0]["labels"] != -100
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        given = inputs_of(base, name, ids)[counted].double()
        centered = given - given.mean(0)
        components = torch.linalg.svd(centered, full_matrices=False).Vh[:4]
        found = start[f"base_model.model.{name}.lora_A.default.weight"].double()
        torch.testing.assert_close(found @ found.T, torch.eye(4).double(), rtol=0, atol=1e-3)
        assert (found @ components.T).norm() ** 2 > 3.9, f"{name}: the same space of four dimensions"
    assert json.loads((folder / "final" / "adapter_config.json").read_text())["r"] == 4


def test_components_are_found_outside_autocast(tmp_path, monkeypatch):
    """CUDA's QR, which `svd_lowrank` calls on a product, takes no half precision."""
    from peft.utils.incremental_pca import IncrementalPCA

    decompose, seen = IncrementalPCA._svd_fn_lowrank, set()

    def watched(self, states):
        seen.add(torch.is_autocast_enabled("cpu"))
        return decompose(self, states)

    monkeypatch.setattr(IncrementalPCA, "_svd_fn_lowrank", watched)
    train(asked(tmp_path, mixed_precision_dtype="bf16"), planner=None, quiet=True)
    assert seen == {False}


def test_rows_with_fewer_tokens_than_the_rank_are_refused(tmp_path):
    with pytest.raises(RequestError, match="no micro-batch has as many supervised tokens as the rank"):
        train(asked(tmp_path, {**PEFT, "lora_r": 200}), planner=None, quiet=True)


def test_equal_inputs_are_decomposed_once_and_not_hashed(tmp_path, monkeypatch):
    """peft's own hash of an input is of a tuple of all its numbers."""
    from peft.tuners.lora.eva import HashHook, SVDHook

    def refused(tensor):
        raise AssertionError("hashed number by number")

    monkeypatch.setattr(HashHook, "hash_fn", staticmethod(refused))
    decompose, seen = SVDHook.__call__, set()
    monkeypatch.setattr(SVDHook, "__call__", lambda hook, *given: seen.add(hook.name) or decompose(hook, *given))
    peft = {**PEFT, "lora_target_modules": ["q_proj", "v_proj", "o_proj"]}
    folder = train(asked(tmp_path, peft), planner=None, quiet=True).folder
    start = load_file(checkpoints(folder)[0] / "model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.{}.lora_A.default.weight"
    query, value, output = (start[name.format(part)] for part in ("q_proj", "v_proj", "o_proj"))
    assert query.equal(value)
    assert not query.equal(output)
    assert {item.rpartition(".")[2] for item in seen} == {"q_proj", "o_proj"}, "v_proj is given what q_proj is"


def test_components_that_do_not_settle_are_taken_as_they_are_and_said(tmp_path, monkeypatch, capsys):
    from peft.tuners.lora.eva import SVDHook

    decompose, calls = SVDHook.__call__, []

    def never_settled(hook, *given):
        decompose(hook, *given)
        calls.append(hook.name)
        hook.converged = torch.zeros_like(hook.converged)

    monkeypatch.setattr(SVDHook, "__call__", never_settled)
    monkeypatch.setattr(eva, "EVA_PASSES", 5)
    folder = train(asked(tmp_path), planner=None).folder
    assert calls.count(calls[0]) == 4, "the first of the five passes compares inputs"
    said = capsys.readouterr()
    assert "components of 4 of 4 inputs still moved after 5 passes" in said.out + said.err
    start = load_file(checkpoints(folder)[0] / "model.safetensors")
    found = start["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].double()
    torch.testing.assert_close(found @ found.T, torch.eye(4).double(), rtol=0, atol=1e-3)
