"""Losses and metrics of classification and regression, against transformers' own loss and counts by hand."""

import numpy as np
import pytest
import torch

from framework.build.data.batches import MicroBatches, full_batch
from framework.build.data.rows import join_rows
from framework.build.losses.loss import ignore_phases
from framework.build.tasks.rows import Numbers, OneClass, SeveralClasses, f1, macro_f1
from framework.build.text.labels import Encoded
from framework.run.evaluate import evaluate, format_losses
from framework.run.step import train_step
from tests.tiny import BERT, LLAMA, split, tiny_assembly, tiny_config

KINDS = {
    "one class": ({"task": "classification"}, {"labels": ["a", "b", "c"]}),
    "several classes": ({"task": "classification"}, {"labels": ["a", "b", "c"], "multi_label": True}),
    "numbers": ({"task": "regression"}, {"labels": ["x", "y"]}),
}


def assembly_of(kind, architecture=BERT, **training):
    task, data = KINDS[kind]
    return tiny_assembly(tiny_config(architecture, training={**task, **training}, data=data))


def targets_of(kind, rows=8):
    generator = torch.Generator().manual_seed(1)
    if kind == "one class":
        return torch.randint(0, 3, (rows, 1), generator=generator).float()
    if kind == "several classes":
        return torch.randint(0, 2, (rows, 3), generator=generator).float()
    return torch.randn((rows, 2), generator=generator)


def batch_of(kind, rows=8, length=12):
    ids = torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1::2, 9:] = 0
    return {
        "input_ids": ids * mask,
        "labels": torch.full_like(ids, -100),
        "attention_mask": mask,
        "targets": targets_of(kind, rows),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", [BERT, LLAMA], ids=["bert", "llama"])
def test_the_loss_is_the_sum_over_rows_of_what_transformers_computes_as_a_mean(kind, architecture):
    assembly, batch = assembly_of(kind, {**architecture, "pad_token_id": 0}), batch_of(kind)
    assembly.model.eval()
    loss = assembly.objective(assembly.model, batch, ignore_phases)
    targets = batch["targets"][:, 0].long() if kind == "one class" else batch["targets"]
    theirs = assembly.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=targets).loss
    assert loss.item() == pytest.approx(8 * theirs.item(), rel=1e-5)
    assert assembly.objective.terms(batch).item() == 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_into_micro_batches_does_not_change_the_step(kind):
    batch, results = batch_of(kind), []
    for size in (8, 4, 2):
        assembly = assembly_of(kind)
        result = train_step(assembly, split(batch, size), 1)
        results.append((result.loss, result.grad_norm, result.terms))
    assert results[0][2] == 8
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stand_in_row_counts_for_nothing(kind):
    """The last micro-batch of an uneven epoch: its loss is 0, it moves no weight, and no metric sees it."""
    assembly, batch = assembly_of(kind), batch_of(kind)
    rows = join_rows(
        [
            Encoded(np.array([5, 6, 7], np.int32), np.full(3, -100, np.int32), target.numpy())
            for target in batch["targets"]
        ]
    )
    nothing = MicroBatches(rows, 0)[((0,), False)]
    assert nothing["targets"].isnan().all()
    loss = assembly.objective(assembly.model, nothing, ignore_phases)
    loss.backward()
    assert loss.item() == 0
    assert all(bool((p.grad == 0).all()) for p in assembly.model.parameters() if p.grad is not None)
    assembly.optimizer.zero_grad()
    with_it = evaluate(assembly, [batch, nothing], ignore_phases)
    assert with_it == pytest.approx(evaluate(assembly, [batch], ignore_phases))


def test_the_probe_batch_has_targets_of_the_run():
    for kind, width in (("one class", 1), ("several classes", 3), ("numbers", 2)):
        config = assembly_of(kind).config
        batch = full_batch(config, torch.zeros((4, 16), dtype=torch.int64))
        assert batch["targets"].shape == (4, width)
        assert batch["attention_mask"].sum() == 4 * 16 - 1
    assert "attention_mask" not in full_batch(
        config, torch.zeros((1, int(config.model.model_max_length)), dtype=torch.int64)
    )


def test_metrics_of_one_class():
    names, truth, guess = ("a", "b", "c", "d"), [0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 0, 2]
    sums = replace_logits(
        OneClass(names),
        torch.nn.functional.one_hot(torch.tensor(guess), 4).float(),
        torch.tensor(truth).float()[:, None],
    )
    metrics = OneClass(names).metrics(sums)
    assert metrics["accuracy"] == pytest.approx(4 / 6)
    # a: 1 of 2 true, 2 said; b: 2 of 2, 3 said; c: 1 of 2, 1 said; d never occurs and is left out
    assert metrics["macro_f1"] == pytest.approx((2 * 1 / 4 + 2 * 2 / 5 + 2 * 1 / 3) / 3)
    assert format_losses({"eval_loss": 1.0, **metrics}).startswith("eval loss")


def test_metrics_of_several_classes():
    truth = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]).float()
    logits = torch.tensor([[2.0, -1, 1], [1, -1, 1], [1, -2, -1], [-1, -1, -1]])
    metrics = SeveralClasses(("x", "y", "z")).metrics(replace_logits(SeveralClasses(("x", "y", "z")), logits, truth))
    assert metrics["accuracy"] == 0.5
    assert metrics["f1.x"] == pytest.approx(2 * 2 / (2 + 3))
    assert metrics["f1.y"] == 0
    assert metrics["f1.z"] == 1
    assert metrics["macro_f1"] == pytest.approx((0.8 + 0 + 1) / 3)
    assert metrics["micro_f1"] == pytest.approx(2 * 4 / (5 + 5))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, truth)
    assert metrics["eval_loss"] == pytest.approx(loss.item())


def test_metrics_of_numbers():
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn((40, 2), generator=generator) + 100
    guess = truth + torch.randn((40, 2), generator=generator)
    objective = Numbers(("x", "y"))
    parts = [replace_logits(objective, guess[i : i + 8], truth[i : i + 8]) for i in range(0, 40, 8)]
    metrics = objective.metrics({name: sum(part[name].double() for part in parts) for name in parts[0]})
    t, g = truth.double().numpy(), guess.double().numpy()
    assert metrics["mse"] == pytest.approx(((t - g) ** 2).mean(), rel=1e-5)
    assert metrics["mae"] == pytest.approx(np.abs(t - g).mean(), rel=1e-5)
    assert metrics["r2"] == pytest.approx((1 - ((t - g) ** 2).sum(0) / ((t - t.mean(0)) ** 2).sum(0)).mean(), rel=1e-5)
    assert metrics["pearson"] == pytest.approx(np.mean([np.corrcoef(t[:, i], g[:, i])[0, 1] for i in (0, 1)]), rel=1e-5)
    constant = objective.metrics(replace_logits(objective, guess, torch.ones_like(truth)))
    assert (constant["r2"], constant["pearson"]) == (0, 0)
    for value in (0.1, 1 / 3, 12345.678):  # sums of them do not cancel exactly
        constant = objective.metrics(replace_logits(objective, guess, torch.full_like(truth, value)))
        assert (constant["r2"], constant["pearson"]) == (0, 0)
        constant = objective.metrics(replace_logits(objective, torch.full_like(truth, value), truth))
        assert constant["pearson"] == 0


def replace_logits(objective, logits, targets):
    """The sums of an objective over a model that answers `logits`."""

    class Answers(torch.nn.Module):
        config = assembly_of("one class").model.config

        def forward(self, **inputs):
            return type("Output", (), {"logits": logits})

    rows = len(logits)
    batch = {
        "input_ids": torch.ones((rows, 2), dtype=torch.int64),
        "labels": torch.full((rows, 2), -100),
        "targets": targets,
    }
    return {name: value.double() for name, value in objective.sums(Answers(), batch).items()}


def test_f1_is_zero_where_nothing_occurs():
    zeros = torch.zeros(3)
    assert f1(zeros, zeros, zeros).tolist() == [0, 0, 0]
    assert macro_f1(zeros, zeros, zeros) == 0
