"""The plan's table of a shard's dtypes matches torch's settings and the built model."""

import pytest
import torch

from framework.build.adapters.adapter import attach_adapter
from framework.build.loading.model import build_model, read_architecture
from framework.build.parallel.fsdp import precision
from framework.build.place import rehearsal_place
from framework.memory.ledger import ShardDtypes
from framework.memory.planning import shard_dtypes
from tests.tiny import LLAMA, tiny_config

CASES = {
    "masters": ({"mixed_precision_dtype": "bf16"}, {}, {}),
    "pure": ({"mixed_precision_dtype": "none"}, {"torch_dtype_str": "bfloat16"}, {}),
    "float32": ({"mixed_precision_dtype": "none"}, {}, {}),
    "adapter": ({"mixed_precision_dtype": "bf16", "use_peft": True}, {"torch_dtype_str": "bfloat16"}, {}),
    "adapter in the base's dtype": (
        {"mixed_precision_dtype": "bf16", "use_peft": True}, {"torch_dtype_str": "bfloat16"}, {"adapter_dtype": "auto"},
    ),
}  # fmt: skip


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("case", CASES)
def test_the_table_is_what_fsdp_gets(case: str) -> None:
    training, model, peft = CASES[case]
    training = {**training, "global_batch_size": 16}
    config = tiny_config(LLAMA, training=training, model=model, peft=peft, fsdp={"enable_fsdp": True}, gpu={"count": 2})
    built, _ = build_model(config, read_architecture(config), place := rehearsal_place("cpu"))
    masters = config.training.mixed_precision_dtype != "none"
    whole = attach_adapter(config.peft, built, place, masters, {}, seed=0).model if config.training.use_peft else built
    policy, found = precision(config), {}
    for kind, is_trained in (("trained", True), ("frozen", False)):
        dtypes = {item.dtype for item in whole.parameters() if item.requires_grad is is_trained}
        if dtypes:
            (stored,) = dtypes
            computed = policy.param_dtype or stored
            ends = (name(policy.reduce_dtype or computed), name(stored)) if is_trained else ()
            found[kind] = ShardDtypes(kind, name(stored), name(computed), *ends)
    assert {row.weights: row for row in shard_dtypes(config)} == found


def test_a_quantized_base_is_bytes_in_the_dtype_that_is_gathered() -> None:
    config = tiny_config(
        LLAMA,
        training={"mixed_precision_dtype": "bf16", "use_peft": True, "global_batch_size": 16},
        model={"torch_dtype_str": "bfloat16"},
        peft={"q_lora": True},
        fsdp={"enable_fsdp": True},
        gpu={"count": 2},
    )
    rows = {row.weights: row for row in shard_dtypes(config)}
    assert rows["frozen, quantized"] == ShardDtypes("frozen, quantized", "4 bits in bfloat16", "bfloat16")
    assert rows["trained"] == ShardDtypes("trained", "float32", "bfloat16", "float32", "float32")


def test_without_shards_there_is_none() -> None:
    assert shard_dtypes(tiny_config(LLAMA)) == ()
