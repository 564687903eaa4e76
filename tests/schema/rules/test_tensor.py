"""Settings that work with tensor parallelism."""

from typing import Any

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.optimizers import FACTS, Optimizer, Shards
from framework.schema.rules.every import Needs, find_conflicts

SIZE = "fsdp.tensor_parallel_size"


def config(count: int = 4, size: int = 2, **sections: dict[str, Any]) -> TrainingConfig:
    sections["fsdp"] = {"tensor_parallel_size": size, **sections.get("fsdp", {})}
    return TrainingConfig.model_validate({"gpu": {"count": count}, **sections})


def found(made: TrainingConfig, warnings: bool = False) -> list[tuple[str, ...]]:
    return [item.keys for item in find_conflicts(made, Needs()) if item.is_warning == warnings]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("count", "size"), [(4, 2), (8, 4), (8, 2)])
def test_sizes_that_go_into_the_devices_work_with_and_without_shards(count: int, size: int, sharded: bool) -> None:
    made = config(count, size, fsdp={"enable_fsdp": sharded})
    assert found(made) == found(made, warnings=True) == []
    assert made.batch.world == count // size
    assert made.is_replicated is not sharded


def test_all_devices_may_share_each_matrix() -> None:
    made = config(2)
    assert found(made) == found(made, warnings=True) == []
    assert not made.is_replicated
    assert made.sharing == 2


@pytest.mark.parametrize("optimizer", [choice for choice in Optimizer if FACTS[choice].shards is not Shards.ELEMENTS])
def test_optimizers_that_need_more_than_a_part_are_refused(optimizer: Optimizer) -> None:
    assert ("training.optimizer", SIZE) in found(config(training={"optimizer": str(optimizer)}))


ADAPTED = {"use_peft": True}
CASES: list[tuple[tuple[str, str], TrainingConfig]] = [
    ((SIZE, "gpu.count"), config(1)),
    ((SIZE, "gpu.count"), config(4, 3)),
    ((SIZE, "gpu.count"), config(4, 8)),
    (("fsdp.enable_fsdp", SIZE), config(2, fsdp={"enable_fsdp": True})),
    ((SIZE, "model.attn_implementation"), config(model={"attn_implementation": "ring_attention"})),
    (("fsdp.sharding_strategy", SIZE), config(fsdp={"enable_fsdp": True, "sharding_strategy": "HYBRID_SHARD"})),
    (("fsdp.cpu_offload", SIZE), config(fsdp={"enable_fsdp": True, "cpu_offload": True})),
    *(((SIZE, "training.task"), config(training={"task": task})) for task in ("preference", "reward", "regression")),
    (("training.optimizer_offload", SIZE), config(training={"optimizer_offload": "host"})),
    (("training.on_oom", SIZE), config(training={"on_oom": "shrink"})),
    (("training.compile", SIZE), config(training={"compile": True})),
    (("training.fp8", SIZE), config(training={"fp8": "tensorwise"})),
    (("training.mixed_precision_dtype", SIZE), config(training={"mixed_precision_dtype": "fp16"})),
    *(
        (("peft.peft_method", SIZE), config(training=ADAPTED, peft={"peft_method": method}))
        for method in ("dora", "pissa", "vera", "ia3", "prefix")
    ),
    (("peft.q_lora", SIZE), config(training=ADAPTED, peft={"q_lora": True})),
    (("peft.lora_modules_to_save", SIZE), config(training=ADAPTED, peft={"lora_modules_to_save": ["lm_head"]})),
    (("peft.peft_save_mode", SIZE), config(training=ADAPTED, peft={"peft_save_mode": "merged"})),
]


@pytest.mark.parametrize(("keys", "made"), CASES, ids=lambda part: "-".join(part) if isinstance(part, tuple) else "")
def test_what_parts_of_matrices_cannot_do_is_refused_by_both_keys(keys: tuple[str, str], made: TrainingConfig) -> None:
    assert keys in found(made)


def test_the_batch_counts_groups() -> None:
    training = {"global_batch_size": 16, "per_device_train_batch_size": 2}
    made = config(8, 4, training=training)
    message = "accumulation 4 = 16 global / (2 per group x 2 groups of 4 devices that share each matrix)"
    assert str(made.batch) == message
