"""Label smoothing and z-loss in a training step: their numbers, where they are refused, and that they are read back."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from framework.build.losses.loss import build_loss
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from framework.schema.tasks import Task
from tests.tiny import BERT, split, tiny_assembly, tiny_config, unequal_rows

TERMS = {"label_smoothing": 0.2, "z_loss_coef": 0.05}


@pytest.mark.parametrize("chunked", [False, 5])
@pytest.mark.parametrize("terms", [{"label_smoothing": 0.2}, {"z_loss_coef": 0.05}, TERMS])
def test_the_loss_of_a_step_is_torchs_over_supervised_tokens_and_evaluation_is_plain(chunked, terms):
    assembly = tiny_assembly(tiny_config(training=terms, model={"chunked_loss": chunked}))
    assert {item.key for item in verify(assembly)} >= {f"training.{key}" for key in terms}
    batch = unequal_rows()
    with torch.no_grad():
        logits = assembly.model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    logits, targets = logits[targets != -100], targets[targets != -100]
    log_sum = logits.exp().sum(1).log()
    smoothed = 0.2 * (log_sum - logits.mean(1)) + 0.8 * F.cross_entropy(logits, targets, reduction="none")
    losses = smoothed if "label_smoothing" in terms else F.cross_entropy(logits, targets, reduction="none")
    losses = losses + (0.05 * log_sum**2 if "z_loss_coef" in terms else 0)
    plain = evaluate(assembly, [batch], lambda phase: None)["eval_loss"]
    assert plain == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-5)
    assert train_step(assembly, split(batch, 3), 1).loss == pytest.approx(float(losses.mean()), rel=1e-5)


def test_classes_are_smoothed_where_a_row_has_one():
    asked, data = {"task": "classification", "label_smoothing": 0.3}, {"labels": ["a", "b", "c"]}
    assembly = tiny_assembly(tiny_config(BERT, training=asked, data=data))
    assert "training.label_smoothing" in {item.key for item in verify(assembly)}
    classes = torch.tensor([0, 2, 1, 1, 0, 2, 2, 1])
    batch = {"input_ids": unequal_rows()["input_ids"], "targets": classes[:, None].float()}
    with torch.no_grad():
        answers = assembly.model.eval()(input_ids=batch["input_ids"]).logits
    assembly.model.train()
    expected = F.cross_entropy(answers, classes, label_smoothing=0.3)
    assert train_step(assembly, [batch], 1).loss == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(RequestError, match="label_smoothing"):
        tiny_assembly(tiny_config(BERT, training=asked, data={**data, "multi_label": True}))


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("key", TERMS)
def test_each_task_has_the_term_or_refuses_it_by_name(task, key):
    config = TrainingConfig.model_validate({"training": {"task": task, key: TERMS[key]}})
    refused = [item for item in find_conflicts(config, Needs()) if item.keys == (f"training.{key}", "training.task")]
    works = task.facts.is_next_token or (task is Task.CLASSIFICATION and key == "label_smoothing")
    assert [item.is_warning for item in refused] == ([] if works else [False])


@pytest.mark.parametrize("chunked", [False, 5])
def test_a_term_that_is_not_in_the_loss_stops_the_run(chunked):
    assembly = tiny_assembly(tiny_config(training={"z_loss_coef": 0.05}, model={"chunked_loss": chunked}))
    plain = dataclasses.replace(assembly.objective, loss=build_loss(assembly.config.model, assembly.model))
    with pytest.raises(VerificationFailed, match=r"z_loss_coef: asked 0\.05, in effect 0"):
        verify(dataclasses.replace(assembly, objective=plain))
