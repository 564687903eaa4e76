"""Settings that a task does not read, or cannot be combined with, are refused with both keys."""

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts


def refused(training, **sections):
    config = TrainingConfig(training=training, **sections)
    return [(item.keys, item.message) for item in find_conflicts(config, Needs()) if not item.is_warning]


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        ("simpo", "label_smoothing", 0.1),
        ("dpo", "simpo_gamma", 1.0),
        ("orpo", "precompute_reference", True),
        ("ipo", "desirable_weight", 2.0),
    ],
)
def test_a_key_that_the_loss_does_not_read_is_refused(loss, key, value):
    ((keys, message),) = refused({"task": "preference", "preference": {"loss_type": loss, key: value}})
    assert keys == (f"training.preference.{key}", "training.preference.loss_type")
    assert message.startswith(f"has no effect: training.preference.loss_type is {loss}, not ")


def test_a_key_of_preferences_is_refused_for_another_task():
    ((keys, _),) = refused({"preference": {"beta": 0.3}})
    assert keys == ("training.preference.beta", "training.task")


@pytest.mark.parametrize("joins", ["packing", "padding_free"])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_answers_are_not_put_into_one_row(loss, joins):
    model = {"attn_implementation": "flash_attention_2", "torch_dtype_str": "bfloat16"}
    training = {"task": "preference", "preference": {"loss_type": loss}}
    ((keys, _),) = refused(training, data={joins: True}, model=model)
    assert keys == (f"data.{joins}", "training.task")


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_base_that_gave_its_start_away_is_no_reference(method):
    training = {"task": "preference", "use_peft": True}
    ((keys, _),) = refused(training, peft={"peft_method": method})
    assert keys[:2] == ("peft.peft_method", "training.preference.loss_type")
    assert not refused({**training, "preference": {"loss_type": "orpo"}}, peft={"peft_method": method})
    assert not refused({**training, "preference": {"precompute_reference": True}}, peft={"peft_method": method})


def test_a_distillation_needs_a_teacher_and_nothing_else_has_one():
    assert [keys for keys, _ in refused({"task": "distillation"})] == [("training.teacher", "training.task")]
    teacher = {"model_name": "a"}
    assert not refused({"task": "distillation", "teacher": teacher, "distillation": {"temperature": 2.0}})
    assert [keys for keys, _ in refused({"teacher": teacher, "distillation": {"alpha": 0.9}})] == [
        ("training.teacher", "training.task"),
        ("training.distillation.alpha", "training.task"),
    ]
    random = {"model_name": "a", "load_pretrained_weights": False}
    ((keys, _),) = refused({"task": "distillation", "teacher": random})
    assert keys[0] == "training.teacher.load_pretrained_weights"


def test_what_is_measured_against_is_not_sharded():
    sharded = {"fsdp": {"enable_fsdp": True}, "gpu": {"count": 2}}
    refusing = lambda training: [keys for keys, _ in refused(training, **sharded) if keys[0] == "fsdp.enable_fsdp"]  # noqa: E731
    assert refusing({"task": "preference"})
    assert refusing({"task": "distillation", "teacher": {"model_name": "a"}})
    assert not refusing({"task": "preference", "preference": {"precompute_reference": True}})
    assert not refusing({"task": "preference", "preference": {"loss_type": "orpo"}})
