"""Plans of preference runs: the reference is in them, pairs are two sequences, and chunks hold for all of it."""

import pytest

from framework.memory.cards import read_card
from framework.run.rehearsal.rehearse import rehearse
from tests.tiny import LLAMA, tiny_config

H100 = read_card("h100_80gb")
WIDE = {**LLAMA, "vocab_size": 8192, "hidden_size": 64}


def planned(training=None, model=None, **sections):
    training = {"task": "preference", "per_device_train_batch_size": 2, "global_batch_size": 4, **(training or {})}
    model = {"model_max_length": 64, "torch_dtype_str": "float32", **(model or {})}
    return rehearse(tiny_config(WIDE, training=training, model=model, gpu=H100, **sections))


def terms(plan, phase):
    return next(item.terms for item in plan.phases if item.name == phase)


@pytest.fixture(scope="module")
def dpo():
    return planned(data={"eval_fraction": 0.1})


def test_the_frozen_copy_is_in_the_plan_and_a_loss_without_a_reference_has_none(dpo):
    own = 4 * dpo.total_parameters
    assert terms(dpo, "load").weights == pytest.approx(2 * own, rel=0.01)
    assert terms(dpo, "resume").weights == pytest.approx(2 * own, rel=0.01)
    assert dpo.checkpoint_bytes == pytest.approx(3 * own, rel=0.01), "nothing of it is saved"
    assert terms(dpo, "optimizer_step").optimizer == pytest.approx(2 * own, rel=0.05)
    orpo = planned({"preference": {"loss_type": "orpo"}})
    assert terms(orpo, "load").weights == pytest.approx(own, rel=0.01)
    assert any("the reference, a frozen copy of the weights, takes 0.00 GiB" in line for line in dpo.assumptions)
    assert not any("reference" in line for line in orpo.assumptions)


def test_with_an_adapter_the_reference_costs_no_weights():
    lora = {"use_peft": True}
    with_reference, without = (
        planned({**lora, "preference": {"loss_type": loss}}, peft={"lora_target_modules": ["all-linear"]})
        for loss in ("dpo", "orpo")
    )
    assert terms(with_reference, "load").weights == terms(without, "load").weights


def test_a_reference_that_is_asked_once_costs_an_evaluation_and_no_weights(dpo):
    once = planned({"preference": {"precompute_reference": True}})
    own = 4 * once.total_parameters
    assert terms(once, "load").weights == pytest.approx(own, rel=0.01)
    assert terms(once, "eval").logits_and_loss > 0, "and there is no evaluation"
    assert once.peak.allocated_bytes < dpo.peak.allocated_bytes - 0.9 * own


def test_a_pair_is_two_sequences(dpo):
    alike = planned({"task": "sft", "per_device_train_batch_size": 4, "global_batch_size": 8})
    assert terms(dpo, "backward").activations == pytest.approx(terms(alike, "backward").activations, rel=0.1)
    assert terms(dpo, "backward").logits_and_loss == pytest.approx(terms(alike, "backward").logits_and_loss, rel=0.1)
    assert any("2 pairs a forward pass" in line for line in dpo.assumptions)


def test_chunks_leave_no_whole_logits_anywhere(dpo):
    chunked = planned(model={"chunked_loss": 32}, data={"eval_fraction": 0.1})
    whole = 4 * 2 * 2 * 64 * 8192  # float32 logits of a micro-batch of pairs
    for phase in ("forward", "loss", "backward", "eval"):
        assert terms(dpo, phase).logits_and_loss >= whole
        assert terms(chunked, phase).logits_and_loss < 0.75 * whole, phase
    assert chunked.peak.allocated_bytes < dpo.peak.allocated_bytes


@pytest.mark.parametrize("chunk", [False, 32])
def test_counting_likeliest_tokens_costs_evaluation_nothing_that_shows(chunk, monkeypatch):
    from framework.build.tasks.next_token import NextToken

    config = {"training": {"task": "sft"}, "model": {"chunked_loss": chunk}, "data": {"eval_fraction": 0.1}}
    counted = planned(**config)
    plain = lambda self, model, batch: {"loss": self.loss(model, batch, lambda _: None)}  # noqa: E731
    monkeypatch.setattr(NextToken, "sums", plain)
    monkeypatch.setattr(NextToken, "metrics", lambda *_: {})
    sizes = [next(p.allocated_bytes for p in made.phases if p.name == "eval") for made in (counted, planned(**config))]
    assert sizes[0] <= 1.001 * sizes[1]
