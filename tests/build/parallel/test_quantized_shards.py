"""A base in 4 bits, split over two processes, is trained on on as on one; all in one start of the two."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.build.adapters.quantize import is_quantized_weight, scale_tensors
from framework.build.loading.model import build_model, read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks, local_part
from framework.build.verify import verify, verify_unmoved
from framework.build.verify.frozen_models import take_fingerprints
from framework.errors import RequestError
from framework.run.checkpoints.checkpoint import load_checkpoint
from framework.run.checkpoints.sharded_export import export_sharded
from framework.run.rehearsal.rehearse import record, rehearse
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.grids import chosen, slow, to_make
from tests.run.ranks.test_sharded import saved, tokenizer
from tests.sharded import STEPS, on_two, settings, sharded, trained, weights
from tests.tiny import GPT2, LLAMA, pairs, split_pairs, tiny_assembly

pytest.importorskip("bitsandbytes")
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 128}
EXPERTS = {**WIDE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": WIDE, "gpt2": GPT2, "experts": EXPERTS}
NESTED = {"use_bnb_nested_quant": True}
PURE = {"model": {"torch_dtype_str": "bfloat16"}}
MIXED = {"training": {"mixed_precision_dtype": "bf16"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "nested, zero2": ("llama", {"peft": NESTED, "fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "hybrid, fp4": (
        "llama",
        {
            "peft": {"bnb_4bit_quant_type": "fp4"},
            "fsdp": {"sharding_strategy": "HYBRID_SHARD"},
            "training": {"enable_gradient_checkpointing": True},
        },
    ),
    "transposed": ("gpt2", {}),
    "sent by the first": ("experts", {}),
    "loftq": ("llama", {"peft": {"peft_method": "loftq", **NESTED}}),
    "pure": ("llama", PURE),
    "mixed": ("llama", {**MIXED, "peft": NESTED}),
}
QUICK = ("full", "pure", "mixed")
EXACT = [name for name in CASES if name not in ("pure", "mixed")]


def case(name: str, world: int, folder: Path, **changes: Any) -> TrainingConfig:
    kind, sections = CASES[name]
    loaded = {"model_name": str(folder / kind), "load_pretrained_weights": True}
    return settings(
        world,
        MODELS[kind],
        model={"torch_dtype_str": "float32", **loaded, **sections.get("model", {}), **changes.pop("model", {})},
        training={
            "use_peft": True,
            "mixed_precision_dtype": "none",
            "task": changes.pop("task", "sft"),
            **sections.get("training", {}),
        },
        peft={"lora_target_modules": ["all-linear"], "q_lora": True, **sections.get("peft", {}), **changes},
        fsdp=sections.get("fsdp", {}),
    )


def learnt(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "lora_" in name}


def copy_as_cuda_does(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Its kernel for many tensors at once takes each number through float32, and of NaNs there is one."""
    for target, source in zip(targets, sources, strict=True):
        is_nan = source.isnan() if source.is_floating_point() else None
        target.copy_(source if is_nan is None else torch.where(is_nan, torch.nan, source))


def gathered_bytes(assembly: Any) -> dict[str, torch.Tensor]:
    """Packed weights as the units give them to their layers."""
    for unit in assembly.sharding.units:
        unit.unshard()
    packed = [(name, layer) for name, layer in assembly.model.named_modules() if hasattr(layer, "packing")]
    found = {f"{name}.weight": layer.weight.detach().view(torch.uint8).clone() for name, layer in packed}
    assembly.sharding.free_gathered()
    return found


def look(cases: Sequence[str], trained_ones: Sequence[str], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    assemblies: dict[str, Any] = {}
    torch._foreach_copy_ = copy_as_cuda_does
    for name in cases:
        own = Ranks(ranks.rank, ranks.world, 0, 1) if name.startswith("hybrid") else ranks
        assemblies[name] = assembly = sharded(case(name, 2, folder), own)
        readings = {reading.key: [reading.found, reading.source] for reading in verify(assembly)}
        held = [*assembly.model.parameters(), *assembly.model.buffers(), *scale_tensors(assembly.model)]
        sizes = sorted(local_part(tensor).nbytes for tensor in held)
        found[name] = {"read": readings, "sizes": sizes}
        if name in trained_ones:
            save_file(weights(assembly), folder / f"{name}-start-{ranks.rank}.safetensors")
            found[name]["losses"], found[name]["norms"] = trained(assembly)
            after = weights(assembly)
            if ranks.is_main:
                save_file(after, folder / f"{name}-after.safetensors")
        save_file(gathered_bytes(assembly), folder / f"{name}-gathered-{ranks.rank}.safetensors")
    assembly = assemblies["mixed"]
    checkpoint = saved(folder, assembly, STEPS)
    export_sharded(assembly, tokenizer(), folder / "final")
    found["straight"], _ = trained(assembly, [STEPS + 1, STEPS + 2])
    again = sharded(case("mixed", 2, folder), ranks)
    load_checkpoint(checkpoint, again)
    found["resumed"], _ = trained(again, [STEPS + 1, STEPS + 2])
    judged = case("mixed", 2, folder, model={"load_pretrained_weights": False}, task="preference")
    assembly = sharded(judged, ranks)
    before = take_fingerprints(assembly)
    train_step(assembly, split_pairs(pairs(4), 2), 1)
    verify_unmoved(assembly, before)
    found["moved"] = take_fingerprints(assembly) != before
    for key, quantized in (("drawn", True), ("drawn plain", False)):
        config = case("full", 2, folder, model={"load_pretrained_weights": False}, q_lora=quantized)
        found[key], _ = trained(sharded(config, ranks), [1])
    return found


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("packed")
    for name, architecture in MODELS.items():
        config = settings(1, architecture)
        torch.manual_seed(1)
        model, _ = build_model(config, read_architecture(config), real_place(torch.device("cpu")))
        model.save_pretrained(folder / name)
    made, trained_ones = (to_make(request, quick, CASES) for quick in (QUICK, ("mixed",)))
    return folder, on_two(partial(look, made, trained_ones), folder)


def alone(name: str, folder: Path) -> Any:
    """One process with the same adapter as the two began with."""
    assembly = tiny_assembly(case(name, 1, folder))
    start = load_file(folder / f"{name}-start-0.safetensors")
    for key, parameter in assembly.model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(start[key])
    return assembly


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(QUICK, EXACT))
def test_two_halves_of_a_packed_base_teach_what_one_whole_does(name, found):
    folder, ranks = found
    assembly = alone(name, folder)
    losses, norms = trained(assembly)
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank[name]["norms"] == pytest.approx(norms, rel=1e-4)
    after = learnt(load_file(folder / f"{name}-after.safetensors"))
    own = dict(assembly.model.named_parameters())
    assert after
    for key, tensor in after.items():
        torch.testing.assert_close(own[key].detach(), tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [slow("pure"), "mixed"])
def test_in_half_precision_losses_agree_to_its_rounding(name, found):
    folder, ranks = found
    losses, _ = trained(alone(name, folder))
    assert ranks[0][name]["losses"] == pytest.approx(losses, rel=2e-3)
    assert losses[-1] < losses[0] - 0.03


@pytest.mark.parametrize("name", chosen(QUICK, CASES))
@pytest.mark.parametrize("rank", [slow(0), 1])
def test_bytes_of_numbers_and_scales_go_through_gathering_as_they_were_packed(name, rank, found):
    """Those too that are no number in half precision."""
    folder, _ = found
    gathered = load_file(folder / f"{name}-gathered-{rank}.safetensors")
    whole_one = tiny_assembly(case(name, 1, folder)).model
    packed = {key: item for key, item in whole_one.named_parameters() if is_quantized_weight(item)}
    assert packed.keys() == gathered.keys()
    no_numbers = 0
    for key, parameter in packed.items():
        numbers, scales = parameter.detach().flatten(), parameter.quant_state.absmax.view(torch.uint8)
        assert torch.equal(gathered[key][: len(numbers) + len(scales)], torch.cat([numbers, scales])), key
        no_numbers += int(numbers.view(torch.bfloat16).isnan().sum())
    assert no_numbers > 0


def test_what_is_split_and_stored_as_what_is_read_back(found):
    """Storage and adapter follow from the dtype of gathering."""
    for name, stored, adapter in (("full", "float32", "float32"), ("pure", "bfloat16", "bfloat16")):
        read = found[1][0][name]["read"]
        assert read["quantized weights stored as"][0] == stored
        assert read["peft.adapter_dtype"][0] == adapter
    read = found[1][0]["mixed"]["read"]
    assert read["quantized weights stored as"][0] == "bfloat16"
    assert read["quantized weights stored as"][1].startswith("14 quantized weights with their scales, ")
    assert read["peft.adapter_dtype"] == ["float32", "trained parameters, gathered in bfloat16"]
    assert read["peft.q_lora"][0] == "4-bit nf4, nested scales"
    assert read["fsdp.enable_fsdp"][0] == "1/2 of the weights"


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("nested, zero2"), "transposed", "mixed"])
def test_the_plan_holds_what_a_rank_is_given(name, found):
    folder, ranks = found
    rehearsal = record(case(name, 2, folder))
    assert sorted(rehearsal.footprint.weight_sizes) == ranks[0][name]["sizes"]
    one = record(case(name, 1, folder)).footprint
    assert rehearsal.footprint.total_parameters == one.total_parameters
    assert rehearsal.footprint.frozen_products == one.frozen_products
    message = next(line for line in rehearsal.notes if line.startswith("base: "))
    assert "stored as " in message
    assert "adapter held in " in message


def test_loading_takes_a_unit_and_the_layer_that_is_packed_or_the_unit_before_it_is(found):
    read, drawn = (
        next(phase for phase in rehearse(config).phases if phase.name == "load")
        for config in (case("full", 2, found[0]), case("full", 2, found[0], model={"load_pretrained_weights": False}))
    )
    block, layer = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128), 4 * 64 * 128
    assert drawn.allocated_bytes - read.allocated_bytes == pytest.approx(block - layer, rel=0.02)


def test_a_resumed_run_resumes_and_so_does_one_process(found):
    folder, ranks = found
    assert ranks[0]["resumed"] == ranks[0]["straight"]
    one = tiny_assembly(case("mixed", 1, folder))
    load_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}", one)
    assert trained(one, [STEPS + 1, STEPS + 2])[0] == pytest.approx(ranks[0]["straight"], rel=2e-3)
    exported = load_file(folder / "final" / "adapter_model.safetensors")
    assert len(exported) == 2 * 14
    assert all(bool(tensor.any()) for tensor in exported.values())


def test_random_weights_are_drawn_as_without_packing(found):
    for rank in found[1]:
        assert rank["drawn"] == pytest.approx(rank["drawn plain"], rel=0.02)
        assert rank["drawn"] != rank["drawn plain"]
        assert math.isfinite(rank["drawn"][0])


def test_what_a_preference_is_measured_against_stays_as_it_was_packed(found):
    assert all(rank["moved"] for rank in found[1])


def test_bytes_that_a_cast_would_take_for_numbers_are_refused_before_weights_arrive(monkeypatch, tmp_path):
    from framework.build.parallel import quantized_shards

    store_as = quantized_shards.store_as
    monkeypatch.setattr(quantized_shards, "store_as", lambda storage, model: store_as(torch.float32, model))
    with pytest.raises(RequestError, match="quantized bytes as float32 and would be gathered in bfloat16 and float32"):
        record(case("mixed", 2, tmp_path, model={"load_pretrained_weights": False}))


def test_layers_whose_bytes_cannot_be_split_are_named():
    import bitsandbytes as bnb

    from framework.build.parallel.quantized_shards import store_as

    model = torch.nn.ModuleDict({"odd": bnb.nn.Linear4bit(6, 6), "even": bnb.nn.Linear4bit(8, 8)}).to("cpu")
    with pytest.raises(RequestError, match="first odd"):
        store_as(torch.bfloat16, model)


def test_a_checkpoint_that_is_stored_packed_is_refused(tmp_path):
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = case("full", 2, tmp_path)
    architecture = read_architecture(config)
    architecture.quantization_config = stored
    with pytest.raises(RequestError, match="stored quantized"):
        build_model(config, architecture, real_place(torch.device("cpu")))
