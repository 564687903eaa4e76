"""Levers of one device next to several."""

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules.sharding import ranks_conflicts

CASES = [
    ("training.optimizer_in_backward", {"training": {"optimizer_in_backward": True}}),
    ("model.offload_frozen_base", {"model": {"offload_frozen_base": True}}),
    (
        "training.gradient_checkpointing_kwargs.use_reentrant",
        {"training": {"enable_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}},
    ),
]


@pytest.mark.parametrize(("key", "sections"), CASES)
def test_what_works_on_one_device_only_is_refused_on_several(key: str, sections: dict[str, object]) -> None:
    [found] = ranks_conflicts(TrainingConfig.model_validate({**sections, "gpu": {"count": 2}}))
    assert found.keys == (key, "gpu.count")
    assert not found.is_warning
    assert not list(ranks_conflicts(TrainingConfig.model_validate(sections)))


EXCHANGES = {
    "fsdp.enable_fsdp": {"fsdp": {"enable_fsdp": True}},
    "model.attn_implementation": {"model": {"attn_implementation": "ring_attention"}},
}


@pytest.mark.parametrize("key", EXCHANGES)
def test_ranks_shrink_together_unless_they_wait_for_each_other_in_every_layer(key: str) -> None:
    shrinks: dict[str, object] = {"training": {"on_oom": "shrink"}, "gpu": {"count": 2}}
    [found] = ranks_conflicts(TrainingConfig.model_validate({**shrinks, **EXCHANGES[key]}))
    assert found.keys == ("training.on_oom", key)
    assert not found.is_warning
    assert not list(ranks_conflicts(TrainingConfig.model_validate(shrinks)))
    copies = {"fsdp": {"enable_fsdp": True, "sharding_strategy": "NO_SHARD"}}
    assert not list(ranks_conflicts(TrainingConfig.model_validate({**shrinks, **copies})))


def test_the_defaults_go_with_several() -> None:
    assert not list(ranks_conflicts(TrainingConfig.model_validate({"gpu": {"count": 8}})))
