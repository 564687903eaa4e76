"""A checkpoint of an older version lacks keys that were added to the schema since."""

import pytest

from framework.errors import RequestError
from framework.run.checkpoints.resume import check_allowed, check_resume
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


def test_on_more_devices_a_step_keeps_its_rows() -> None:
    """8 rows a step on one device: 4 x 2 devices go on, 8 x 2 are refused with the size that would do."""
    saved = tiny_config(training={"per_device_train_batch_size": 4, "global_batch_size": 8}).model_dump(mode="json")
    two = tiny_config(training={"per_device_train_batch_size": 4, "global_batch_size": 8}, gpu={"count": 2})
    assert "gpu.count was 1, is now 2" in check_resume(saved, two, ())
    more = tiny_config(training={"per_device_train_batch_size": 4, "global_batch_size": 16}, gpu={"count": 2})
    with pytest.raises(RequestError, match="a step had 8 rows on 1 device, and has 16 on 2 devices") as caught:
        check_resume(saved, more, ())
    assert caught.value.problems[0].expected == "1"


def test_devices_that_share_rows_count_once() -> None:
    """4 devices, of which two share each row, go on as two."""
    sizes = {"per_device_train_batch_size": 4, "global_batch_size": 8}
    ring, fsdp = {"attn_implementation": "ring_attention"}, {"context_parallel_size": 2}
    saved = tiny_config(training=sizes, model=ring, fsdp=fsdp, gpu={"count": 4}).model_dump(mode="json")
    two = tiny_config(training=sizes, gpu={"count": 2})
    assert check_resume(saved, two, ("model.attn_implementation",))
    all_share = tiny_config(training={**sizes, "global_batch_size": 4}, model=ring, gpu={"count": 4})
    with pytest.raises(RequestError, match="a step had 8 rows"):
        check_resume(saved, all_share, ())


def test_devices_that_share_matrices_count_once() -> None:
    """4 devices, of which two share each matrix, go on as two that do not."""
    sizes = {"per_device_train_batch_size": 4, "global_batch_size": 8}
    saved = tiny_config(training=sizes, fsdp={"tensor_parallel_size": 2}, gpu={"count": 4}).model_dump(mode="json")
    lines = check_resume(saved, tiny_config(training=sizes, gpu={"count": 2}), ())
    assert "fsdp.tensor_parallel_size was 2, is now 1" in lines


def test_as_many_devices_in_other_groups_cut_a_step_otherwise() -> None:
    """Two devices that shared matrices go on as two with rows of their own: the accumulation is no change of theirs."""
    sizes = {"per_device_train_batch_size": 2, "global_batch_size": 4}
    saved = tiny_config(training=sizes, fsdp={"tensor_parallel_size": 2}, gpu={"count": 2}).model_dump(mode="json")
    shards = {"fsdp": {"enable_fsdp": True}, "gpu": {"count": 2}}
    lines = check_resume(saved, tiny_config(training=sizes, **shards), ())
    assert "training.gradient_accumulation_steps was 2, is now 1" in lines
    with pytest.raises(RequestError, match=r"4 rows on 2 devices \(1 group\), and has 8 on 2 devices") as caught:
        check_resume(saved, tiny_config(training={**sizes, "global_batch_size": 8}, **shards), ())
    assert caught.value.problems[0].expected == "1"


@pytest.mark.parametrize(
    ("word", "message", "nearest"),
    [
        ("per_device_train_batch_size", "no key", "training.per_device_train_batch_size"),
        ("training.max_step", "no key", "training.max_steps"),
        ("model.model_name", "no run can resume with another model.model_name", None),
    ],
)
def test_what_allow_cannot_allow_is_reported(word: str, message: str, nearest: str | None) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_allowed(["training.max_steps", "training.logging_steps", "data.train", "gpu.count", word])
    [problem] = caught.value.problems
    assert (problem.key, problem.nearest) == ("--allow", nearest)
