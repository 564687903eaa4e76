"""Settings that work with tasks with one output per row."""

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts


def keys(**sections):
    config = TrainingConfig(**sections)
    return [conflict.keys[0] for conflict in find_conflicts(config, Needs()) if not conflict.is_warning]


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"data": {"packing": True}}, "data.packing"),
        ({"data": {"padding_free": True}, "model": {"attn_implementation": "flash_attention_2"}}, "data.padding_free"),
        ({"data": {"supervise": "all"}}, "data.supervise"),
        ({"training": {"use_peft": True}, "peft": {"peft_method": "prompt"}}, "peft.peft_method"),
    ],
)
def test_what_is_about_the_logits_of_tokens_is_refused(task, sections, key):
    sections = dict(sections)
    training = {"task": task, **sections.pop("training", {})}
    assert keys(training=training, **sections) == [key]
    assert keys(training={**training, "task": "sft"}, **sections) == []


def test_a_chunked_loss_has_no_effect_and_presets_of_memory_may_say_it():
    config = TrainingConfig(training={"task": "classification"}, model={"chunked_loss": True})
    [conflict] = find_conflicts(config, Needs())
    assert conflict.is_warning
    assert "has no effect" in conflict.message


@pytest.mark.parametrize(
    ("task", "data", "found"),
    [
        ("sft", {"labels": ["a", "b"]}, ["data.labels"]),
        ("regression", {"multi_label": True}, ["data.multi_label"]),
        ("classification", {"labels": ["a", "b", "a"]}, ["data.labels"]),
        ("classification", {"labels": ["a"]}, ["data.labels"]),
        ("classification", {"labels": ["a"], "multi_label": True}, []),
        ("classification", {"labels": ["a", "b"]}, []),
        ("regression", {"labels": ["price"]}, []),
    ],
)
def test_labels_go_with_tasks_that_have_them(task, data, found):
    assert keys(training={"task": task}, data=data) == found
