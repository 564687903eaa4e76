"""The loss over chunks is refused where it would differ, before there are values to see it by."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from framework.build.losses.loss import build_loss, chunk_size, full_loss, head_is_last
from framework.errors import RequestError
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.heads import AFTER_THE_HEAD, CHANGES_LOGITS, PLAIN_HEADS, chunks_by_default
from framework.schema.model import ModelParams
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows

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
    assert build_loss(ModelParams(), built) == full_loss


@pytest.mark.parametrize(
    ("model_type", "settings"), [("gemma2", {"final_logit_softcapping": None}), ("granite", {"logits_scaling": 1.0})]
)
def test_the_same_model_without_that_change_takes_them(model_type, settings):
    assert build_loss(ModelParams(chunked_loss=True), model(model_type, **settings)) != full_loss


SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"hidden_size": 32, "intermediate_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_experts": 4}
SIZES |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 64}
IDLE = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "pad_token_id": 0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_a_known_plain_head_is_one_and_gets_chunks_where_nobody_says(model_type):
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("this version of transformers does not know it")
    settings = AutoConfig.for_model(model_type, **SIZES, **IDLE)
    built = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    assert chunk_size(ModelParams(), built) == 1024
    assert head_is_last(built, {"input_ids": torch.arange(4).unsqueeze(0)})
    asked = TrainingConfig(model={"architecture": {"model_type": model_type}}, training={"task": "pretrain"})
    written = AutoConfig.for_model(model_type).get_text_config().to_dict()
    is_neutral = all(written.get(name) in (None, neutral) for name, neutral in AFTER_THE_HEAD.items())
    assert chunks_by_default(asked) == (model_type not in CHANGES_LOGITS) == is_neutral


def test_a_model_of_no_known_plain_head_has_all_logits_where_nobody_says():
    built = model("gemma2", final_logit_softcapping=None)
    built.config.model_type = "of another kind"
    assert chunk_size(ModelParams(), built) is None
    assert chunk_size(ModelParams(chunked_loss=True), built) == 1024


@pytest.mark.parametrize("chunk", [False, 5])
@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_token_accuracy_counts_the_likeliest_tokens(architecture, chunk):
    assembly = tiny_assembly(tiny_config(architecture, model={"chunked_loss": chunk}, training={"learning_rate": 1e-2}))
    for step in range(1, 6):
        train_step(assembly, [unequal_rows()], step)
    metrics = evaluate(assembly, split(unequal_rows(), 4), lambda _: None)
    assembly.model.eval()
    batch = unequal_rows()
    with torch.no_grad():
        logits, labels = assembly.model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    hits = (logits.argmax(-1) == labels)[labels != -100].double().mean()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert 0 < metrics["token_accuracy"] < 1
    assert metrics["token_accuracy"] == pytest.approx(float(hits))
    assert metrics["eval_loss"] == pytest.approx(float(losses), rel=1e-5)
