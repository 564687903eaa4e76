"""The attention kernel that a card takes, by the constraints of sdp_utils.cpp."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from framework.memory.attention import Attention, Backend, backward_workspace, choose_backend
from framework.schema.gpu import GPUParams

PROBED = json.loads((Path(__file__).parents[1] / "calibration" / "h100_kernels.json").read_text())
CALL = Attention(
    batch=2,
    heads=8,
    kv_heads=8,
    queries=128,
    keys=128,
    head_dim=64,
    value_dim=64,
    half_precision=True,
    bfloat16=True,
    masked=False,
    causal=True,
    dropout=0.0,
    requires_grad=True,
)


def card(capability: str | None, name: str = "card") -> GPUParams:
    return GPUParams(name=name, capability=capability)


@pytest.mark.parametrize(
    ("capability", "change", "backend"),
    [
        ("9.0", {}, Backend.CUDNN),
        ("9.0", {"masked": True}, Backend.CUDNN),
        ("9.0", {"kv_heads": 2}, Backend.CUDNN),
        ("9.0", {"kv_heads": 1, "broadcast": True}, Backend.MATH),
        ("8.0", {"kv_heads": 1, "broadcast": True}, Backend.MATH),
        ("9.0", {"head_dim": 256, "value_dim": 256}, Backend.CUDNN),
        ("10.0", {"head_dim": 256, "value_dim": 256}, Backend.FLASH),
        ("9.0", {"half_precision": False, "bfloat16": False}, Backend.EFFICIENT),
        ("8.0", {}, Backend.FLASH),
        ("8.0", {"masked": True}, Backend.EFFICIENT),
        ("8.0", {"masked": True, "head_dim": 60, "value_dim": 60}, Backend.MATH),
        ("8.9", {"head_dim": 256, "value_dim": 256}, Backend.FLASH),
        ("8.9", {"head_dim": 208, "value_dim": 208}, Backend.EFFICIENT),
        ("8.9", {"head_dim": 256, "value_dim": 256, "dropout": 0.1}, Backend.EFFICIENT),
        ("12.0", {}, Backend.FLASH),
        ("7.5", {}, Backend.MATH),
        ("7.5", {"bfloat16": False}, Backend.EFFICIENT),
    ],
)
def test_choice(capability: str, change: dict[str, object], backend: Backend) -> None:
    assert choose_backend(card(capability), replace(CALL, **change)) is backend


def test_without_cuda() -> None:
    assert choose_backend(card(None, "cpu"), CALL) is Backend.CPU_FLASH
    assert choose_backend(card(None, "cpu"), replace(CALL, dropout=0.1)) is Backend.MATH
    assert choose_backend(card(None, "mi300x_192gb"), CALL) is Backend.FLASH


def test_grouped_queries_need_expanded_gradients() -> None:
    grouped = replace(CALL, kv_heads=2)
    expanded = 2 * 2 * 8 * 128 * 64
    assert backward_workspace(Backend.FLASH, grouped) == [*backward_workspace(Backend.FLASH, CALL), expanded, expanded]
    (plain,), (more,) = (backward_workspace(Backend.CUDNN, call) for call in (CALL, grouped))
    assert more - plain == 2 * expanded


@pytest.mark.parametrize(
    ("kernel", "batch", "heads", "kv_heads", "tokens", "width", "measured"), PROBED["attention_backward"]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_backward_workspaces_are_as_measured(
    kernel: str, batch: int, heads: int, kv_heads: int, tokens: int, width: int, measured: int, dropout: float
) -> None:
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "queries": tokens, "keys": tokens}
    call = replace(CALL, **shape, head_dim=width, value_dim=width, dropout=dropout)
    assert sum(backward_workspace(Backend(kernel), call)) == measured


def test_float32_over_grouped_queries_has_no_kernel_of_its_own() -> None:
    call = replace(CALL, half_precision=False, bfloat16=False)
    assert choose_backend(card("9.0"), call) is Backend.EFFICIENT
    assert choose_backend(card("9.0"), replace(call, kv_heads=2)) is Backend.MATH


@pytest.mark.parametrize(
    ("capability", "change", "only", "backend"),
    [
        ("9.0", {}, Backend.FLASH, Backend.FLASH),
        ("9.0", {}, Backend.MATH, Backend.MATH),
        ("9.0", {"kv_heads": 2}, Backend.EFFICIENT, None),
        ("8.0", {}, Backend.CUDNN, Backend.CUDNN),
        ("7.5", {}, Backend.CUDNN, None),
        ("8.0", {"masked": True}, Backend.FLASH, None),
    ],
)
def test_a_chosen_kernel_is_taken_or_none_is(
    capability: str, change: dict[str, object], only: Backend, backend: Backend | None
) -> None:
    assert choose_backend(card(capability), replace(CALL, **change), {only}) is backend


def test_cudnn_comes_after_math_where_torch_does_not_prefer_it() -> None:
    call = replace(CALL, masked=True, kv_heads=1)
    assert choose_backend(card("8.0"), call) is Backend.MATH
    assert choose_backend(card("9.0"), call) is Backend.CUDNN
