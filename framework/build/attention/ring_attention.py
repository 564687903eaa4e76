"""`attn_implementation: ring_attention`: causal attention over rows split among ranks (see context.py).

Keys and values are exchanged by one all-gather per layer, as for Llama 3 (arXiv 2407.21783, section 3.3.2), not around
a ring: the same bytes in fewer and larger messages. They are gathered again in backward, so a layer keeps only this
rank's own; their gradients are summed over the ranks in float32. A query chunk attends to its own keys causally and to
all earlier ones fully, each in one or two calls of an ordinary kernel; the results are combined by their log-sum-exp
(`kernels.py`). There is no mask.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from framework.build.attention.kernels import Attended, AttentionKernel, Rest, choose_kernel
from framework.errors import Problem, RequestError
from framework.schema.choices import SdpaBackend

NAME = "ring_attention"
_KEY = "model.attn_implementation"
_CHANGES_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "block_indices", "indices")
"""Arguments of transformers' attention functions that change scores, which is not supported."""

_taking_its_place: list[Callable[..., tuple[Tensor, None]]] = []
"""The current mode of attention: over ranks during a step, including its backward pass (in torch's own thread)."""


class Exchange(Protocol):
    """The used part of `framework.build.attention.context.Context`."""

    calls: int

    @property
    def backend(self) -> SdpaBackend | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, part: Tensor) -> Tensor: ...
    def scatter_sum(self, whole: Tensor) -> Tensor: ...


@contextlib.contextmanager
def _attending(attention: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    _taking_its_place.append(attention)
    try:
        yield
    finally:
        _taking_its_place.pop()


def in_parts(context: Exchange) -> contextlib.AbstractContextManager[None]:
    """Within the block `ring_attention` treats its tokens as this rank's part of each row."""
    return _attending(partial(_over_ranks, context))


def attending_to_themselves() -> contextlib.AbstractContextManager[None]:
    """Within the block each token attends only to itself."""
    return _attending(_over_nothing)


def know_ring_attention() -> None:
    """Register the attention function with transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, ring_attention)


def ring_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: `[rows, heads, tokens, width] -> [rows, tokens, heads, width]`.

    Outside of `in_parts` rows are whole, and it is `sdpa`. Raises RequestError for unsupported arguments.
    """
    attention = _taking_its_place[-1] if _taking_its_place else sdpa_attention_forward
    result: tuple[Tensor, None] = attention(module, query, key, value, attention_mask, **kwargs)
    return result


def _over_ranks(
    context: Exchange,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse(module, query.shape[2] * context.size, attention_mask, dropout, kwargs)
    context.calls += 1
    return attend(context, query, key, value, scaling), None


def _over_nothing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def attend(context: Exchange, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks, shaped as above. Heads may share keys."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(kind, enabled=False):
        result: Tensor = _RingAttention.apply(query, key, value, context, scale)  # type: ignore[no-untyped-call]
    return result[..., :width]


def _refuse(module: nn.Module, tokens: int, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    window, kind = kwargs.get("sliding_window"), type(module).__name__
    message = None
    if window is not None and window < tokens:
        message = f"{kind} sees {window} tokens back, and rows are {tokens} long: windows over several devices are not"
    elif any(kwargs.get(name) is not None for name in _CHANGES_SCORES):
        changed = ", ".join(name for name in _CHANGES_SCORES if kwargs.get(name) is not None)
        message = f"{kind} changes its scores ({changed}): that over several devices is not"
    elif mask is not None:
        message = f"{kind} is given a mask: masks over several devices are not"
    elif dropout:
        message = f"{kind} drops out {dropout:g} of its scores: that over several devices is not"
    elif kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        message = f"{kind} sees tokens that come later: that over several devices is not"
    if message is not None:
        raise RequestError([Problem(_KEY, f"{message} available", expected="sdpa, or another model")])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Exchange, scale: float) -> Tensor:
        kernel, length = choose_kernel(query, context.backend), query.shape[2] // 2
        own = _side_by_side(key, value)
        parts = _Parts.gathered(context, own)
        rows, heads, tokens, width = query.shape
        result = query.new_empty((rows, tokens, heads, width))
        logarithms = []
        rest: Rest = ()
        for chunk, queries in enumerate(query.chunk(2, 2)):
            (keys, values), *earlier = parts.seen_by(chunk)
            out, logarithm, rest = kernel.forward(queries, keys, values, True, scale)
            for keys, values in earlier:
                more, of_more, _ = kernel.forward(queries, keys, values, False, scale)
                out, logarithm = _merged(out, logarithm, more, of_more)
            result[:, chunk * length : (chunk + 1) * length] = out.transpose(1, 2)
            logarithms.append(logarithm)
        ctx.save_for_backward(query, own, result, *logarithms, *rest)
        ctx.context, ctx.scale, ctx.kernel = context, scale, kernel
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, own, result, low, high, *rest = ctx.saved_tensors
        kernel: AttentionKernel = ctx.kernel
        width = query.shape[3]
        parts = _Parts.gathered(ctx.context, own)
        sums = parts.zeros()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        by_chunk = zip(
            *(tensor.chunk(2, 2) for tensor in (query, of_query)),
            *(tensor.transpose(1, 2).chunk(2, 2) for tensor in (result, gradient.contiguous())),
            (low, high),
            strict=True,
        )
        for chunk, (queries, of_queries, out, asked, logarithm) in enumerate(by_chunk):
            seen = zip(parts.seen_by(chunk), sums.seen_by(chunk), strict=True)
            for number, ((keys, values), of_seen) in enumerate(seen):
                attended = Attended(asked, queries, keys, values, out, logarithm, tuple(rest))
                found = kernel.backward(attended, number == 0, ctx.scale)
                for total, part in zip((of_queries, *of_seen), found, strict=True):
                    total += part
                del attended, found
        del parts, keys, values
        of_own = sums.scattered().permute(1, 2, 0, 3).to(own.dtype)
        return of_query.to(query.dtype), of_own[..., :width], of_own[..., width:], None, None


class _Parts:
    """Keys and values of whole rows, concatenated to `[tokens, rows, heads, 2 x width]`: tokens first, as gathered.
    `low` has the first chunks of all ranks, in order; `high` their second ones, in reverse order."""

    def __init__(self, context: Exchange, low: Tensor, high: Tensor) -> None:
        self._context, self._low, self._high = context, low, high

    @classmethod
    def gathered(cls, context: Exchange, own: Tensor) -> "_Parts":
        """Gather from each rank's own keys and values."""
        low, high = own.chunk(2)
        return cls(context, context.gather(low), context.gather(high))

    def zeros(self) -> "_Parts":
        """Zeros in float32 for the gradients of `like`."""
        low, high = (torch.zeros_like(part, dtype=torch.float32) for part in (self._low, self._high))
        return _Parts(self._context, low, high)

    def seen_by(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values, `[rows, heads, tokens, width]`, for this rank's first or second chunk of queries: its own
        tokens, then earlier ones in any order."""
        rank, size = self._context.rank, self._context.size
        length = len(self._low) // size
        own = slice(rank * length, (rank + 1) * length)
        if chunk == 0:
            yield _apart(self._low[own])
            if rank:
                yield _apart(self._low[: own.start])
            return
        yield _apart(self._high[own])
        yield _apart(self._low)
        if rank < size - 1:
            yield _apart(self._high[own.stop :])

    def scattered(self) -> Tensor:
        """This rank's tokens of the sums over all ranks, laid out as `own`."""
        return torch.cat([self._context.scatter_sum(part) for part in (self._low, self._high)])


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """`[rows, heads, tokens, width]` twice as `[tokens, rows, heads, 2 x width]`."""
    rows, heads, tokens, width = key.shape
    both = key.new_empty((tokens, rows, heads, 2 * width))
    for part, tensor in zip(both.chunk(2, -1), (key, value), strict=True):
        part.copy_(tensor.permute(2, 0, 1, 3))
    return both


def _apart(both: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = both.permute(1, 2, 0, 3).chunk(2, -1)
    return keys, values


def _merged(out: Tensor, logarithm: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention over two sets of keys, in float32."""
    share = torch.sigmoid(of_more - logarithm).unsqueeze(-1)
    return torch.lerp(out.float(), more.float(), share), torch.logaddexp(logarithm, of_more)
