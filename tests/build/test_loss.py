"""The loss over chunks is refused where it would differ, before there are values to see it by."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from framework.build.loss import build_loss, full_loss
from framework.errors import RequestError
from framework.schema.model import ModelParams

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def model(model_type, **settings):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL, **HEADS, **settings))


@pytest.mark.parametrize(
    ("model_type", "settings"), [("gemma2", {"final_logit_softcapping": 30.0}), ("granite", {"logits_scaling": 8.0})]
)
def test_a_model_that_changes_its_logits_after_the_head_takes_no_chunks(model_type, settings):
    built = model(model_type, **settings)
    with pytest.raises(RequestError, match="after the head"):
        build_loss(ModelParams(chunked_loss=True), built)
    assert build_loss(ModelParams(), built) is full_loss


@pytest.mark.parametrize(
    ("model_type", "settings"), [("gemma2", {"final_logit_softcapping": None}), ("granite", {"logits_scaling": 1.0})]
)
def test_the_same_model_without_that_change_takes_them(model_type, settings):
    assert build_loss(ModelParams(chunked_loss=True), model(model_type, **settings)) is not full_loss
