"""Compiled blocks of sharded weights train as plain blocks do, from one graph that never breaks.

Graphs are captured and partitioned as usual and run operator by operator, as a C++ compiler takes a minute.
"""

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from framework.build.levers import compiled
from framework.build.levers.compiled import compiled_regions
from framework.build.ranks import Ranks
from framework.build.verify import verify
from framework.errors import RequestError
from framework.run.rehearsal.rehearse import rehearse
from tests.sharded import STEPS, on_two, settings, sharded, trained
from tests.tiny import LLAMA, tiny_config

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "checkpointed": {
        "training": {"enable_gradient_checkpointing": True},
        "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"},
    },
    "adapter in bf16": {"training": {"mixed_precision_dtype": "bf16", "use_peft": True}},
}

PACKED: dict[str, Any] = {
    "training": {"mixed_precision_dtype": "bf16", "use_peft": True},
    "peft": {"q_lora": True, "use_bnb_nested_quant": True},
}
if find_spec("bitsandbytes"):
    CASES["adapter on 4 bits in bf16"] = PACKED


def look(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Losses of compiled and of plain blocks, and what the compiled ones ran."""
    compiled.lower = aot_eager
    found: dict[str, Any] = {}
    for name, sections in CASES.items():
        plain = trained(sharded(settings(2, LLAMA, **deepcopy(sections)), ranks))
        torch._dynamo.reset()
        own = {**deepcopy(sections), "training": {**sections.get("training", {}), "compile": True}}
        assembly = sharded(settings(2, LLAMA, **own), ranks)
        verify(assembly)
        losses = trained(assembly)
        regions = compiled_regions(assembly.model)
        calls = [(region.calls, region.compiled_calls) for region in regions]
        found[name] = {"plain": plain, "compiled": losses, "calls": calls, "graphs": regions[0].compiler.graphs}
    return found


@pytest.mark.slow
def test_compiled_blocks_of_two_ranks_learn_what_plain_ones_do(tmp_path: Path) -> None:
    for found in on_two(look, tmp_path):
        for name in CASES:
            row = found[name]
            for mine, plain in zip(row["compiled"], row["plain"], strict=True):
                assert mine == pytest.approx(plain, rel=1e-3 if "bf16" in name else 1e-5), name
            assert row["calls"] == [[2 * STEPS, 2 * STEPS]] * 2, name
            # before a frozen base nothing needs gradients
            assert row["graphs"] == (2 if "adapter" in name else 1), name


def test_a_plan_of_compiled_shards_keeps_less() -> None:
    """The partition of a block keeps less than its plain code; split tensors are the same."""
    card = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "count": 2}
    shape = {**LLAMA, "hidden_size": 256, "intermediate_size": 512}
    sections: dict[str, Any] = {"model": {"model_max_length": 64}, "gpu": card, "fsdp": {"enable_fsdp": True}}
    plain, less = (
        rehearse(tiny_config(shape, training={"compile": compiles, "global_batch_size": 16}, **sections))
        for compiles in (False, True)
    )
    assert less.step_peak.terms.weights == plain.step_peak.terms.weights
    assert less.step_peak.terms.activations < 0.9 * plain.step_peak.terms.activations
    assert not any("could not be captured" in assumption for assumption in less.assumptions)


@pytest.mark.slow
def test_a_plan_captures_blocks_of_packed_shards() -> None:
    pytest.importorskip("bitsandbytes")
    card = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "count": 2}
    training = {**PACKED["training"], "compile": True, "global_batch_size": 16}
    made = rehearse(tiny_config(LLAMA, training=training, peft=PACKED["peft"], gpu=card, fsdp={"enable_fsdp": True}))
    assert any("tensors that torch's partitioner saves" in assumption for assumption in made.assumptions)


def test_units_inside_of_a_graph_are_refused() -> None:
    card = {"name": "h100_80gb", "capability": "9.0", "multiprocessors": 132, "count": 2}
    named = {"enable_fsdp": True, "transformer_layer_cls": "LlamaMLP"}
    sizes = {"compile": True, "global_batch_size": 16}
    with pytest.raises(RequestError, match=r"one graph of each LlamaDecoderLayer, which contains LlamaMLP"):
        rehearse(tiny_config(LLAMA, training=sizes, model={"model_max_length": 64}, gpu=card, fsdp=named))
