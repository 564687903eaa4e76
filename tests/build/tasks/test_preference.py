"""Preference losses against the published formulas, written out here over plain log softmax in float64."""

import math

import pytest
import torch

from framework.run.evaluate import evaluate
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, pairs, singles, split_pairs, tiny_assembly, tiny_config

LOSSES = ("dpo", "ipo", "orpo", "simpo", "kto")
LORA = {"lora_r": 4, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0}


def config(loss="dpo", architecture=LLAMA, adapted=False, chunk=False, **preference):
    training = {"task": "preference", "preference": {"loss_type": loss, **preference}, "use_peft": adapted}
    training |= {"learning_rate": 1e-2, "optimizer": "adamw_torch"}
    return tiny_config(
        architecture, training=training, model={"chunked_loss": chunk}, **({"peft": LORA} if adapted else {})
    )


def batch_of(loss):
    return singles() if loss == "kto" else pairs()


def plain_sums(model, batch):
    """(sum, tokens) of the log-probabilities of each sequence's supervised tokens, float64."""
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"]).logits.double().log_softmax(-1)
    labels = batch["labels"][:, 1:]
    picked = found[:, :-1].gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    return picked.sum(1), (labels != -100).sum(1)


def expected(loss, policy, reference, batch, beta, smoothing=0.0, gamma=0.5):
    """Mean loss, as the papers write it, with numbers of Python."""
    (sums, tokens), (was, _) = plain_sums(policy, batch), plain_sums(reference, batch)
    half = len(sums) // 2
    losses = []
    s = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    if loss == "kto":
        for p, r, good in zip(sums.tolist(), was.tolist(), batch["targets"][:, 0].tolist(), strict=True):
            losses.append(1 - s(beta * (p - r)) if good else 1 - s(-beta * (p - r)))
        return sum(losses) / len(losses)
    rows = torch.stack([sums, was, tokens.double()], 1).tolist()
    for (pw, rw, nw), (pl, rl, nl) in zip(rows[:half], rows[half:], strict=True):
        if loss == "dpo":
            m = beta * ((pw - rw) - (pl - rl))
            losses.append(-(1 - smoothing) * math.log(s(m)) - smoothing * math.log(s(-m)))
        if loss == "ipo":
            losses.append(((pw - rw) / nw - (pl - rl) / nl - 1 / (2 * beta)) ** 2)
        if loss == "simpo":
            losses.append(-math.log(s(beta * (pw / nw - pl / nl) - gamma)))
        if loss == "orpo":
            w, x = math.exp(pw / nw), math.exp(pl / nl)
            losses.append(-pw / nw - beta * math.log(s(math.log(w / (1 - w)) - math.log(x / (1 - x)))))
    return sum(losses) / len(losses)


def moved(assembly, batch, steps=3):
    for step in range(1, steps + 1):
        train_step(assembly, [batch], step)
    return assembly


@pytest.mark.parametrize(("chunk", "architecture", "loss"), thinned([False, 7], {"llama": LLAMA, "gpt2": GPT2}, LOSSES))
def test_the_loss_is_the_published_one(loss, architecture, chunk):
    """After three steps, when policy and reference differ; 1e-5 of the value."""
    batch, beta = batch_of(loss), {"simpo": 2.0, "orpo": 0.3}.get(loss, 0.2)
    asked = config(loss, architecture, chunk=chunk, beta=beta)
    assembly, start = moved(tiny_assembly(asked), batch), tiny_assembly(asked)
    assembly.model.eval()
    wanted = expected(loss, assembly.model, start.model, batch, beta)
    assembly.model.train()
    assert train_step(assembly, [batch], 4).loss == pytest.approx(wanted, rel=1e-5)
    assert wanted != pytest.approx(expected(loss, start.model, start.model, batch, beta), rel=1e-2)


def test_label_smoothing_is_the_conservative_loss():
    asked = config(beta=0.3, label_smoothing=0.2)
    assembly, start = moved(tiny_assembly(asked), pairs()), tiny_assembly(asked)
    wanted = expected("dpo", assembly.model, start.model, pairs(), 0.3, smoothing=0.2)
    assert train_step(assembly, [pairs()], 4).loss == pytest.approx(wanted, rel=1e-5)


def test_kto_weighs_good_and_bad_answers():
    losses = [
        train_step(tiny_assembly(config("kto", desirable_weight=w, undesirable_weight=u)), [singles()], 1).loss
        for w, u in ((1.0, 1.0), (2.0, 1.0), (1.0, 3.0))
    ]
    good = float(singles()["targets"].mean())
    assert losses == pytest.approx([0.5, 0.5 * (1 + good), 0.5 * (1 + 2 * (1 - good))], rel=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_first_dpo_loss_is_log_2(adapted):
    assert train_step(tiny_assembly(config(adapted=adapted)), [pairs()], 1).loss == pytest.approx(math.log(2), abs=1e-6)


def gradients(asked, batches):
    assembly, seen = moved(tiny_assembly(asked), batch_of(asked.training.preference.loss_type), steps=1), {}

    def observe(phase):
        if phase == "optimizer_step":
            seen.update({name: p.grad.clone() for name, p in assembly.model.named_parameters() if p.grad is not None})

    return train_step(assembly, batches, 2, observe), seen


@pytest.mark.parametrize(("loss", "adapted"), thinned(LOSSES, [True, False]))
def test_neither_split_nor_chunks_change_the_gradients(loss, adapted):
    """1 x 8 against 8 x 1, and whole logits against chunks."""
    batch, parts = batch_of(loss), split_pairs(batch_of(loss), 1, paired=loss != "kto")
    whole, reference = gradients(config(loss, adapted=adapted), [batch])
    assert whole.terms == 4 if loss != "kto" else 8
    for asked, batches in ((config(loss, adapted=adapted), parts), (config(loss, adapted=adapted, chunk=5), [batch])):
        result, seen = gradients(asked, batches)
        assert result.loss == pytest.approx(whole.loss, rel=1e-5)
        assert (result.terms, result.tokens) == (whole.terms, whole.tokens)
        assert seen.keys() == reference.keys()
        for name, gradient in reference.items():
            torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_preferences_are_learned_and_reported(loss):
    asked = config(loss)
    assembly, batch = tiny_assembly(asked, steps=20), batch_of(loss)
    before = evaluate(assembly, [batch], lambda _: None)
    moved(assembly, batch, steps=20)
    after = evaluate(assembly, split_pairs(batch, 2, paired=loss != "kto"), lambda _: None)
    assert after["eval_loss"] < before["eval_loss"]
    assert after["reward_margin"] > max(before["reward_margin"], 0)
    if loss != "kto":
        assert after["reward_accuracy"] == 1.0
    whole = evaluate(assembly, [batch], lambda _: None)
    assert after == pytest.approx(whole, rel=1e-5), "however it is split"


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_stays_where_it_was(adapted):
    asked = config(adapted=adapted)
    assembly, batch = tiny_assembly(asked, steps=5), pairs()
    reference = assembly.objective.asked.reference
    was, counts = reference(assembly.model, batch), [p.requires_grad for p in assembly.model.parameters()]
    moved(assembly, batch, steps=5)
    assert torch.equal(reference(assembly.model, batch), was)
    assert [p.requires_grad for p in assembly.model.parameters()] == counts
    assert assembly.model.training
    assert (assembly.frozen_model is None) == adapted
    policy = assembly.objective.asked.answers(assembly.model, batch, lambda _: None).sums
    assert not torch.allclose(policy, was, atol=1e-2)


def test_a_pair_without_two_answers_does_not_count():
    batch = pairs()
    batch["labels"][5] = -100  # the worse answer of the second pair
    result = train_step(tiny_assembly(config("orpo")), [batch], 1)
    rest = [index for index in range(8) if index not in (1, 5)]
    kept = {name: tensor[rest] for name, tensor in batch.items()}
    assert result.terms == 3
    assert result.loss == pytest.approx(train_step(tiny_assembly(config("orpo")), [kept], 1).loss, rel=1e-6)
