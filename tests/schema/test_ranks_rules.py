"""Levers of one device beside several."""

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.ranks_rules import ranks_conflicts

CASES = [
    ("training.on_oom", {"training": {"on_oom": "shrink"}}),
    ("training.optimizer_in_backward", {"training": {"optimizer_in_backward": True}}),
    ("model.offload_frozen_base", {"model": {"offload_frozen_base": True}}),
    (
        "training.gradient_checkpointing_kwargs.use_reentrant",
        {"training": {"enable_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}},
    ),
]


@pytest.mark.parametrize(("key", "sections"), CASES)
def test_what_works_on_one_device_alone_is_refused_beside_several(key: str, sections: dict[str, object]) -> None:
    [found] = ranks_conflicts(TrainingConfig.model_validate({**sections, "gpu": {"count": 2}}))
    assert found.keys == (key, "gpu.count")
    assert not found.is_warning
    assert not list(ranks_conflicts(TrainingConfig.model_validate(sections)))


def test_the_defaults_go_with_several() -> None:
    assert not list(ranks_conflicts(TrainingConfig.model_validate({"gpu": {"count": 8}})))
