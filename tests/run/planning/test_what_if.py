"""The keys that cause a difference in memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.run.planning.what_if import MOST_CHANGES, TOGETHER, changes, find_causes, with_keys
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key, moves_memory
from tests.reports.plans import GIB, PLAN, gib, use
from tests.tiny import LLAMA, tiny_config

ARCHITECTURE = {"model_type": "llama", "hidden_size": 64}


def config(**sections: dict[str, Any]) -> TrainingConfig:
    model = {"architecture": ARCHITECTURE, **sections.pop("model", {})}
    return TrainingConfig.model_validate({"model": model, **sections})


def fake_plan(cost: Callable[[TrainingConfig], float]) -> Callable[[TrainingConfig], Plan]:
    return lambda config: replace(PLAN, peak=use("backward", 99, gib(activations=cost(config))))


def test_the_keys_named_exist() -> None:
    sections = {key.partition(".")[0] for key in every_key()}
    for key in (name for group in TOGETHER for name in group):
        assert key in every_key() or key in sections, key


def test_a_key_that_says_it_costs_no_memory_is_not_planned_alone() -> None:
    claimed = {key for key, text in _described(TrainingConfig, "") if "no memory." in text.lower()}
    assert {"training.learning_rate", "training.preference.beta", "data.multi_label"} <= claimed
    assert not {key for key in claimed if moves_memory(key) and key != "data.labels"}


def _described(section: type[BaseModel], inside: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        yield f"{inside}{name}", field.description or ""
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _described(field.annotation, f"{inside}{name}.")


def test_what_is_skipped_indeed_changes_nothing() -> None:
    """All keys of `training` that are skipped at once, on a real rehearsal."""
    other = {
        "max_steps": 7, "num_train_epochs": 2.0, "learning_rate": 3e-3, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-4, "save_steps": 3,
        "save_total_limit": 5, "logging_steps": 4, "seed": 1, "output_dir": "x", "run_name": "y",
    }  # fmt: skip
    assert not any(moves_memory(f"training.{key}") for key in other)
    first, second = (make_plan(record(tiny_config(LLAMA, training=training))) for training in ({}, other))
    assert first.peak == second.peak
    assert first.phases == second.phases


@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        (["training.seed", "training.learning_rate", "data.train[0].path", "schema_version"], []),
        (["gpu.name", "gpu.usable_bytes", "gpu.sources.others"], [("gpu",)]),
        (["model.freeze_layers[0]", "model.freeze_layers[1]"], [("model.freeze_layers",)]),
        (["model.architecture.hidden_size", "model.model_name"], [("model.architecture", "model.model_name")]),
        (["peft.lora_r", "peft.lora_target_modules[0]"], [("peft.lora_r",), ("peft.lora_target_modules",)]),
        (["peft.lora_r", "training.use_peft"], [("training.use_peft", "peft")]),
        (["training.max_grad_norm", "gpu.name"], [("gpu",), ("training.max_grad_norm",)]),
    ],
)  # fmt: skip
def test_changes_that_belong_together_are_one(differing: list[str], expected: list[tuple[str, ...]]) -> None:
    assert changes(differing) == expected


def test_keys_are_taken_from_the_second_and_the_others_stay() -> None:
    a = config(training={"optimizer": "sgd", "per_device_train_batch_size": 4})
    b = config(training={"optimizer": "adafactor", "per_device_train_batch_size": 2}, gpu={"name": "x"})
    mixed = with_keys(a, b, ["training.optimizer", "gpu"])
    assert (mixed.training.optimizer, mixed.training.per_device_train_batch_size) == ("adafactor", 4)
    assert mixed.gpu == b.gpu
    assert with_keys(a, b, ["training", "gpu"]) == b
    assert a.training.optimizer == "sgd"


def test_a_change_that_is_no_valid_request_alone_is_refused_and_quiet_keys_do_not_refuse() -> None:
    a = config(training={"global_batch_size": 4, "per_device_train_batch_size": 4})
    b = config(training={"global_batch_size": 9, "per_device_train_batch_size": 3})
    with pytest.raises(RequestError, match="4 global is not a whole number"):
        with_keys(a, b, ["training.per_device_train_batch_size"])
    evaluating = config(training={"eval_steps": 3}, data={"eval_fraction": 0.1})
    assert with_keys(evaluating, b, ["data.eval_fraction"]).data.eval_fraction == 0


def test_each_change_alone() -> None:
    a = config(model={"model_max_length": 64}, training={"optimizer": "sgd"})
    b = config(model={"model_max_length": 128, "torch_dtype_str": "bfloat16"}, training={"optimizer": "adamw_torch"})
    made = fake_plan(lambda c: (c.model.model_max_length // 64) * (3 if c.training.optimizer == "adamw_torch" else 1))
    differing = ["training.optimizer", "training.seed", "model.torch_dtype_str", "model.model_max_length"]
    found = find_causes(a, b, (made(a), made(b)), differing, lambda asked: [made(each) for each in asked])
    effects = {cause.keys[0]: cause.plan.peak.device_bytes // GIB for cause in found.causes if cause.plan}
    assert effects == {"model.torch_dtype_str": 1, "training.optimizer": 3, "model.model_max_length": 2}
    assert found.b.peak.device_bytes == 6 * GIB


def test_a_change_that_is_not_possible_alone_is_reported_and_not_planned() -> None:
    a = config(training={"global_batch_size": 4, "per_device_train_batch_size": 4})
    b = config(training={"per_device_train_batch_size": 3, "global_batch_size": 4, "optimizer": "sgd"})
    differing = ["training.per_device_train_batch_size", "training.optimizer"]
    found = find_causes(a, b, (PLAN, PLAN), differing, lambda asked: [PLAN] * len(asked))
    assert [(cause.keys[0], cause.plan is None, bool(cause.refusal)) for cause in found.causes] == [
        ("training.per_device_train_batch_size", True, True),
        ("training.optimizer", False, False),
    ]


def test_one_change_needs_no_further_plan_and_many_are_not_all_planned() -> None:
    a, b = config(), config(training={"optimizer": "sgd"})

    def never(_: TrainingConfig) -> Plan:
        raise AssertionError("planned")

    assert find_causes(a, b, (PLAN, PLAN), ["training.optimizer"], never).causes[0].plan is PLAN
    assert find_causes(a, b, (PLAN, PLAN), ["training.seed"], never).causes == ()
    many = [
        "training.optimizer",
        *(f"fsdp.{name}" for name in ("cpu_offload", "forward_prefetch", "sharding_strategy")),
    ]
    many += ["model.chunked_loss", "model.model_max_length", "training.compile", "training.max_grad_norm"]
    found = find_causes(a, b, (PLAN, PLAN), many, lambda asked: [PLAN] * len(asked))
    assert len(found.causes) == MOST_CHANGES
    assert found.others == ("training.compile", "training.max_grad_norm")
