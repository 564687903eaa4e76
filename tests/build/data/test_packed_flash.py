"""flash-attn and flex_attention isolate documents too: with a stand-in of the package that runs on the CPU."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention as flash_integration

from framework.build.data.batches import collate
from framework.build.data.packing import pack
from framework.build.data.rows import join_rows
from framework.build.loading.document_isolation import find_leak
from framework.build.losses.loss import build_loss
from tests.build.data.test_packing import FAMILIES, LIMIT, encoded
from tests.grids import first
from tests.tiny import tiny_assembly, tiny_config

CALLS: list[Any] = []


def flash(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, softmax_scale: float | None, **options: Any
) -> Tensor:
    """`flash_attn_func`: [rows, tokens, heads, width], causal, with an optional window and cap."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    place = torch.arange(query.shape[2])
    seen = place[None, :] <= place[:, None]
    if "window_size" in options:
        seen &= place[:, None] - place[None, :] <= options["window_size"][0]
    scores = scores.masked_fill(~seen, -torch.inf)
    if (sinks := options.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    window_size: Any = None,
    softcap: float | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """`flash_attn_varlen_func`: documents end to end, [tokens, heads, width], none of them seeing another."""
    assert cu_seqlens_q.dtype == torch.int32
    assert isinstance(max_seqlen_q, int)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    CALLS.append(cu_seqlens_q.tolist())
    options = {"window_size": window_size, "softcap": softcap, "s_aux": s_aux}
    given = {name: option for name, option in options.items() if option is not None}
    done = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        parts = (tensor[None, start:end] for tensor in (query, key, value))
        done.append(flash(*parts, causal=causal, softmax_scale=softmax_scale, **given)[0])
    return torch.cat(done)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    prepare = flash_utils._lazy_define_process_function(flash_varlen)
    is_of_two = hasattr(flash_utils, "_process_with_kvcache_kwargs_fn")  # of generation as well; transformers 5.17: one
    functions = ((flash, flash_varlen, None, None, None), (prepare, None) if is_of_two else prepare)
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_integration, "get_target_dtype", lambda query, module: None)  # the real one is half only


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("family", first(8, [name for name in FAMILIES if name != "falcon"]))
def test_flash_attention_gets_the_starts_of_documents(family: str) -> None:
    """Two rows in a batch, where transformers finds no documents by itself (`_is_packed_sequence` takes one row)."""
    config = tiny_config(FAMILIES[family], data={"packing": True})
    assembly = tiny_assembly(config)
    for parameter in assembly.model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    assembly.model.config._attn_implementation = "flash_attention_2"
    assembly.model.eval()
    assert find_leak(assembly.model, torch.device("cpu")) is None
    CALLS.clear()
    loss = build_loss(config.model, assembly.model)
    rows = join_rows(encoded(9, 12, 1, 10, 20, 11))
    packs = pack(rows, LIMIT, seed=7)
    with torch.no_grad():
        batch = collate(list(packs), 0)
        together = loss(assembly.model, batch, lambda phase: None)
        assert [batch["cu_seq_lens"].tolist()] * len(CALLS) == CALLS
        assert CALLS
        alone = [loss(assembly.model, collate([row], 0), lambda phase: None) for row in rows]
    assert float(together) == pytest.approx(float(sum(alone)), rel=1e-4)


@pytest.mark.usefixtures("flash_attn")
def test_without_document_marks_two_packed_rows_would_leak() -> None:
    """The test above can fail: with only `position_ids` transformers runs flash over each row as one document."""
    config = tiny_config(data={"packing": True})
    assembly = tiny_assembly(config)
    assembly.model.config._attn_implementation = "flash_attention_2"
    rows = join_rows(encoded(9, 12, 1, 10, 20, 11))
    batch = collate(list(pack(rows, LIMIT, seed=7)), 0)
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    with torch.no_grad():
        assembly.model(**given, use_cache=False)
    assert CALLS == []
