"""Direct access to torch's attention kernels, which return the log-sum-exp needed to combine partial results.

`scaled_dot_product_attention` does not return the log-sum-exp of each query's scores. Given result and log-sum-exp over
all keys, backward gives exact gradients for a subset of the keys.

Private names of torch used here (tests/build/attention/test_kernels.py runs them, on a card too): the
`aten._scaled_dot_product_*` operators and their `_backward`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.errors import Problem, RequestError
from framework.schema.choices import SdpaBackend

aten: Any = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH, WIDEST_CUDNN = 256, 128
LSE_ALIGNMENT = 32
"""The efficient kernel rounds the rows of its logarithms up to this (kAlignLSE in kernel_forward.h)."""

Rest = tuple[Tensor, ...]
"""Further outputs of a kernel that its backward needs, such as the state of dropout."""


Forward = tuple[Tensor, Tensor, Rest]
Gradients = tuple[Tensor, Tensor, Tensor]


class Attended(NamedTuple):
    """Arguments of backward: the gradient of the result, and the inputs and outputs of forward."""

    gradient: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    logarithms: Tensor
    rest: Rest


@dataclass(frozen=True)
class AttentionKernel:
    """Attention of queries `[rows, heads, queries, width]` over keys and values `[rows, key heads, keys, width]`.

    `forward(q, k, v, causal, scale)` returns the result, shaped as the queries, the log-sum-exp, float32 `[rows, heads,
    queries]`, and further outputs for backward. `backward(attended, causal, scale)` gives the gradients of q, k and v.
    With `causal` there are as many keys as queries.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], Forward]
    backward: Callable[[Attended, bool, float], Gradients]


def choose_kernel(query: Tensor, asked: SdpaBackend | None = None) -> AttentionKernel:
    """The kernel for such queries: in half precision cuDNN's from Hopper on and flash before, the efficient one
    for float32 or an old card.

    Raises RequestError if the requested one, or all, do not support them.
    """
    able = list(_able(query))
    kernel = next((item for item in able if asked in (None, item.name)), None)
    if kernel is None:
        key = "model.attn_implementation" if asked is None else "model.sdpa_backend"
        heads = f"heads of {query.shape[-1]} numbers in {str(query.dtype).removeprefix('torch.')}"
        message = f"{asked or 'no kernel'} on {query.device.type} {'can' if asked is None else 'cannot'} take {heads}"
        raise RequestError([Problem(key, message, expected=", ".join(item.name for item in able) or "sdpa")])
    return kernel


def _able(query: Tensor) -> Iterator[AttentionKernel]:
    """Kernels that support such queries, the preferred first."""
    if query.device.type == "cpu":
        yield CPU_FLASH
        return
    width, is_half, capability = query.shape[-1], query.dtype in HALF, torch.cuda.get_device_capability()
    if is_half and width % 8 == 0 and width <= WIDEST_FLASH and capability >= (8, 0):
        takes_cudnn = width <= (WIDEST_FLASH if capability == (9, 0) else WIDEST_CUDNN)
        first, second = (CUDNN, FLASH) if capability >= (9, 0) else (FLASH, CUDNN)
        yield from (item for item in (first, second) if item is FLASH or takes_cudnn)
    if not width % (8 if is_half else 4):
        yield EFFICIENT


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, logarithms = aten._scaled_dot_product_flash_attention_for_cpu(q, *_expanded(q, k, v), 0.0, causal, scale=scale)
    return out, logarithms, ()


def _cpu_backward(of: Attended, causal: bool, scale: float) -> Gradients:
    keys, values = _expanded(of.q, of.k, of.v)
    of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of.gradient, of.q, keys, values, of.out, of.logarithms, 0.0, causal, scale=scale
    )
    return of_q, *_summed(of.k, of_k, of_v)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, logarithms, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, logarithms, (seed, offset)


def _flash_backward(of: Attended, causal: bool, scale: float) -> Gradients:
    starts = (None, None, of.q.shape[2], of.k.shape[2])  # there are no separate documents
    result: Gradients = aten._scaled_dot_product_flash_attention_backward(
        *of[:-1], *starts, 0.0, causal, *of.rest, scale=scale
    )
    return result


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, logarithms, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, logarithms.reshape(q.shape[:3]), (seed, offset)  # originally `[rows, heads, queries, 1]`


def _cudnn_backward(of: Attended, causal: bool, scale: float) -> Gradients:
    starts = (None, None, of.q.shape[2], of.k.shape[2])
    result: Gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *of[:5], of.logarithms.unsqueeze(-1), *of.rest, None, *starts, 0.0, causal, scale=scale
    )
    return result


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, logarithms, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, *_expanded(q, k, v), None, True, 0.0, causal, scale=scale
    )
    return out, logarithms[..., : q.shape[2]], (seed, offset)


def _efficient_backward(of: Attended, causal: bool, scale: float) -> Gradients:
    keys, values = _expanded(of.q, of.k, of.v)
    aligned = F.pad(of.logarithms, (0, -of.logarithms.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
    given, wanted = (of.gradient, of.q, keys, values, None, of.out, aligned), [True, True, True, False]
    of_q, of_k, of_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        *given, *of.rest, 0.0, wanted, causal, scale=scale
    )
    return of_q, *_summed(of.k, of_k, of_v)


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """Keys and values repeated for each query head, for kernels without grouped queries."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _summed(k: Tensor, *gradients: Tensor) -> Sequence[Tensor]:
    """Gradients summed over the query heads of each group."""
    rows, heads, keys, width = k.shape
    if gradients[0].shape[1] == heads:
        return gradients
    return [gradient.reshape(rows, heads, -1, keys, width).sum(2) for gradient in gradients]


CPU_FLASH = AttentionKernel("flash", _cpu_forward, _cpu_backward)
FLASH = AttentionKernel("flash", _flash_forward, _flash_backward)
CUDNN = AttentionKernel("cudnn", _cudnn_forward, _cudnn_backward)
EFFICIENT = AttentionKernel("efficient", _efficient_forward, _efficient_backward)
