"""Two processes, each with half of the weights, learn what one process learns; all in one start of the two."""

import itertools
import logging
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from framework.build.loading.model import build_model, read_architecture
from framework.build.loading.sharded import ShardLoader, is_sent
from framework.build.place import real_place
from framework.build.ranks import Ranks, local_part
from framework.build.verify import verify
from framework.errors import RequestError
from framework.run.step import eval_step
from framework.schema.config import TrainingConfig
from tests.grids import chosen, to_make
from tests.sharded import on_two, settings, sharded, trained, weights
from tests.tiny import LLAMA, tiny_assembly, unequal_rows

TIED = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 130}
EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CHECKPOINTED = {"enable_gradient_checkpointing": True}
ADAPTED: dict[str, Any] = {"training": {"use_peft": True}, "peft": {"lora_target_modules": ["q_proj", "v_proj"]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "zero2": ("llama", {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "hybrid": ("llama", {"fsdp": {"sharding_strategy": "HYBRID_SHARD"}}),
    "early": ("llama", {"fsdp": {"forward_prefetch": True}, "training": CHECKPOINTED}),
    "post": ("llama", {"fsdp": {"backward_prefetch": "BACKWARD_POST"}, "training": CHECKPOINTED}),
    "in chunks": ("llama", {"model": {"chunked_loss": 16}}),
    "tied, in chunks": ("tied", {"model": {"chunked_loss": 16}}),
    "renamed": ("experts", {}),
    "dora": ("llama", {**ADAPTED, "peft": {**ADAPTED["peft"], "peft_method": "dora"}}),
    "half": ("llama", {"training": {"mixed_precision_dtype": "bf16", "learning_rate": 1e-3}}),
    "muon": ("llama", {"training": {"optimizer": "muon"}}),
}
MODELS = {"llama": LLAMA, "tied": TIED, "experts": EXPERTS}
QUICK = ("full", "zero2", "hybrid", "early", "tied, in chunks")


def case(name: str, world: int, folder: Path) -> TrainingConfig:
    kind, sections = CASES[name]
    model = {"model_name": str(folder / kind), "load_pretrained_weights": True, **sections.get("model", {})}
    return settings(world, MODELS[kind], **{**sections, "model": model})


def look(cases: Sequence[str], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"complaints": []}
    torchs = logging.Handler()
    torchs.emit = lambda record: found["complaints"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.fsdp.fully_shard").addHandler(torchs)
    for name in cases:
        own = Ranks(ranks.rank, ranks.world, 0, 1) if name == "hybrid" else ranks
        assembly = sharded(case(name, 2, folder), own)
        assert assembly.sharding is not None
        whole_size = sum(parameter.numel() for parameter in assembly.model.parameters())
        held = sum(local_part(parameter).numel() for parameter in assembly.model.parameters())
        readings = {reading.key: reading.found for reading in verify(assembly) if reading.key.startswith("fsdp.")}
        if "in chunks" in name:  # a pass without backward leaves nothing behind
            eval_step(assembly, unequal_rows())
            assembly.sharding.free_gathered()
        losses, norms = trained(assembly)
        if ranks.is_main:
            found[name] = {"losses": losses, "norms": norms, "held": held / whole_size, "read": readings}
            found[name]["units"] = [type(unit).__name__ for unit in assembly.sharding.units]
        after = weights(assembly)
        if ranks.is_main:
            save_file(after, folder / f"{name}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        whole_ones: list[weakref.ref[Any]] = []
        fill = ShardLoader.fill

        def count(shard_loader: ShardLoader, unit: torch.nn.Module) -> None:
            found["before a unit"] = max(found.get("before a unit", 0), sum(ref() is not None for ref in whole_ones))
            fill(shard_loader, unit)
            whole_ones.extend(weakref.ref(item) for item in unit.parameters() if not hasattr(item, "device_mesh"))
            found["filled"] = len(whole_ones)

        patch.setattr(ShardLoader, "fill", count)
        drawn = sharded(settings(2, LLAMA), ranks)
    save_file(weights(drawn), folder / f"drawn-{ranks.rank}.safetensors")
    try:
        sharded(settings(2, LLAMA, fsdp={"transformer_layer_cls": "LlamaDecodeLayer"}), ranks)
    except RequestError as error:
        found["refused"] = [problem.to_json() for problem in error.problems]
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    for name, architecture in MODELS.items():
        config = settings(1, architecture)
        torch.manual_seed(1)
        model, _ = build_model(config, read_architecture(config), real_place(torch.device("cpu")))
        model.save_pretrained(folder / name)
    return folder, on_two(partial(look, to_make(request, QUICK, CASES)), folder)[0]


def test_a_cut_file_of_weights_is_named(tmp_path):
    config = case("full", 2, tmp_path)
    torch.manual_seed(1)
    model, _ = build_model(settings(1, LLAMA), read_architecture(settings(1, LLAMA)), real_place(torch.device("cpu")))
    model.save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RequestError, match=r"model\.safetensors cannot be read: Error while deserializing header"):
        is_sent(config, model)


@pytest.mark.parametrize("name", chosen(QUICK, CASES))
def test_two_halves_learn_what_one_whole_does(name, found):
    folder, here = found
    alone = tiny_assembly(case(name, 1, folder))
    losses, norms = trained(alone)
    tolerance = {"half": 2e-3, "muon": 1e-4}.get(name, 1e-5)
    assert here[name]["losses"] == pytest.approx(losses, rel=tolerance)
    assert here[name]["norms"] == pytest.approx(norms, rel=0.03 if name == "half" else 1e-3)
    if name in ("half", "muon"):
        return
    stored = load_file(folder / f"{name}.safetensors")
    for key, parameter in alone.model.named_parameters():
        torch.testing.assert_close(stored[key], parameter.detach(), rtol=1e-3, atol=1e-5)


def test_each_rank_holds_half_and_it_is_read_back(found):
    _, here = found
    assert here["full"]["held"] == pytest.approx(0.5, abs=0.01)
    assert here["hybrid"]["held"] == 1
    assert here["full"]["read"]["fsdp.enable_fsdp"] == "1/2 of the weights"
    assert here["full"]["read"]["fsdp.transformer_layer_cls"] == "2 LlamaDecoderLayer and the rest"
    assert here["early"]["read"]["fsdp.forward_prefetch"] == "1 block"
    assert here["zero2"]["read"]["fsdp.sharding_strategy"] == "SHARD_GRAD_OP"


def test_the_ends_are_units_of_their_own_where_they_share_no_weight(found):
    blocks = ["FSDPLlamaDecoderLayer"] * 2
    root = found[1]["full"]["units"][-1]
    assert found[1]["full"]["units"] == [*blocks, "FSDPEmbedding", "FSDPLlamaRMSNorm", root]
    assert found[1]["tied, in chunks"]["units"] == [*blocks, root]


def test_a_loss_in_chunks_is_no_forward_that_torch_waits_for(found):
    assert found[1]["complaints"] == []


def test_random_weights_are_the_same_on_every_rank_and_as_wide_as_ever(found):
    folder, _ = found
    first, second = (load_file(folder / f"drawn-{rank}.safetensors") for rank in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        if tensor.dim() == 2:
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.2)
        else:
            assert torch.equal(tensor, torch.ones_like(tensor))
    matrices = [tensor for tensor in first.values() if tensor.shape == (32, 32)]
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(matrices))


def test_whole_tensors_of_a_unit_are_gone_before_the_next_is_filled(found):
    assert found[1]["filled"] == 2 * 9 + 3
    assert found[1]["before a unit"] == 1  # the last norm, which is of the head's unit


def test_a_block_that_is_not_there_is_named_with_those_that_are(found):
    _, here = found
    (problem,) = here["refused"]
    assert problem["key"] == "fsdp.transformer_layer_cls"
    assert "LlamaDecoderLayer" in (problem["expected"], problem["nearest"])


def test_what_is_split_loads_elsewhere(found):
    """The names of a sharded model's parameters are those of the model."""
    folder, _ = found
    plain = AutoModelForCausalLM.from_pretrained(folder / "llama")
    assert set(load_file(folder / "full.safetensors")) == {name for name, _ in plain.named_parameters()}
