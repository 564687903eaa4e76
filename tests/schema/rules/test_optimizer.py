"""Optimizers with other keys: impossible combinations are refused by the recipe alone, with possible ones proposed."""

import pytest

from framework.checks import PLAN, TRAIN, check
from framework.errors import RequestError
from framework.memory import requirements
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.tiny import LLAMA

MODEL = {"architecture": LLAMA, "load_pretrained_weights": False}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
EIGHT_BIT = ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "paged_lion_8bit"]


def conflicts(warnings=False, **sections):
    config = TrainingConfig.model_validate({"model": MODEL, **sections})
    return [found for found in find_conflicts(config, Needs()) if found.is_warning == warnings]


@pytest.mark.parametrize("optimizer", [*EIGHT_BIT, "adamw_torchao_8bit", "adamw_torchao_4bit"])
def test_small_states_are_not_sharded(optimizer):
    [found] = conflicts(training={"optimizer": optimizer}, fsdp={"enable_fsdp": True}, gpu={"count": 2})
    assert found.keys == ("training.optimizer", "fsdp.enable_fsdp")
    assert optimizer in found.message
    assert "adamw_torch_fused" in found.expected


@pytest.mark.parametrize(
    ("training", "other"),
    [
        ({"gradient_accumulation_steps": 4}, "training.gradient_accumulation_steps"),
        ({"global_batch_size": 16}, "training.gradient_accumulation_steps"),
        ({"max_grad_norm": 1.0}, "training.max_grad_norm"),
        ({"mixed_precision_dtype": "fp16"}, "training.mixed_precision_dtype"),
        ({"optimizer": "adamw_torchao_8bit"}, "training.optimizer"),
    ],
)
def test_updates_in_backward_exclude_what_needs_all_gradients(training, other):
    [found] = conflicts(training={**IN_BACKWARD, **training})
    assert set(found.keys[:2]) == {"training.optimizer_in_backward", other}
    assert not conflicts(training=IN_BACKWARD)


@pytest.mark.parametrize("optimizer", EIGHT_BIT)
def test_small_states_are_not_offloaded(optimizer):
    [found] = conflicts(training={"optimizer": optimizer, "optimizer_offload": "host"})
    assert found.keys[0] == "training.optimizer_offload"


def test_a_file_needs_a_folder_and_a_folder_a_file():
    [found] = conflicts(training={"optimizer_offload": "nvme"})
    assert found.keys[0] == "training.optimizer_offload_folder"
    [idle] = conflicts(warnings=True, training={"optimizer_offload_folder": "/tmp"})
    assert idle.keys[0] == "training.optimizer_offload_folder"


def test_float32_weights_have_nothing_to_round():
    [found] = conflicts(training={"optimizer": "anyprecision_adamw"}, model={**MODEL, "torch_dtype_str": "float32"})
    assert "bfloat16" in found.expected
    assert not conflicts(training={"optimizer": "anyprecision_adamw"}), "unset: bfloat16, as `resolve` prints"


@pytest.mark.parametrize(
    ("key", "value"),
    [("sgd_momentum", 0.9), ("muon_momentum", 0.9), ("sophia_rho", 1.0), ("projection_rank", 8), ("rounding", "kahan")],
)
def test_a_key_of_another_optimizer_is_idle(key, value):
    [found] = conflicts(warnings=True, training={"optimizer": "adamw_torch", key: value})
    assert found.keys == (f"training.{key}", "training.optimizer")


def test_schedule_free_with_a_falling_rate_is_warned_about():
    training = {"optimizer": "schedule_free_adamw"}
    [found] = conflicts(warnings=True, training=training)
    assert found.expected == "constant"
    assert not conflicts(warnings=True, training={**training, "lr_scheduler_type": "constant"})


@pytest.mark.parametrize(("optimizer", "card"), [("paged_adamw_32bit", "cpu"), ("adamw_torchao_8bit", "cpu")])
def test_what_needs_a_card_is_refused_without_one(optimizer, card):
    config = TrainingConfig.model_validate(
        {"training": {"optimizer": optimizer}, "model": MODEL, "gpu": {"name": card}}
    )
    with pytest.raises(RequestError, match="needs a CUDA GPU"):
        check(config, PLAN)


@pytest.mark.parametrize(
    ("optimizer", "package", "nearest"),
    [
        ("adamw_8bit", "bitsandbytes", "anyprecision_adamw_8bit"),
        ("lion_8bit", "bitsandbytes", "lion"),
        ("paged_adamw_8bit", "bitsandbytes", "anyprecision_adamw_8bit"),
        ("adamw_torchao_4bit", "torchao", "anyprecision_adamw_8bit"),
    ],
)
def test_a_missing_package_is_named_where_a_run_starts_and_not_for_a_plan(monkeypatch, optimizer, package, nearest):
    monkeypatch.setattr(requirements, "is_installed", lambda name: False)
    gpu = {"name": "h100_80gb", "capability": "9.0"}
    config = TrainingConfig.model_validate({"training": {"optimizer": optimizer}, "model": MODEL, "gpu": gpu})
    check(config, PLAN)
    with pytest.raises(RequestError) as caught:
        check(config, TRAIN)
    problem = next(problem for problem in caught.value.problems if problem.key == "training.optimizer")
    assert package in problem.message
    assert problem.expected == f"pip install {package}, or {nearest}"


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({"training": IN_BACKWARD}, "training.optimizer_in_backward"),
        ({"gpu": {"count": 2}, "fsdp": {"enable_fsdp": True}}, "fsdp.enable_fsdp"),
    ],
)
def test_what_cannot_be_undone_is_not_repaired(sections, other):
    sections = {**sections, "training": {**sections.get("training", {}), "on_oom": "shrink"}}
    [found] = [item for item in conflicts(**sections) if item.keys[0] == "training.on_oom"]
    assert found.keys[1] == other
    assert found.expected == "training.on_oom: stop"


def test_one_row_cannot_shrink():
    training = {"on_oom": "shrink", "per_device_train_batch_size": 1}
    [found] = conflicts(warnings=True, training=training)
    assert "there is nothing to halve" in found.message


@pytest.mark.parametrize(("rate", "message"), [(0, ["training.learning_rate"]), (1e-9, [])])
def test_a_rate_of_0_is_reported(rate, message):
    found = conflicts(warnings=True, training={"learning_rate": rate})
    assert [each.keys[0] for each in found if "no weight will change" in each.message] == message
