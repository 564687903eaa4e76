"""The short cut for pointwise operators gives what torch's own meta kernels give."""

import pytest
import torch

from framework.run.rehearsal.operations import plain_result, updates_list

aten = torch.ops.aten
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


HEADS = empty(2, 16, 4, 8).transpose(1, 2)
CASES = [
    (aten.mul.Tensor, (HEADS, empty(1, 1, 16, 8))),
    (aten.mul.Tensor, (HEADS, HEADS)),
    (aten.mul.Tensor, (empty(32), empty(2, 16, 32))),
    (aten.add.Tensor, (empty(2, 16, 32), empty(2, 16, 1))),
    (aten.add.Tensor, (HEADS, empty(2, 4, 16, 8))),
    (aten.neg.default, (HEADS[..., 4:],)),
    (aten.pow.Tensor_Scalar, (empty(2, 16, dtype=torch.float32), 2)),
    (aten.mul.Scalar, (empty(2, 16, dtype=torch.float32), 2.0)),
    (aten.div.Tensor, (empty(3, 4, 5), empty(3, 1, 5))),
    (aten.div.Scalar, (empty(2, 16, 1).expand(2, 16, 8), 8)),
    (aten.div.Scalar, (empty(16).expand(2, 16), 8)),
    (aten.mean.dim, (empty(2, 16, 8), [-1], True)),
    (aten.mean.dim, (empty(2, 16, 8), [1])),
    (aten.sum.dim_IntList, (empty(2, 16, 8), [0, 1], True)),
    (aten.sum.dim_IntList, (empty(2, 16, 8, dtype=torch.float32), [0, -1])),
    (aten.zeros_like.default, (HEADS,)),
    (aten.zeros_like.default, (empty(2, 3, dtype=torch.int64),)),
    (aten.mul.Tensor, (HEADS, empty(1, 1, 16, 8, dtype=torch.float32))),
    (aten.mul.Tensor, (empty(2, 3, dtype=torch.float32), empty(2, 3))),
    (aten.add.Tensor, (empty(2, 3), empty(2, 3, dtype=torch.float32))),
    (aten.sub.Tensor, (empty(4, 2, dtype=torch.float32).T, empty(4, dtype=torch.float64))),
    (aten.mm.default, (empty(2, 5), empty(3, 5).T)),
    (aten.addmm.default, (empty(3), empty(2, 5), empty(3, 5).T)),
    (aten.addmm.default, (empty(2, 3), empty(2, 5), empty(5, 3))),
    (aten.cat.default, ([HEADS[..., 4:], HEADS[..., :4]], -1)),
    (aten.cat.default, ([empty(2, 3), empty(4, 3)],)),
    (aten.cat.default, ([empty(2, 3, 4).transpose(1, 2), empty(2, 3, 4).transpose(1, 2)], 2)),
    (aten.slice_backward.default, (HEADS[..., 4:], [2, 4, 16, 8], 3, 4, 8, 1)),
]


@pytest.mark.parametrize(("function", "args"), CASES)
def test_same_shape_strides_and_dtype(function: object, args: tuple[torch.Tensor, ...]) -> None:
    expected, found = function(*args), plain_result(function, args, {})  # type: ignore[operator]
    assert found is not None
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.mul.Tensor, (empty(3), empty(2, 3, dtype=torch.float32))),
        (aten.mul.Tensor, (empty(2, 3), empty(dtype=torch.float32))),
        (aten.cat.default, ([empty(2, 3, 4, 5).to(memory_format=torch.channels_last)] * 2,)),
        (aten.cat.default, ([empty(2, 3), empty(2, 3, dtype=torch.float32)],)),
        (aten.cat.default, ([empty(0), empty(2, 3)],)),
        (aten.mul.Tensor, (empty(2, 1), empty(1, 3))),
        (aten.mul.Tensor, (empty(1, 3).expand(2, 3), empty(3))),
        (aten.div.Tensor, (empty(3, 1, 5), empty(3, 4, 5))),
        (aten.add.Tensor, (torch.empty(2), torch.empty(2))),
        (aten.add.Tensor, (empty(2, dtype=torch.int64), empty(2, dtype=torch.int64))),
        (aten.mm.default, (empty(2, 2), empty(2, 2, dtype=torch.float32))),
        (aten.bmm.default, (empty(2, 2, 2), empty(2, 2, 2))),
        (aten.sum.dim_IntList, (HEADS, [0])),
        (aten.sum.dim_IntList, (empty(2, 3, dtype=torch.int64), [0])),
        (aten.mean.dim, (empty(2, 3), None)),
        (aten.neg.default, (empty(2, 1, 1).expand(2, 1, 8),)),
        (aten.neg.default, (empty(4, 2).T[..., None].expand(2, 4, 3),)),
    ],
)
def test_anything_else_is_left_to_torch(function: object, args: tuple[torch.Tensor, ...]) -> None:
    assert plain_result(function, args, {}) is None


def test_lists_are_updated_in_place_and_give_lists() -> None:
    weights, states = [empty(3, 4), empty(5)], [empty(3, 4), empty(5)]
    assert updates_list(aten._foreach_lerp_.Scalar, (weights, states, 0.1))
    assert updates_list(aten._foreach_addcdiv_.ScalarList, (weights, states, states, [1.0, 2.0]))
    assert not updates_list(aten._foreach_add_.Scalar, ([torch.zeros(2)], 1)), "the step counts have values"
    assert not updates_list(aten._foreach_sqrt.default, (weights,))
    found, expected = plain_result(aten._foreach_sqrt.default, (weights,), {}), torch._foreach_sqrt(weights)
    assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in expected]
