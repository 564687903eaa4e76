"""Samples during training: their content, that training is unaffected, and refused requests."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from framework.build.data.prediction_rows import encode_sample_prompts
from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.run.held_out import Samples
from framework.run.rehearsal.rehearse import rehearse
from framework.schema.choices import RowFormat
from framework.schema.rules.evaluation import sample_conflicts
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401
from tests.tiny import LLAMA, tiny_config

PROMPTS = ("def decode(self", "    return")


def sampled(corpus, folder, **training):  # noqa: F811
    asked = {"max_steps": 4, "eval_steps": 2, "sample_prompts": list(PROMPTS), "sample_new_tokens": 6, **training}
    return config(corpus, folder, training=asked)


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("sampled") / "run"
    train(sampled(corpus, folder, save_steps=2))
    return folder


def test_each_evaluation_has_a_completion_of_each_prompt(run):
    assert [(line["step"], line["prompt"]) for line in lines(run)] == [
        (step, prompt) for step in (0, 2, 4) for prompt in PROMPTS
    ]


def test_the_last_are_what_the_exported_model_writes(run):
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    for line in lines(run)[-2:]:
        ids = torch.tensor([tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]])
        start = ids.shape[1]
        for _ in range(6):  # token by token, without a cache
            with torch.no_grad():
                token = model(input_ids=ids).logits[0, -1].argmax()
            ids = torch.cat([ids, token[None, None]], 1)
            if int(token) == tokenizer.eos_token_id:
                break
        assert line["completion"] == tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_training_does_not_notice_them(run, corpus, tmp_path):  # noqa: F811
    """Dropout draws the same numbers, and every loss is the same to the last bit."""
    train(sampled(corpus, tmp_path / "run", sample_prompts=[], sample_new_tokens=64))
    assert metrics(tmp_path / "run") == metrics(run)
    assert not (tmp_path / "run" / "samples.jsonl").exists()


def test_a_resumed_run_has_each_sample_once(run, corpus, tmp_path):  # noqa: F811
    made = sampled(corpus, tmp_path / "run", save_steps=2)
    train(made)
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    newest.rename(tmp_path / "aside")
    train(made, resume=True)
    assert lines(tmp_path / "run") == lines(run)


def test_what_memory_does_not_suffice_for_is_left_out_and_reported(corpus, tmp_path, monkeypatch, capsys):  # noqa: F811
    def fails(self, ids):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Samples, "_completion", fails)
    result = train(sampled(corpus, tmp_path / "run"), quiet=False)
    assert result.steps == 4
    assert "sample 1 is skipped: it needs more memory than there is" in capsys.readouterr().err


def test_prompts_that_leave_no_room_are_named_before_the_model_is_loaded(corpus, tmp_path):  # noqa: F811
    with pytest.raises(RequestError) as raised:
        train(sampled(corpus, tmp_path / "run", sample_prompts=["a", "b " * 40], sample_new_tokens=20))
    (problem,) = raised.value.problems
    assert problem.key == "training.sample_prompts[1]"
    assert "with 20 new ones more than 32" in problem.message


@pytest.mark.parametrize(
    ("row_format", "asked"),
    [
        ("messages", "<|user|>Why?<|assistant|>"),
        ("sharegpt", "<|user|>Why?<|assistant|>"),
        ("prompt_completion", "Why?"),
        ("text", "Why?"),
        ("tokens", "Why?"),
        ("preference", "<|user|>Why?<|assistant|>"),
    ],
)
def test_a_prompt_is_asked_as_the_rows_ask(run, row_format, asked):
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made = tiny_config(training={"sample_prompts": ["Why?"]})
    (ids,) = encode_sample_prompts(made, tokenizer, RowFormat(row_format))
    assert tokenizer.decode(ids) == asked


def test_what_cannot_be_sampled_is_a_conflict():
    asked = {"sample_prompts": ["a"], "per_device_train_batch_size": 4}
    assert [each.keys for each in sample_conflicts(tiny_config(training=asked))] == [
        ("training.sample_prompts", "data.eval", "data.eval_fraction")
    ]
    data, gpu = {"eval_fraction": 0.5}, {"name": "h100_80gb", "capability": "9.0", "count": 2}
    assert not [*sample_conflicts(tiny_config(training=asked, data=data))]
    assert not [*sample_conflicts(tiny_config(training=asked, data=data, gpu=gpu))]
    sharded = tiny_config(training=asked, data=data, gpu=gpu, fsdp={"enable_fsdp": True})
    assert [each.keys for each in sample_conflicts(sharded)] == [("training.sample_prompts", "gpu.count")]


def test_keys_and_values_of_a_completion_are_in_the_plan():
    """6 layers, 4 heads of 8 for keys and for values, 128 tokens, float32."""
    deep = {**LLAMA, "num_hidden_layers": 6, "num_key_value_heads": 4, "vocab_size": 16, "intermediate_size": 32}

    def peak(plan: Plan) -> int:
        return next(phase.allocated_bytes for phase in plan.phases if phase.name == "eval")

    rows = {"per_device_train_batch_size": 1, "global_batch_size": 1}
    sections = {"data": {"eval_fraction": 0.5}, "model": {"model_max_length": 128}}
    without, with_samples = (
        rehearse(tiny_config(deep, training={**rows, **asked}, **{name: {**own} for name, own in sections.items()}))
        for asked in ({}, {"sample_prompts": ["a"]})
    )
    cache = 6 * 2 * 4 * 8 * 128 * 4
    assert cache / 2 < peak(with_samples) - peak(without) <= cache * 1.1
    assert any("samples are written one at a time" in line for line in with_samples.assumptions)
