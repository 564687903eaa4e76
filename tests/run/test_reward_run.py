"""A reward model: the loss against its formula, a run from file to export, and its plan."""

import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from framework.errors import Interrupted, RequestError
from framework.memory.cards import read_card
from framework.run.inputs import read_inputs
from framework.run.rehearsal.rehearse import rehearse
from framework.run.step import train_step
from framework.schema.tasks import Task
from tests.run.test_preference_run import config as preference_config
from tests.run.test_preference_run import files  # noqa: F401
from tests.run.test_trainer import interrupt_after, metrics, train
from tests.tiny import LLAMA, pairs, split_pairs, tiny_assembly, tiny_config

REWARD = {"task": "reward", "learning_rate": 1e-2}


def gradients(batches, **sections):
    assembly, seen = tiny_assembly(tiny_config(training=REWARD, **sections)), {}

    def observe(phase):
        if phase == "optimizer_step":
            seen.update({name: p.grad.clone() for name, p in assembly.model.named_parameters() if p.grad is not None})

    return train_step(assembly, batches, 1, observe), seen


def test_the_loss_is_bradley_terrys_and_no_split_changes_it():
    batch = pairs()
    assembly = tiny_assembly(tiny_config(training=REWARD))
    with torch.no_grad():
        rewards = assembly.model(input_ids=batch["input_ids"]).logits[:, 0].double().tolist()
    losses = [math.log1p(math.exp(rewards[index + 4] - rewards[index])) for index in range(4)]
    whole, expected = gradients([batch])
    assert whole.loss == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert whole.terms == 4
    parts, found = gradients(split_pairs(batch, 1))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_margin_is_asked_of_the_difference():
    batch = {**pairs(), "targets": torch.tensor([[0.0], [1.5], [-0.5], [2.0]])}
    with torch.no_grad():
        rewards = tiny_assembly(tiny_config(training=REWARD)).model(input_ids=batch["input_ids"]).logits[:, 0].tolist()
    margins = [0.0, 1.5, -0.5, 2.0]
    losses = [math.log1p(math.exp(rewards[index + 4] - rewards[index] + margins[index])) for index in range(4)]
    result, _ = gradients([batch])
    assert result.loss == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_the_margins_of_a_file_reach_the_loss(tmp_path):
    rows = [
        {"prompt": "say a:", "chosen": "b", "rejected": "B", **({"margin": number} if number % 2 else {})}
        for number in range(12)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = preference_config(tmp_path, tmp_path / "run")
    config = asked.model_copy(update={"data": asked.data.model_copy(update={"eval_fraction": 0.0})})
    training = config.training.model_copy(update={"task": Task.REWARD})
    data = read_inputs(config.model_copy(update={"training": training})).data
    assert [row["target"] for row in data.train] == [[number if number % 2 else 0.0] for number in range(12)]
    file.write_text(json.dumps({**rows[0], "margin": "much"}) + "\n")
    with pytest.raises(RequestError, match=r"margin.*expected a number"):
        read_inputs(config)


def reward_config(files, folder, adapted=False, **training):  # noqa: F811
    asked = preference_config(files, folder, adapted=adapted)
    changes = {"task": "reward", **training}
    return asked.model_copy(update={"training": type(asked.training)(**{**asked.training.model_dump(), **changes})})


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_the_better_answer_gets_the_higher_reward(files, tmp_path, adapted):  # noqa: F811
    result = train(reward_config(files, tmp_path / "run", adapted))
    first, last = result.evals[0], result.evals[-1]
    assert last["reward_accuracy"] == 1.0
    assert last["reward_margin"] > first["reward_margin"] + 0.5
    assert last["eval_loss"] < first["eval_loss"]
    assert set(metrics(tmp_path / "run", "pairs").values()) == {8, 6}
    if adapted:
        return
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    ends = [f"say beta gamma:{word}{tokenizer.eos_token}" for word in ("alpha", "ALPHA")]
    good, bad = (model(**tokenizer(text, return_tensors="pt")).logits.item() for text in ends)
    assert model.config.num_labels == 1
    assert good > bad


def test_a_resumed_run_is_the_straight_one(files, tmp_path, monkeypatch):  # noqa: F811
    train(reward_config(files, tmp_path / "straight"))
    with monkeypatch.context() as patched:
        interrupt_after(4, patched)
        with pytest.raises(Interrupted):
            train(reward_config(files, tmp_path / "run"))
    train(reward_config(files, tmp_path / "run"), resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_the_plan_has_two_sequences_a_row_and_no_logits_of_tokens():
    wide = {**LLAMA, "vocab_size": 8192}
    sizes = {"per_device_train_batch_size": 2, "global_batch_size": 4}
    model = {"model_max_length": 64}
    made = [
        rehearse(tiny_config(wide, training={"task": task, **rows}, model=model, gpu=read_card("h100_80gb")))
        for task, rows in (
            ("reward", sizes),
            ("classification", {"per_device_train_batch_size": 4, "global_batch_size": 8}),
        )
    ]
    reward, alike = (next(phase for phase in plan.phases if phase.name == "backward").terms for plan in made)
    assert reward.activations == pytest.approx(alike.activations, rel=0.1)
    assert reward.logits_and_loss < 4 * 64 * 8192
