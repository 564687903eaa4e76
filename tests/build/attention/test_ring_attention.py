"""Attention over ranks that share rows equals that on one rank: forward and gradients, with threads as ranks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.attention.context import Context
from framework.build.attention.ring_attention import attend, in_parts, ring_attention
from framework.build.losses.loss import next_tokens
from framework.errors import RequestError


@dataclass
class Board:
    """Exchange between the threads of a group."""

    size: int
    slots: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.slots, self.barrier = [None] * self.size, threading.Barrier(self.size, timeout=200)

    def all_of(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.slots[rank] = tensor
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@dataclass
class Thread:
    """One rank of the group, as `framework.build.attention.context.Context`."""

    rank: int
    size: int
    board: Board
    backend: None = None
    calls: int = 0

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.board.all_of(self.rank, part))

    def scatter_sum(self, whole: Tensor) -> Tensor:
        return torch.stack(self.board.all_of(self.rank, whole)).sum(0).chunk(self.size)[self.rank]


def as_ranks(size: int, work: Callable[[Thread], Any]) -> list[Any]:
    """Results of `work` on each rank."""
    board, found = Board(size), [None] * size

    def run(rank: int) -> None:
        found[rank] = work(Thread(rank, size, board))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def own(whole: Tensor, rank: int, size: int, dim: int) -> Tensor:
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


SHAPES = {
    "grouped": {"heads": 4, "kv_heads": 2},
    "each its own": {"heads": 3, "kv_heads": 3},
    "one for all": {"heads": 4, "kv_heads": 1},
    "narrow values": {"heads": 2, "kv_heads": 2, "value_width": 4},
    "scaled": {"heads": 2, "kv_heads": 1, "scale": 0.5},
}


def made(heads: int, kv_heads: int, value_width: int = 8, scale: float | None = None, dtype: Any = torch.float32):
    torch.manual_seed(0)
    sizes = (heads, 8), (kv_heads, 8), (kv_heads, value_width)
    inputs = [torch.randn(2, count, 24, width, dtype=dtype) for count, width in sizes]
    return inputs, torch.randn(2, 24, heads, value_width, dtype=dtype), scale


def by_ranks(size: int, inputs: list[Tensor], asked: Tensor, scale: float | None) -> list[list[Tensor]]:
    """Result and gradients of each rank."""

    def work(rank: Thread) -> list[Tensor]:
        mine = [own(tensor, rank.rank, size, 2).requires_grad_() for tensor in inputs]
        result = attend(rank, *mine, scale)
        gradients = torch.autograd.grad(result, mine, own(asked, rank.rank, size, 1))
        return [result.detach(), *gradients]

    return as_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_give_what_the_whole_does(size, shape):
    inputs, asked, scale = made(**SHAPES[shape])
    whole = [tensor.clone().requires_grad_() for tensor in inputs]
    result = F.scaled_dot_product_attention(*whole, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    wanted = [result.detach(), *torch.autograd.grad(result, whole, asked)]
    for rank, found in enumerate(by_ranks(size, inputs, asked, scale)):
        for name, mine, all_of_it in zip(["result", "query", "key", "value"], found, wanted, strict=True):
            dim = 1 if name == "result" else 2
            torch.testing.assert_close(mine, own(all_of_it, rank, size, dim), rtol=1e-5, atol=2e-6, msg=name)


def test_half_precision_differs_by_its_rounding():
    inputs, asked, scale = made(4, 2, dtype=torch.bfloat16)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    result = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True).transpose(1, 2)
    wanted = [result.detach(), *torch.autograd.grad(result, exact, asked.double())]
    for rank, found in enumerate(by_ranks(2, inputs, asked, scale)):
        for number, (mine, all_of_it) in enumerate(zip(found, wanted, strict=True)):
            true = own(all_of_it, rank, 2, 2 if number else 1)
            assert mine.dtype == torch.bfloat16
            assert float((mine.double() - true).norm() / true.norm()) < 8e-3


def test_under_autocast_products_run_in_its_dtype():
    inputs, _, _ = made(2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(Thread(0, 1, Board(1)), *inputs).dtype == torch.bfloat16


def test_what_a_layer_keeps_is_its_own_part():
    """Neither the keys of others nor anything of tokens x tokens."""
    inputs, _, _ = made(4, 2)

    def work(rank: Thread) -> int:
        kept: list[int] = []
        mine = [own(tensor, rank.rank, 4, 2).requires_grad_() for tensor in inputs]
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()), lambda _: None):
            attend(rank, *mine)
        return sum(kept)

    query, key, value = (tensor.numel() // 4 for tensor in inputs)
    assert as_ranks(4, work) == [2 * query + key + value + query // 8] * 4


def test_a_part_has_two_chunks_and_the_labels_of_their_neighbours():
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids + 100, "attention_mask": torch.ones_like(ids)}
    parts = [Context(rank, 3).cut(batch) for rank in range(3)]
    assert [part["positions"].tolist() for part in parts] == [[[0, 1, 10, 11]], [[2, 3, 8, 9]], [[4, 5, 6, 7]]]
    assert parts[0]["input_ids"].tolist() == [[0, 1, 10, 11], [12, 13, 22, 23]]
    assert next_tokens(parts[0]).tolist() == [[101, 102, 111, -100], [113, 114, 123, -100]]
    assert next_tokens(parts[2]).tolist() == [[105, 106, 107, 108], [117, 118, 119, 120]]
    with pytest.raises(ValueError, match="12 tokens are not a multiple of 8"):
        Context(0, 4).cut(batch)


REFUSED = {
    "sees 16 tokens back": {"sliding_window": 16},
    "changes its scores (softcap)": {"softcap": 30.0},
    "changes its scores (s_aux)": {"s_aux": torch.zeros(4)},
    "is given a mask": {"attention_mask": torch.zeros(1)},
    "drops out 0.1": {"dropout": 0.1},
    "sees tokens that come later": {"is_causal": False},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_attention_over_ranks_does_not_do_is_refused(message):
    inputs, _, _ = made(4, 2)
    arguments = {"attention_mask": None, **REFUSED[message]}
    with in_parts(Thread(0, 1, Board(1))), pytest.raises(RequestError) as caught:
        ring_attention(nn.Module(), *inputs, **arguments)
    assert message in str(caught.value)


def test_a_window_as_long_as_the_row_is_none_and_outside_of_parts_rows_are_whole():
    inputs, _, _ = made(2, 2)
    rank = Thread(0, 1, Board(1))
    with in_parts(rank):
        parts, _ = ring_attention(nn.Module(), *inputs, None, sliding_window=24)
    assert rank.calls == 1
    whole, _ = ring_attention(nn.Module(), *inputs, None)
    assert rank.calls == 1
    torch.testing.assert_close(parts, whole)
