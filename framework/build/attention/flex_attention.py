"""`attn_implementation: flex_attention` for rows of any length.

For rows shorter than 128 tokens torch selects its decoding kernel, which fails to compile if tokens x queries per key
exceed 128: "No choices exist for backend" (H200, torch 2.11, 65 tokens with two queries a key; the condition is in 2.13
too). The training kernel supports them, so it is selected by name.

transformers compiles it once for all shapes, and torch compiles again for each kind of shape: below 128 tokens,
multiples of it, with gradients, each number of rows at first. After eight it would stop with a line in its log, and
compute all tokens x all tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "flex_attention"
KINDS_OF_SHAPES = 128
"""Limit of compiled graphs per function. Eight row lengths and four numbers of rows, with and without gradients, made
64 for Gemma 2."""


def know_flex_attention() -> None:
    """Register it in place of transformers' own, and raise the limit of compiled shapes."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, flex_attention)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS_OF_SHAPES)


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function for transformers: `[rows, heads, tokens, width] -> [rows, tokens, heads, width]`.

    A single token uses the decoding kernel, which is faster for it.
    """
    options = {"BACKEND": "TRITON"} if query.shape[2] > 1 else None
    result: tuple[Tensor, Tensor | None] = flex_attention_forward(
        module, query, key, value, attention_mask, kernel_options=options, **kwargs
    )
    return result
