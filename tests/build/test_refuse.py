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
    fsdp = {"enable_fsdp": True, "context_parallel_size": 2}
    found = refused(training=training, fsdp=fsdp, gpu={"count": 2})
    assert sorted(found) == ["fsdp.context_parallel_size", "training.compile", "training.warmup_steps"]


@pytest.mark.parametrize("devices", ["one", "any"])
def test_several_devices_are_looked_at_and_run(devices):
    refuse_impossible(TrainingConfig.model_validate({"gpu": {"count": 3}}), devices)


def test_a_warning_refuses_nothing():
    refuse_impossible(TrainingConfig.model_validate({"training": {"max_steps": 5, "num_train_epochs": 2}}), "one")
