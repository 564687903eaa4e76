"""Copies of a model under torch's DDP: where their gradients are."""

import torch

from framework.run.step import train_step
from tests.sharded import on_two, settings, sharded
from tests.tiny import LLAMA, split, unequal_rows


def places(assembly) -> list[int]:
    return [parameter.grad.data_ptr() for parameter in assembly.trained]


def gradients_of_copies(ranks, folder) -> dict[str, object]:
    """Two steps of two micro-batches each."""
    assembly = sharded(settings(2, LLAMA, fsdp={"enable_fsdp": False}), ranks)
    begun, zeros = places(assembly), all(not parameter.grad.any() for parameter in assembly.trained)
    unreached = len(assembly.parallel.reached)
    stayed = []
    for step in (1, 2):
        batches = split({name: rows[ranks.rank * 4 :][:4] for name, rows in unequal_rows().items()}, 2)
        train_step(assembly, batches, step)
        stayed.append(places(assembly) == begun)
    reached = assembly.parallel.reached == set(assembly.trained)
    return {"zeros": zeros, "stayed": stayed, "unreached": unreached, "reached": reached}


def test_gradients_stay_where_they_are_from_the_first_step_on(tmp_path):
    """Else they are there twice: next to the buckets while micro-batches are accumulated, and when torch makes the
    buckets anew."""
    torch.manual_seed(0)
    for found in on_two(gradients_of_copies, tmp_path):
        assert found == {"zeros": True, "stayed": [True, True], "unreached": 0, "reached": True}
