"""flex_attention of rows of any length: which kernel is asked for; on a card, short rows with shared keys train."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from transformers.integrations.flex_attention import WrappedFlexAttention

from framework.build.assembly import assemble
from framework.build.attention import flex_attention as flex
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.run.step import train_step
from tests.card import own_card
from tests.tiny import LLAMA, tiny_config

SHARED = {**LLAMA, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(("tokens", "options"), [(1, None), (2, {"BACKEND": "TRITON"}), (200, {"BACKEND": "TRITON"})])
def test_the_kernel_for_training_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tokens: int, options: Any
) -> None:
    seen: list[Any] = []
    """The mask is made by plain code, not compiled as on a card."""
    monkeypatch.setattr(flex, "flex_attention_forward", lambda *args, **kwargs: seen.append(kwargs) or (args[1], None))
    made = tiny_config(SHARED, model={"attn_implementation": "flex_attention"})
    assembly = assemble(*settle(made), real_place(torch.device("cpu")), 10)
    with torch.compiler.set_stance("force_eager"):
        assembly.model(input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=False)
    assert [kwargs["kernel_options"] for kwargs in seen] == [options] * LLAMA["num_hidden_layers"]


@pytest.mark.slow
def test_rows_of_any_shape_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit of eight is passed by full batches and single rows; then it warns, and builds all scores."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # "no backward on CPU": none is made
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(WrappedFlexAttention, "_is_flex_compiled", False)
    torch._dynamo.reset()
    made = tiny_config({**SHARED, "num_hidden_layers": 1}, model={"attn_implementation": "flex_attention"})
    with torch._dynamo.config.patch(recompile_limit=8):
        model = assemble(*settle(made), real_place(torch.device("cpu")), 10).model
        for with_gradients, rows, tokens in itertools.product((True, False), (4, 1), (40, 256, 128, 130)):
            model.train(with_gradients)
            with torch.set_grad_enabled(with_gradients):
                model(input_ids=torch.ones(rows, tokens, dtype=torch.int64), use_cache=False)


@pytest.mark.gpu
@own_card()
@pytest.mark.parametrize("lengths", [(40, 100), (129, 33, 128, 500)], ids=str)
def test_short_rows_learn_what_sdpa_does(lengths: tuple[int, ...]) -> None:
    losses = []
    for kernel in ("sdpa", "flex_attention"):
        torch._dynamo.reset()
        made = tiny_config(SHARED, model={"attn_implementation": kernel}, training={"mixed_precision_dtype": "none"})
        config, architecture = settle(made)
        torch.manual_seed(0)
        assembly = assemble(config, architecture, real_place(torch.device("cuda")), 10)
        generator = torch.Generator("cuda").manual_seed(1)
        for step, length in enumerate(lengths, 1):
            ids = torch.randint(0, 64, (2, length), device="cuda", generator=generator)
            losses.append(train_step(assembly, [{"input_ids": ids, "labels": ids.clone()}], step).loss)
    plain, flexible = losses[: len(lengths)], losses[len(lengths) :]
    assert flexible == pytest.approx(plain, rel=1e-3)
