"""Sharded runs save, go on with another number of ranks, and export what one process would; all in one start of two."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from framework.build.model import build_model, read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks, local_part
from framework.run.checkpoint import empty_parts, load_checkpoint, save_checkpoint
from framework.run.parts import write_parts
from framework.run.sharded_export import export_sharded
from framework.schema.choices import Optimizer
from framework.schema.config import TrainingConfig
from framework.schema.sharding_rules import SHARDED_OPTIMIZERS
from tests.sharded import on_two, settings, sharded, trained, weights
from tests.tiny import LLAMA, tiny_assembly

EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": LLAMA, "experts": EXPERTS}
PURE = {"torch_dtype_str": "bfloat16"}
SPECIAL: dict[Optimizer, dict[str, Any]] = {
    Optimizer.ANYPRECISION_ADAMW: {"model": PURE, "training": {"mixed_precision_dtype": "none"}},
    Optimizer.SCHEDULE_FREE_ADAMW: {"training": {"lr_scheduler_type": "constant"}},
}


def case(world: int, folder: Path, kind: str = "llama", optimizer: Optimizer = Optimizer.ADAMW_TORCH) -> TrainingConfig:
    special = SPECIAL.get(optimizer, {})
    model = {"model_name": str(folder / kind), "load_pretrained_weights": True, **special.get("model", {})}
    training = {"optimizer": str(optimizer), **special.get("training", {})}
    return settings(world, MODELS[kind], model=model, training=training)


def saved(folder: Path, assembly: Any, step: int) -> Path:
    """A checkpoint, as a session makes one."""
    if assembly.ranks.is_main:
        empty_parts(folder)
    dist.barrier()
    parts = folder / "checkpoints" / ".parts"
    write_parts(parts, assembly)
    if assembly.ranks.is_main:
        save_checkpoint(folder, assembly, step, 5, split=parts)
    dist.barrier()
    return folder / "checkpoints" / f"step-{step:08d}"


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


def look(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizers": {}}
    for optimizer in SHARDED_OPTIMIZERS:
        assembly = sharded(case(2, folder, optimizer=optimizer), ranks)
        trained(assembly, [1, 2])
        checkpoint = saved(folder / str(optimizer), assembly, 2)
        straight, _ = trained(assembly, [3, 4])
        again = sharded(case(2, folder, optimizer=optimizer), ranks)
        step = load_checkpoint(checkpoint, again)
        resumed, _ = trained(again, [3, 4])
        found["optimizers"][str(optimizer)] = {"straight": straight, "resumed": resumed, "step": step}
    from_one = sharded(case(2, folder), ranks)
    load_checkpoint(folder / "one" / "checkpoints" / "step-00000002", from_one)
    found["from one"], _ = trained(from_one, [3, 4])
    for kind in MODELS:
        assembly = sharded(case(2, folder, kind), ranks)
        trained(assembly)
        exported = export_sharded(assembly, tokenizer(), folder / f"{kind}-final")
        found[kind] = str(exported)
        after = weights(assembly)
        if ranks.is_main:
            save_file(after, folder / f"{kind}-after.safetensors")
    adapted = settings(2, LLAMA, training={"use_peft": True}, peft={"lora_target_modules": ["q_proj"]})
    assembly = sharded(adapted, ranks)
    trained(assembly)
    export_sharded(assembly, tokenizer(), folder / "adapter-final")
    found["states"] = sum(
        local_part(value).numel() for state in assembly.optimizer.state.values() for value in state.values()
    )
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    for name, architecture in MODELS.items():
        config = settings(1, architecture)
        torch.manual_seed(1)
        model, _ = build_model(config, read_architecture(config), real_place(torch.device("cpu")))
        model.save_pretrained(folder / name)
    alone = tiny_assembly(case(1, folder))
    trained(alone, [1, 2])
    save_checkpoint(folder / "one", alone, 2, 5)
    return folder, on_two(look, folder)


@pytest.mark.parametrize("optimizer", SHARDED_OPTIMIZERS)
def test_a_sharded_optimizer_trains_saves_and_goes_on_as_if_nothing_had_been(optimizer, found):
    """F02: the table of supported pairs."""
    here = found[1][0]["optimizers"][str(optimizer)]
    assert here["step"] == 2
    assert here["resumed"] == here["straight"]


def test_one_process_goes_on_where_two_stood_and_two_where_one_did(found):
    folder, ranks = found
    alone = tiny_assembly(case(1, folder))
    load_checkpoint(folder / "adamw_torch" / "checkpoints" / "step-00000002", alone)
    losses, _ = trained(alone, [3, 4])
    assert losses == pytest.approx(ranks[0]["optimizers"]["adamw_torch"]["straight"], rel=1e-5)
    assert losses == pytest.approx(ranks[0]["from one"], rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_what_two_export_is_what_one_would_and_loads_elsewhere(kind, found):
    folder, ranks = found
    alone = tiny_assembly(case(1, folder, kind))
    trained(alone)
    plain = AutoModelForCausalLM.from_pretrained(folder / f"{kind}-final")
    stored = load_file(folder / f"{kind}-after.safetensors")
    assert str(plain.dtype) == ranks[0][kind]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.detach(), stored[name].to(plain.dtype))
        own = dict(alone.model.named_parameters())[name].detach()
        torch.testing.assert_close(parameter.detach(), own.to(plain.dtype), rtol=1e-3, atol=1e-4)


def test_an_adapter_is_exported_whole(found):
    folder, _ = found
    tensors = load_file(folder / "adapter-final" / "adapter_model.safetensors")
    assert len(tensors) == 4
    assert {tuple(tensor.shape) for name, tensor in tensors.items() if "lora_A" in name} == {(8, 32)}
    assert all(bool(tensor.any()) for tensor in tensors.values())


def test_both_ranks_wrote_their_part(found):
    folder, _ = found
    parts = sorted((folder / "sgd" / "checkpoints" / "step-00000002" / "parts").glob("*.safetensors"))
    assert len(parts) == 2
    sizes = [sum(tensor.numel() for tensor in load_file(part).values()) for part in parts]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
