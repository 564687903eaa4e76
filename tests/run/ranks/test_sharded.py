"""Sharded runs save, go on with another number of ranks, and export what one process would; all in one start of two."""

import json
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from framework.build.loading.model import build_model, read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks, local_part
from framework.errors import SaveFailed
from framework.run.checkpoints import read_back as written_module
from framework.run.checkpoints import sharded_export
from framework.run.checkpoints.async_writer import Writer
from framework.run.checkpoints.checkpoint import (
    Contents,
    checkpoints,
    contents_of,
    empty_parts,
    load_checkpoint,
    save_checkpoint,
)
from framework.run.checkpoints.sharded import write_parts, writers_group
from framework.run.checkpoints.sharded_export import export_sharded
from framework.run.rehearsal.footprint import state_tensors
from framework.schema.choices import StateDictType
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import FACTS, Optimizer
from tests.grids import chosen, to_make
from tests.sharded import on_two, settings, sharded, trained, weights
from tests.tiny import LLAMA, tiny_assembly

EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"llama": LLAMA, "experts": EXPERTS}
STORED = {**MODELS, "one block": {**LLAMA, "num_hidden_layers": 1}}
GATHERED = StateDictType.FULL_STATE_DICT
PURE = {"torch_dtype_str": "bfloat16"}
SPECIAL: dict[Optimizer, dict[str, Any]] = {
    Optimizer.ANYPRECISION_ADAMW: {"model": PURE, "training": {"mixed_precision_dtype": "none"}},
    Optimizer.SCHEDULE_FREE_ADAMW: {"training": {"lr_scheduler_type": "constant"}},
}


def case(world: int, folder: Path, kind: str = "llama", optimizer: Optimizer = Optimizer.ADAMW_TORCH) -> TrainingConfig:
    special = SPECIAL.get(optimizer, {})
    model = {"model_name": str(folder / kind), "load_pretrained_weights": True, **special.get("model", {})}
    training = {"optimizer": str(optimizer), **special.get("training", {})}
    return settings(world, STORED[kind], model=model, training=training)


def saved(folder: Path, assembly: Any, step: int) -> Path:
    """A checkpoint, as a session makes one."""
    if assembly.ranks.is_main:
        empty_parts(folder)
    dist.barrier()
    parts = folder / "checkpoints" / ".parts"
    contents = contents_of(assembly, step)
    write_parts(parts, contents.tensors)
    if assembly.ranks.is_main:
        save_checkpoint(folder, contents, 5, parts)
    dist.barrier()
    return folder / "checkpoints" / f"step-{step:08d}"


def save_asynchronously(folder: Path, assembly: Any, step: int, group: Any) -> str:
    """Save a checkpoint as `training.async_save` does, during later steps. Returns the error, if any."""
    ranks = assembly.ranks
    if ranks.is_main:
        empty_parts(folder)
    dist.barrier()
    parts, has_stepped = folder / "checkpoints" / ".parts", threading.Event()

    def write(contents: Contents) -> None:
        assert has_stepped.wait(200)
        if contents.is_split:
            write_parts(parts, contents.tensors, group)
        if ranks.is_main:
            save_checkpoint(folder, contents, 5, parts if contents.is_split else None)

    writer, contents = Writer(is_async=True, is_alone=False), contents_of(assembly, step)
    if contents.is_split or ranks.is_main:
        writer.begin(contents, write, (*assembly.trained, *state_tensors(assembly)))
    trained(assembly, [step + 1])
    has_stepped.set()
    trained(assembly, [step + 2, step + 3])
    try:
        writer.wait()
    except SaveFailed as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def look_asynchronous(ranks: Ranks, folder: Path, found: dict[str, Any]) -> None:
    group = writers_group()
    assembly = sharded(case(2, folder), ranks)
    trained(assembly, [1, 2])
    saved(folder / "before", assembly, 2)
    found["asynchronous"] = save_asynchronously(folder / "asynchronous", assembly, 2, group)
    original = written_module.save_file

    def full_disk(tensors: Any, file: Path, **options: Any) -> None:
        if ranks.rank == 1:
            raise OSError(28, "No space left on device")
        original(tensors, file, **options)

    written_module.save_file = full_disk
    found["full disk"] = save_asynchronously(folder / "asynchronous", assembly, 5, group)
    written_module.save_file = original
    gathered = case(2, folder)
    gathered = gathered.model_copy(update={"fsdp": gathered.fsdp.model_copy(update={"state_dict_type": GATHERED})})
    assembly = sharded(gathered, ranks)
    trained(assembly, [1, 2])
    found["gathered"] = save_asynchronously(folder / "gathered", assembly, 2, group)


def parsed(file: Path) -> tuple[Any, bytes]:
    """Header and bytes; safetensors writes what is in a header's metadata in any order."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    return json.loads(content[8:end].decode() or "{}"), content[end:]


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


SHARDED_OPTIMIZERS = [choice for choice, facts in FACTS.items() if facts.shards.is_sharded]
QUICK = (Optimizer.ADAMW_TORCH, Optimizer.MUON)


def look(optimizers: Sequence[Optimizer], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizers": {}}
    for optimizer in optimizers:
        made = case(2, folder, "llama" if optimizer is Optimizer.ADAMW_TORCH else "one block", optimizer)
        assembly = sharded(made, ranks)
        trained(assembly, [1, 2])
        checkpoint = saved(folder / str(optimizer), assembly, 2)
        straight, _ = trained(assembly, [3, 4])
        again = sharded(made, ranks)
        step = load_checkpoint(checkpoint, again)
        resumed, _ = trained(again, [3, 4])
        found["optimizers"][str(optimizer)] = {"straight": straight, "resumed": resumed, "step": step}
    look_asynchronous(ranks, folder, found)
    from_one = sharded(case(2, folder), ranks)
    load_checkpoint(folder / "one" / "checkpoints" / "step-00000002", from_one)
    found["from one"], _ = trained(from_one, [3, 4])
    sharded_export.LARGEST_FILE = "30KB"
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
    prompted = sharded(settings(2, LLAMA, training={"use_peft": True}, peft={"peft_method": "prompt"}), ranks)
    trained(prompted)
    export_sharded(prompted, tokenizer(), folder / "prompt-final")
    if ranks.is_main:
        save_file(weights(prompted), folder / "prompt-after.safetensors")
    else:
        weights(prompted)
    found["states"] = sum(
        local_part(value).numel() for state in assembly.optimizer.state.values() for value in state.values()
    )
    return found


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sharded")
    for name, architecture in STORED.items():
        config = settings(1, architecture)
        torch.manual_seed(1)
        model, _ = build_model(config, read_architecture(config), real_place(torch.device("cpu")))
        model.save_pretrained(folder / name)
    alone = tiny_assembly(case(1, folder))
    trained(alone, [1, 2])
    save_checkpoint(folder / "one", contents_of(alone, 2), 5)
    return folder, on_two(partial(look, to_make(request, QUICK, SHARDED_OPTIMIZERS)), folder)


@pytest.mark.parametrize("optimizer", chosen(QUICK, SHARDED_OPTIMIZERS))
def test_a_sharded_optimizer_trains_saves_and_resumes_as_if_nothing_had_been(optimizer, found):
    """The table of supported pairs."""
    here = found[1][0]["optimizers"][str(optimizer)]
    assert here["step"] == 2
    assert here["resumed"] == here["straight"]


def test_one_process_resumes_where_two_stopped_and_two_where_one_did(found):
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


def test_an_export_is_streamed_into_several_files(found):
    folder, _ = found
    parts = sorted((folder / "llama-final").glob("model-*.safetensors"))
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) < 40_000
    assert (folder / "llama-final" / "model.safetensors.index.json").exists()


def test_an_adapter_is_exported_whole(found):
    folder, _ = found
    tensors = load_file(folder / "adapter-final" / "adapter_model.safetensors")
    assert len(tensors) == 4
    assert {tuple(tensor.shape) for name, tensor in tensors.items() if "lora_A" in name} == {(8, 32)}
    assert all(bool(tensor.any()) for tensor in tensors.values())


def test_a_prompt_is_exported_whole(found):
    folder, _ = found
    tensors = load_file(folder / "prompt-final" / "adapter_model.safetensors")
    after = load_file(folder / "prompt-after.safetensors")
    assert list(tensors) == ["prompt_embeddings"]
    assert torch.equal(tensors["prompt_embeddings"], after["prompt_encoder.default.embedding.weight"])


def test_shards_written_asynchronously_are_those_written_synchronously(found):
    folder, ranks = found
    assert [rank["asynchronous"] for rank in ranks] == ["", ""]
    one, other = (
        {file.name: parsed(file) for file in (folder / name / "checkpoints" / "step-00000002").rglob("*.*")}
        for name in ("before", "asynchronous")
    )
    assert len(one) == 4  # two parts, state, random states
    assert one == other


def test_a_rank_that_cannot_write_asynchronously_is_named_on_every_rank(found):
    folder, ranks = found
    for rank in ranks:
        assert "rank 1 could not write" in rank["full disk"]
        assert "No space left on device" in rank["full disk"]
    assert [path.name for path in checkpoints(folder / "asynchronous")] == ["step-00000002"]


def test_what_the_first_rank_gathers_and_writes_asynchronously_equals_the_shards_together(found):
    folder, ranks = found
    assert [rank["gathered"] for rank in ranks] == ["", ""]
    whole = folder / "gathered" / "checkpoints" / "step-00000002"
    assert sorted(file.name for file in whole.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "random.safetensors",
        "state.json",
    ]
    one, other = tiny_assembly(case(1, folder)), tiny_assembly(case(1, folder))
    load_checkpoint(whole, one)
    load_checkpoint(folder / "before" / "checkpoints" / "step-00000002", other)
    for (name, a), (_, b) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert trained(one, [3, 4]) == trained(other, [3, 4])


def test_both_ranks_wrote_their_part(found):
    folder, _ = found
    parts = sorted((folder / "adamw_torch" / "checkpoints" / "step-00000002" / "parts").glob("*.safetensors"))
    assert len(parts) == 2
    sizes = [sum(tensor.numel() for tensor in load_file(part).values()) for part in parts]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
