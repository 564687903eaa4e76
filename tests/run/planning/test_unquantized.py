"""A quantized base that saves nothing is reported, with the term that cancels the savings."""

from types import SimpleNamespace

from framework.memory.ledger import Terms
from framework.run.planning.plan_pool import unquantized, without_gain
from framework.schema.config import TrainingConfig


def with_peak(**terms):
    made = Terms(**terms)
    return SimpleNamespace(peak=SimpleNamespace(device_bytes=made.total, terms=made))


def test_a_quantized_base_that_needs_more_names_what_grew():
    plain = with_peak(weights=16 * 2**30, logits_and_loss=8 * 2**30)
    upcast = with_peak(weights=6 * 2**30, logits_and_loss=20 * 2**30)
    message = without_gain(upcast, plain)
    assert "26.00 GiB with a quantized base, 24.00 GiB without; logits and loss grew by 12.00 GiB" in message
    assert without_gain(plain, plain)
    assert without_gain(with_peak(weights=6 * 2**30), plain) is None


def test_the_run_without_quantisation_differs_in_nothing_else():
    def of(**peft):
        return TrainingConfig(training={"use_peft": True}, peft=peft)

    assert unquantized(of(q_lora=True, lora_r=4)) == of(lora_r=4)
    assert unquantized(of(q_lora=True, peft_method="loftq")) == of(peft_method="lora")
    assert unquantized(of()) is None
    assert unquantized(TrainingConfig(peft={"q_lora": True})) is None
