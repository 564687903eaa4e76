"""A config made in Python is refused for what the command line would refuse it for."""

import pytest

from framework.build.refuse import refuse_impossible
from framework.errors import RequestError
from framework.schema.config import TrainingConfig


def refused(devices="any", **sections):
    with pytest.raises(RequestError) as caught:
        refuse_impossible(TrainingConfig.model_validate(sections), devices)
    return [problem.key for problem in caught.value.problems]


def test_what_is_not_built_and_what_contradicts_itself_come_together():
    training = {"compile": "auto", "warmup_steps": 9, "max_steps": 5}
    assert refused(training=training, fsdp={"enable_fsdp": True}) == [
        "training.warmup_steps",
        "fsdp.enable_fsdp",
        "training.compile",
    ]


def test_several_devices_are_looked_at_and_not_run():
    refuse_impossible(TrainingConfig.model_validate({"gpu": {"count": 3}}), "any")
    assert refused("one", gpu={"count": 3}) == ["gpu.count"]


def test_a_warning_refuses_nothing():
    refuse_impossible(TrainingConfig.model_validate({"training": {"max_steps": 5, "num_train_epochs": 2}}), "one")
