"""NEFTune: transformers' own noise from the same generator, only in training, in every task."""

import dataclasses

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from framework.build.model.embedding_noise import EmbeddingNoise
from framework.build.model.parts import causal_model
from framework.build.verify import verify
from framework.errors import VerificationFailed
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from framework.schema.tasks import Task
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

NOISY = {"neftune_noise_alpha": 15}


def assembled(architecture=LLAMA, peft=None, **more):
    asked = {**NOISY, **more} | ({"use_peft": True} if peft else {})
    return tiny_assembly(tiny_config(architecture, training=asked, **({"peft": peft} if peft else {})))


def test_it_is_the_noise_of_transformers():
    embedding = torch.nn.Embedding(10, 6)
    embedding.neftune_noise_alpha = 15
    output = torch.randn(2, 7, 6)
    torch.manual_seed(3)
    expected = neftune_post_forward_hook(embedding, (), output)
    torch.manual_seed(3)
    assert torch.equal(EmbeddingNoise(15)(embedding, (), output), expected)
    assert not torch.equal(expected, output)


@pytest.mark.parametrize("architecture", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("peft", [None, {"lora_target_modules": ["all-linear"]}], ids=["whole", "lora"])
def test_training_has_it_and_evaluation_has_not(architecture, peft):
    noisy = assembled(architecture, peft)
    plain = tiny_assembly(tiny_config(architecture, **({"training": {"use_peft": True}, "peft": peft} if peft else {})))
    plain.model.load_state_dict(noisy.model.state_dict())
    assert {item.key: item.found for item in verify(noisy)}["training.neftune_noise_alpha"] == "15"
    losses = [evaluate(each, [unequal_rows()], lambda phase: None)["eval_loss"] for each in (noisy, plain)]
    assert losses[0] == losses[1]
    assert train_step(noisy, [unequal_rows()], 1).loss != train_step(plain, [unequal_rows()], 1).loss


def test_a_resumed_run_draws_the_same_noise(tmp_path):
    straight = assembled()
    losses = [train_step(straight, [unequal_rows()], step).loss for step in range(1, 5)]
    first = assembled()
    for step in (1, 2):
        train_step(first, [unequal_rows()], step)
    path = save_checkpoint(tmp_path, contents_of(first, 2), 2)
    resumed = assembled()
    load_checkpoint(path, resumed)
    assert [train_step(resumed, [unequal_rows()], step).loss for step in (3, 4)] == losses[2:]


def test_noise_that_is_gone_stops_the_run():
    assembly = assembled()
    causal_model(assembly.model).get_input_embeddings()._forward_hooks.clear()
    with pytest.raises(VerificationFailed, match="neftune_noise_alpha: asked 15, in effect no noise"):
        verify(assembly)
    noisy = dataclasses.replace(assembled(), config=tiny_config())
    with pytest.raises(VerificationFailed, match="neftune_noise_alpha: asked 0, in effect 15"):
        verify(noisy)


@pytest.mark.parametrize("task", Task)
def test_every_task_may_have_it(task):
    config = TrainingConfig.model_validate({"training": {"task": task, **NOISY}})
    assert not [item for item in find_conflicts(config, Needs()) if "training.neftune_noise_alpha" in item.keys]


def test_parts_of_rows_may_not():
    config = TrainingConfig.model_validate(
        {"training": NOISY, "model": {"attn_implementation": "ring_attention"}, "gpu": {"count": 2}}
    )
    assert ("training.neftune_noise_alpha", "model.attn_implementation") in {
        item.keys for item in find_conflicts(config, Needs()) if not item.is_warning
    }
