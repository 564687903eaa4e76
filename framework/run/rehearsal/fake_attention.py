"""Attention of other packages in a rehearsal: torch's own flash kernel stands for flash-attn's and for flex_attention.

They keep the same for backward (inputs, result, one float32 number a row), and are not needed on the planning machine.
Private names used, checked by tests/run/rehearsal/test_rehearse_precision.py: those of `PreTrainedModel` and
`transformers.modeling_utils` in `stand_in`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, masking_utils, modeling_utils

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
FLEX = "flex_attention"


def stand_in() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of every attribute of transformers to replace."""
    runs: dict[str, Callable[..., Any]] = dict.fromkeys((*FLASH, FLEX), _as_flash)
    no_mask = dict.fromkeys((*FLASH, FLEX), _no_mask)
    yield modeling_utils.ALL_ATTENTION_FUNCTIONS, "_local_mapping", runs
    yield masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping", no_mask
    yield PreTrainedModel, "_flash_attn_import_error", lambda *args, **kwargs: None
    yield modeling_utils, "lazy_import_flash_attention", lambda *args, **kwargs: None
    yield modeling_utils, "is_kernels_available", lambda *args, **kwargs: False


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Rows are padded on the right, so no kernel is given a mask; flex's table of blocks is left out (kilobytes)."""


def _as_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[rows, heads, tokens, width] -> [rows, tokens, heads, width]`, as transformers' attention functions.

    A narrower value is padded, as flash-attn wants it. Flex writes its result in the layout of the query, token by
    token, so transformers' `contiguous` copies nothing (H200, torch 2.11: benchmarks/results/levers_h200.json).
    """
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = functional.pad(value, [0, query.shape[-1] - width])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
    return output.transpose(1, 2)[..., :width], None
