"""`attn_implementation: flex_attention` for rows of any length.

Of rows shorter than 128 tokens torch makes its kernel for decoding, which cannot be made where tokens x queries that
share a key exceed 128: compiling ends with "No choices exist for backend" (H200, torch 2.11, 65 tokens with two
queries a key; the condition is in 2.13 too). The kernel for training takes them, so it is asked for by name.

transformers compiles it once for all shapes, and torch compiles again for each kind of shape: below 128 tokens, a
multiple of it, with gradients, each number of rows at first. After eight it would give up with a line in its log, and
compute all tokens x all tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flex_attention"
KINDS_OF_SHAPES = 128
"""Graphs of one function. Rows of eight lengths in four numbers, with gradients and without, made 64 for Gemma 2."""


def know_flex_attention() -> None:
    """Let models be built with it in place of transformers' own, and rows of any shape stay compiled."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, flex_attention)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS_OF_SHAPES)


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """One of transformers' attention functions: `[rows, heads, tokens, width] -> [rows, tokens, heads, width]`.

    A single token is decoded, by the kernel that is faster for it.
    """
    options = {"BACKEND": "TRITON"} if query.shape[2] > 1 else None
    result: tuple[Tensor, Tensor | None] = flex_attention_forward(
        module, query, key, value, attention_mask, kernel_options=options, **kwargs
    )
    return result
