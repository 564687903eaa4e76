"""`peft.lora_init: eva` in a run: the A matrices are the principal components of their modules' inputs."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework.errors import RequestError
from framework.run import components, trainer
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


WIDER = r"peft\.lora_init: the rank is above the width of each adapted module's input \(at most 64\)"


def asked(folder, peft=PEFT, **training):
    training = {"eval_steps": None, "save_first": True, "max_steps": 2, "per_device_train_batch_size": 10, **training}
    made = config(folder, use_peft=True, **training)
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
    one = lambda *asked: looked.extend(batches(*asked)) or looked[:1]  # noqa: E731
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


@pytest.mark.parametrize(
    ("rank", "message"),
    [(32, r"no micro-batch has as many supervised tokens as the rank \(32\)"), (2000, WIDER)],
)
def test_rows_with_fewer_tokens_than_the_rank_are_refused(tmp_path, rank, message):
    with pytest.raises(RequestError, match=message):
        train(asked(tmp_path, {**PEFT, "lora_r": rank}, per_device_train_batch_size=1), planner=None, quiet=True)


def test_equal_inputs_are_decomposed_once(tmp_path, monkeypatch):
    update, seen = components.Input.add, set()
    monkeypatch.setattr(components.Input, "add", lambda item, *given: seen.add(item) or update(item, *given))
    peft = {**PEFT, "lora_target_modules": ["q_proj", "v_proj", "o_proj"]}
    folder = train(asked(tmp_path, peft), planner=None, quiet=True).folder
    query, value, output = (start_of(folder, part) for part in ("q_proj", "v_proj", "o_proj"))
    assert query.equal(value)
    assert not query.equal(output)
    assert sorted(len(item.matrices) for item in seen) == [1, 1, 2, 2], "v_proj is given what q_proj is, in two blocks"


def test_components_that_do_not_converge_are_used_and_reported(tmp_path, monkeypatch, capsys):
    update, calls = components.Input.add, []

    def never_settled(item, *given):
        update(item, *given)
        calls.append(item)
        item.is_settled = False

    monkeypatch.setattr(components.Input, "add", never_settled)
    monkeypatch.setattr(eva, "EVA_PASSES", 5)
    folder = train(asked(tmp_path), planner=None).folder
    assert calls.count(calls[0]) == 4, "the first of the five passes compares inputs"
    captured = capsys.readouterr()
    assert "components of 4 of 4 inputs still moved after 5 passes" in captured.out + captured.err
    found = start_of(folder, "q_proj").double()
    torch.testing.assert_close(found @ found.T, torch.eye(4).double(), rtol=0, atol=1e-3)


def start_of(folder, part, kept="lora_A.default.weight"):
    start = load_file(checkpoints(folder)[0] / "model.safetensors")
    return start[f"base_model.model.model.layers.0.self_attn.{part}.{kept}"]


def test_modules_keep_their_ranks_and_share_the_leading_components(tmp_path):
    """Modules of one input and different ranks: peft would move ranks between them."""
    peft = {**PEFT, "lora_target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 6}}
    folder = train(asked(tmp_path, peft), planner=None, quiet=True).folder
    query, value = start_of(folder, "q_proj"), start_of(folder, "v_proj")
    assert (len(query), len(value)) == (4, 6)
    assert query.equal(value[:4])


def test_frozen_matrices_stay_frozen_and_tokens_of_an_adapter_are_no_inputs(tmp_path, monkeypatch):
    trained = []

    def watched(session):
        eva.start_from_rows(session)
        trained.extend(name for name, item in session.assembly.model.named_parameters() if item.requires_grad)

    monkeypatch.setattr(trainer, "start_from_rows", watched)
    peft = {**PEFT, "lora_freeze_a": True, "trainable_token_indices": [1, 2]}
    folder = train(asked(tmp_path, peft), planner=None, quiet=True).folder
    assert not any(".lora_A." in name for name in trained)
    assert any("token" in name for name in trained)
    found = start_of(folder, "q_proj").double()
    torch.testing.assert_close(found @ found.T, torch.eye(4).double(), rtol=0, atol=1e-3)


def test_modules_without_components_are_said(tmp_path, capsys):
    """A rank above the width of an input has no such matrix."""
    peft = {**PEFT, "rank_pattern": {"down_proj": 10_000}, "peft_save_mode": "adapter_only"}
    train(asked(tmp_path, peft), planner=None)
    captured = capsys.readouterr()
    assert "2 of 4 adapters are drawn as kaiming (embeddings" in captured.out + captured.err


def test_labels_of_rows_leave_all_tokens_to_the_components(tmp_path):
    asked_for = asked(tmp_path, task="classification")
    rows = [{"text": f"a row of text, number {number}", "label": "ab"[number % 2]} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = train(asked_for, planner=None, quiet=True).folder
    found = start_of(folder, "q_proj").double()
    torch.testing.assert_close(found @ found.T, torch.eye(4).double(), rtol=0, atol=1e-3)
