import pickle
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from framework.build.data.batches import GlobalBatches, MicroBatch, MicroBatches, collate, epoch_order, eval_batches
from framework.build.data.rows import Row, Rows, join_rows
from framework.build.text.labels import IGNORED, Encoded
from framework.schema.config import Batch

PAD = 0


def make_rows(count: int) -> Rows:
    """Row i is i + 1 tokens of value 100 + i, so that a row is known by any of its tokens."""
    rows = []
    for index in range(count):
        ids = np.full(1 + index % 5, 100 + index, dtype=np.int32)
        rows.append(Encoded(ids, ids.copy()))
    return join_rows(rows)


def batches(count: int, per_device: int, accumulation: int, world: int = 1, **options: int) -> GlobalBatches:
    return GlobalBatches(make_rows(count), Batch(per_device, accumulation, world), seed=7, pad_token_id=PAD, **options)


def row_numbers(step: list[MicroBatch]) -> list[int]:
    return [int(first) - 100 for micro in step for first in micro["input_ids"][:, 0]]


def equal(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    same_keys = [micro.keys() for micro in one] == [micro.keys() for micro in other]
    return same_keys and all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


def test_collate_pads_on_the_right_and_ignores_padding() -> None:
    rows: list[Row] = [{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [7], "labels": [7]}]
    batch = collate(rows, pad_token_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    # The id 2 ends the first row and pads the second: only the padding is ignored.
    assert batch["labels"].tolist() == [[-100, 6, 2], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_no_attention_mask_without_padding() -> None:
    row: Row = {"input_ids": [5, 6], "labels": [-100, 6]}
    assert collate([row, row], PAD).keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("split", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_every_split_of_a_step_has_the_same_rows_in_the_same_order(split: tuple[int, int]) -> None:
    whole = list(islice(batches(20, 8, 1).start(0), 7))
    parts = list(islice(batches(20, *split).start(0), 7))
    assert [row_numbers(step) for step in parts] == [row_numbers(step) for step in whole]
    assert [len(step) for step in parts[:2]] == [split[1]] * 2
    assert all(micro["input_ids"].shape[0] == split[0] for micro in parts[0])


def test_an_epoch_has_every_row_once_and_its_last_step_what_is_left() -> None:
    some = batches(21, 4, 2)
    assert some.steps_per_epoch == 3
    steps = list(islice(some.start(0), 6))
    assert [len(row_numbers(step)) for step in steps] == [8, 8, 5, 8, 8, 5]
    first = [number for step in steps[:3] for number in row_numbers(step)]
    second = [number for step in steps[3:] for number in row_numbers(step)]
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second
    assert first != sorted(first)


def test_fewer_rows_than_a_step_is_one_small_step() -> None:
    some = batches(3, 8, 4)
    assert some.steps_per_epoch == 1
    assert [sorted(row_numbers(step)) for step in islice(some.start(0), 2)] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_at_any_step_continues_the_straight_order(workers: int) -> None:
    some = batches(21, 2, 2, workers=workers)
    straight = list(islice(batches(21, 2, 2).start(0), 14))
    for step in range(0, 12, 1 if not workers else 5):
        resumed = list(islice(some.start(step), 14 - step))
        assert all(equal(one, other) for one, other in zip(resumed, straight[step:], strict=True))


def test_seed_and_epoch_decide_the_order() -> None:
    assert epoch_order(50, 1, 0).tolist() == epoch_order(50, 1, 0).tolist()
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_state_of_the_run_is_left_alone(workers: int) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    next(batches(9, 2, 1, workers=workers).start(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_a_spawned_process_needs_can_be_pickled() -> None:
    some = batches(9, 2, 2)
    assert equal(next(pickle.loads(pickle.dumps(some)).start(1)), next(some.start(1)))
    micro_batches = MicroBatches(some.rows, PAD)
    share = ((4, 2), True)
    assert equal([pickle.loads(pickle.dumps(micro_batches))[share]], [micro_batches[share]])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11, 16, 23])
@pytest.mark.parametrize(("per_device", "accumulation", "world"), [(2, 2, 2), (1, 2, 4), (3, 1, 3)])
def test_ranks_share_a_step_without_overlap_and_in_step(
    count: int, per_device: int, accumulation: int, world: int
) -> None:
    ranks = [batches(count, per_device, accumulation, world, rank=rank) for rank in range(world)]
    alone = batches(count, per_device * accumulation * world, 1)
    assert {rank.steps_per_epoch for rank in ranks} == {alone.steps_per_epoch}
    for steps in islice(zip(alone.start(0), *(rank.start(0) for rank in ranks), strict=True), alone.steps_per_epoch):
        whole, shared = steps[0], steps[1:]
        assert len({len(step) for step in shared}) == 1
        supervised = [micro for step in shared for micro in step if (micro["labels"] != IGNORED).any()]
        assert sorted(row_numbers(supervised)) == sorted(row_numbers(whole))


def test_no_rows_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(ValueError, match="no rows"):
        next(batches(0, 1, 1).start(0))


def test_eval_sees_every_row_once_in_order() -> None:
    seen = list(eval_batches(make_rows(7), 3, PAD))
    assert row_numbers(seen) == list(range(7))
    assert [micro["input_ids"].shape[0] for micro in seen] == [3, 3, 1]


def test_eval_gives_each_rank_the_same_number_of_batches() -> None:
    per_rank: list[Iterator[MicroBatch]] = [eval_batches(make_rows(7), 2, PAD, rank, 2) for rank in range(2)]
    first, second = (list(each) for each in per_rank)
    assert len(first) == len(second) == 2
    counted = [micro for micro in [*first, *second] if (micro["labels"] != IGNORED).any()]
    assert sorted(row_numbers(counted)) == list(range(7))


def test_rows_are_padded_to_a_multiple():
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (5, 8, 9)]
    assert [collate([row], 0, 8)["input_ids"].shape[1] for row in rows] == [8, 8, 16]
    batch = collate(rows[:1], 0, 8)
    assert batch["labels"][0].tolist() == [1] * 5 + [-100] * 3
    assert batch["attention_mask"][0].tolist() == [1] * 5 + [0] * 3
    assert "attention_mask" not in collate(rows[1:2], 0, 8)
