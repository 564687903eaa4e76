"""Settings that work with context parallelism."""

from typing import Any

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts

RING = {"attn_implementation": "ring_attention"}


def config(count: int = 4, **sections: dict[str, Any]) -> TrainingConfig:
    sections["model"] = {**RING, **sections.get("model", {})}
    return TrainingConfig.model_validate({"gpu": {"count": count}, **sections})


def found(made: TrainingConfig, warnings: bool = False) -> list[tuple[str, ...]]:
    return [item.keys for item in find_conflicts(made, Needs()) if item.is_warning == warnings]


@pytest.mark.parametrize("size", [None, 2, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_sizes_that_go_into_the_devices_work_with_and_without_shards(size: int | None, sharded: bool) -> None:
    made = config(fsdp={"context_parallel_size": size, "enable_fsdp": sharded})
    assert found(made) == found(made, warnings=True) == []
    assert made.context_size == (size or 4)
    assert made.batch.world == 4 // (size or 4)


CASES: list[tuple[tuple[str, str], TrainingConfig]] = [
    (("model.attn_implementation", "gpu.count"), config(1)),
    (("fsdp.context_parallel_size", "model.attn_implementation"), config(fsdp={"context_parallel_size": 1})),
    (("fsdp.context_parallel_size", "gpu.count"), config(fsdp={"context_parallel_size": 3})),
    (("fsdp.context_parallel_size", "gpu.count"), config(fsdp={"context_parallel_size": 8})),
    (
        ("fsdp.context_parallel_size", "model.attn_implementation"),
        config(fsdp={"context_parallel_size": 2}, model={"attn_implementation": "sdpa"}),
    ),
    *(
        (("model.attn_implementation", "training.task"), config(training={"task": task}))
        for task in ("preference", "classification", "regression", "reward")
    ),
    (("model.attn_implementation", "data.packing"), config(data={"packing": True})),
    (("model.attn_implementation", "data.padding_free"), config(data={"padding_free": True})),
    (("model.attn_implementation", "training.compile"), config(training={"compile": True})),
    (
        ("model.attn_implementation", "peft.peft_method"),
        config(training={"use_peft": True}, peft={"peft_method": "prefix"}),
    ),
    (("model.sdpa_backend", "model.attn_implementation"), config(model={"sdpa_backend": "math"})),
]


@pytest.mark.parametrize(("keys", "made"), CASES, ids=lambda part: "-".join(part) if isinstance(part, tuple) else "")
def test_what_parts_of_rows_cannot_do_is_refused_by_both_keys(keys: tuple[str, str], made: TrainingConfig) -> None:
    assert keys in found(made)


def test_the_batch_counts_groups_and_rows_are_padded_to_equal_parts() -> None:
    training = {"global_batch_size": 16, "per_device_train_batch_size": 2}
    made = config(8, fsdp={"context_parallel_size": 4}, training=training, model={"model_max_length": 100})
    assert str(made.batch) == ("accumulation 4 = 16 global / (2 per group x 2 groups of 4 devices that share each row)")
    assert made.longest == 104
    odd = made.model_copy(update={"data": made.data.model_copy(update={"pad_to_multiple_of": 3})})
    assert odd.longest == 120


def test_rows_that_are_padded_beyond_the_positions_are_refused() -> None:
    architecture = {"model_type": "llama", "max_position_embeddings": 100}
    made = config(8, model={"architecture": architecture, "model_max_length": 100})
    assert ("fsdp.context_parallel_size", "model.model_max_length") in found(made)
