"""A checkpoint of an older version lacks keys that the schema has since learnt."""

import pytest

from framework.errors import RequestError
from framework.run.resume import check_resume
from tests.tiny import tiny_config


def test_keys_that_the_checkpoint_did_not_know_count_as_their_defaults() -> None:
    config = tiny_config()
    saved = config.model_dump(mode="json")
    del saved["training"]["optimizer_offload"], saved["training"]["allocator"], saved["data"]
    assert check_resume(saved, config, ()) == []


def test_such_a_key_that_is_now_set_is_classed_as_any_other() -> None:
    config = tiny_config(training={"tf32": True, "logging_steps": 3})
    saved = tiny_config().model_dump(mode="json")
    del saved["training"]["tf32"]
    with pytest.raises(RequestError, match=r"training\.tf32: was None, is now True"):
        check_resume(saved, config, ())
    assert check_resume(saved, config, ("training.tf32",)) == [
        "training.logging_steps was 1, is now 3",
        "training.tf32 was None, is now True",
    ]
