"""flex_attention is read back from a forward pass without compiled code. Training with it needs a card."""

import pytest
import torch
from torch.nn.attention import flex_attention

from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import verify
from tests.tiny import LLAMA, tiny_config


@pytest.mark.slow
def test_flex_attention_is_seen_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # "no backward on CPU": none is made
    config = tiny_config(LLAMA, model={"attn_implementation": "flex_attention", "model_max_length": 64})
    config, architecture = settle(config)
    made = assemble(config, architecture, real_place(torch.device("cpu")), 10)
    (reading,) = (reading for reading in verify(made) if reading.key == "model.attn_implementation")
    assert reading.found == reading.asked == "flex_attention"
