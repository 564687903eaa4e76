"""torch's attention kernels by their own names, which return what two results are put together with.

That is the logarithm of the sum of exponentials of each query's scores, which `scaled_dot_product_attention` keeps to
itself. Backward takes the result and that number of all keys, and so gives exact gradients for some of the keys.

Private names of torch used here (tests/build/test_ring_attention.py runs them, on a card test_ring_attention_gpu.py):
the `aten._scaled_dot_product_*` operators and their `_backward`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.errors import Problem, RequestError

aten: Any = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST_FLASH = 256
LSE_ALIGNMENT = 32
"""The efficient kernel rounds the rows of its logarithms up to this (kAlignLSE in kernel_forward.h)."""

Rest = tuple[Tensor, ...]
"""What a kernel wants back in backward although it drops out nothing."""


@dataclass(frozen=True)
class AttentionKernel:
    """Attention of queries `[rows, heads, queries, width]` over keys and values `[rows, key heads, keys, width]`.

    `forward(q, k, v, causal, scale)` gives the result, shaped as the queries, the logarithms, float32 `[rows, heads,
    queries]`, and what backward wants. `backward(gradient, q, k, v, out, logarithms, rest, causal, scale)` gives the
    gradients of q, k and v. With `causal` there are as many keys as queries.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor, Rest]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def choose_kernel(query: Tensor) -> AttentionKernel:
    """The kernel for queries like these: flash in half precision, the efficient one for float32 or an old card.

    Raises RequestError for a width that no kernel takes.
    """
    if query.device.type == "cpu":
        return CPU_FLASH
    width, is_half = query.shape[-1], query.dtype in HALF
    if is_half and width % 8 == 0 and width <= WIDEST_FLASH and torch.cuda.get_device_capability() >= (8, 0):
        return FLASH
    if width % (8 if is_half else 4):
        message = f"no kernel takes heads of {width} numbers in parts of a row"
        raise RequestError([Problem("model.attn_implementation", message, expected="sdpa")])
    return EFFICIENT


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Rest]:
    out, logarithms = aten._scaled_dot_product_flash_attention_for_cpu(q, *_expanded(q, k, v), 0.0, causal, scale=scale)
    return out, logarithms, ()


def _cpu_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    rest: Rest,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _expanded(q, k, v)
    of_q, of_k, of_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, keys, values, out, logarithms, 0.0, causal, scale=scale
    )
    return of_q, *_summed(k, of_k, of_v)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Rest]:
    out, logarithms, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, logarithms, (seed, offset)


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    rest: Rest,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    starts = (None, None, q.shape[2], k.shape[2])  # of documents: there are none
    result: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, logarithms, *starts, 0.0, causal, *rest, scale=scale
    )
    return result


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Rest]:
    out, logarithms, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, *_expanded(q, k, v), None, True, 0.0, causal, scale=scale
    )
    return out, logarithms[..., : q.shape[2]], (seed, offset)


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logarithms: Tensor,
    rest: Rest,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _expanded(q, k, v)
    aligned = F.pad(logarithms, (0, -logarithms.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
    of_q, of_k, of_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, keys, values, None, out, aligned, *rest, 0.0, [True, True, True, False], causal, scale=scale
    )
    return of_q, *_summed(k, of_k, of_v)


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """A key and a value head for each query head, for kernels that know no groups."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _summed(k: Tensor, *gradients: Tensor) -> Sequence[Tensor]:
    """The gradients of the heads that a group shares, added up."""
    rows, heads, keys, width = k.shape
    if gradients[0].shape[1] == heads:
        return gradients
    return [gradient.reshape(rows, heads, -1, keys, width).sum(2) for gradient in gradients]


CPU_FLASH = AttentionKernel("flash", _cpu_forward, _cpu_backward)
FLASH = AttentionKernel("flash", _flash_forward, _flash_backward)
EFFICIENT = AttentionKernel("efficient", _efficient_forward, _efficient_backward)
