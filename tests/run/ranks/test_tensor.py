"""Ranks that share matrices (gloo on the CPU) learn what one process does from the same rows."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from framework.build.loading.model import build_model, read_architecture
from framework.build.parallel import tensor_parallel
from framework.build.place import real_place
from framework.build.ranks import Ranks, whole
from framework.build.verify import verify
from framework.errors import VerificationFailed
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.checkpoints.sharded_export import export_sharded
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.rehearsal.rehearse import record
from framework.run.setup.agreement import seed_each_rank
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import FACTS, Shards
from tests.grids import chosen, slow, to_make
from tests.run.ranks.test_context import STEPS, assert_alike, curve
from tests.run.ranks.test_sharded import SPECIAL, saved, tokenizer
from tests.run.several import ended, start
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401
from tests.sharded import SMOOTH, on_two, sharded, weights
from tests.tiny import LLAMA, tiny_assembly, tiny_config

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
TIED = {**LLAMA, "intermediate_size": 72, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TIED,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "intermediate_size": 50},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "starcoder2": {**LLAMA, "model_type": "starcoder2", "use_bias": True, "bos_token_id": 1, "eos_token_id": 2},
}
LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8, **LAYERS},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, **LAYERS},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "smollm3": {**LLAMA, "model_type": "smollm3", "pad_token_id": 0, "no_rope_layers": [1, 0]},
    "granite": {**LLAMA, "model_type": "granite", "residual_multiplier": 0.5},
    "seed_oss": {**LLAMA, "model_type": "seed_oss", "residual_dropout": 0.0, "attention_dropout": 0.0},
    "phi": {**LLAMA, "model_type": "phi", "num_key_value_heads": 4},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"training": {"enable_gradient_checkpointing": True, "max_grad_norm": 0.5}},
    "qwen3": {"of": "qwen3", "training": {"activation_offload": True}},
    "biases": {"of": "starcoder2", "model": {"chunked_loss": 16, "freeze_first_blocks": 1}},
    "kept products": {
        "of": "qwen2",
        "training": {"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": "save_matmuls"},
    },
    "adapter": {
        "of": "qwen3",
        "training": {"use_peft": True, "max_grad_norm": 0.2},
        "peft": {"lora_dropout": 0.0, "lora_target_modules": ["all-linear"]},
    },
    "half": {"training": {"mixed_precision_dtype": "bf16"}},
}
QUICK = ("llama", "adapter")
SAVED = ("llama", "adapter")
STARTED = "one/checkpoints/step-00000001"
"""Initial values of an adapter: one process draws them from other random numbers."""


def case(name: str, folder: Path, world: int, size: int = 2, **fsdp: Any) -> TrainingConfig:
    """Rows of many lengths, 4 a step; the same on any number of processes."""
    sections = json.loads(json.dumps(CASES[name]))
    training = {"per_device_train_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2, "adam_epsilon": SMOOTH}
    sections["training"] = {**training, **sections.get("training", {})}
    weights_of = {"model_name": str(folder / sections.pop("of", "llama")), "load_pretrained_weights": True}
    sections["model"] = {**weights_of, **sections.get("model", {})}
    sections["fsdp"] = {**fsdp, "tensor_parallel_size": size} if world > 1 else {}
    architecture = MODELS[Path(weights_of["model_name"]).name]
    return tiny_config(architecture, gpu={"name": "cpu", "count": world}, **sections)


def held(assembly: Any) -> list[int]:
    """Bytes of weights and of optimizer states that this rank has."""
    model = assembly.model
    states = (value for state in assembly.optimizer.state.values() for value in state.values())
    return [sum(item.nbytes for item in kind) for kind in ((*model.parameters(), *model.buffers()), states)]


def rows_of_the_table(assembly: Any) -> list[str]:
    return [str(item) for item in verify(assembly) if item.key == "fsdp.tensor_parallel_size"]


def look(cases: Sequence[str], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in cases:
        assembly = sharded(case(name, folder, 2), ranks)
        if name == "adapter":
            load_checkpoint(folder / STARTED, assembly)
        found[name] = {"verified": rows_of_the_table(assembly), **curve(assembly)}
        export_sharded(assembly, tokenizer(), folder / f"{name}-final")
        found[name]["held"] = held(assembly)
        found[name]["has a group of its own"] = assembly.tensor.group is not torch.distributed.group.WORLD
        if name in SAVED:
            checkpoint = saved(folder / name, assembly, STEPS)
            again = sharded(case(name, folder, 2), ranks)
            load_checkpoint(checkpoint, again)
            found[name] |= {key: curve(made, STEPS + 1)["loss"] for key, made in (("on", assembly), ("again", again))}
    return {**found, "drawn": drawn(ranks), "broken": broken(ranks, folder)}


def drawn(ranks: Ranks) -> bool:
    """Whether random weights are those that shards of the same model are drawn as."""
    given = {"gpu": {"name": "cpu", "count": 2}, "training": {"per_device_train_batch_size": 4}}
    parts = sharded(tiny_config(LLAMA, **given, fsdp={"tensor_parallel_size": 2}), ranks)
    shards = weights(sharded(tiny_config(LLAMA, **given, fsdp={"enable_fsdp": True}), ranks))
    made = {name: whole(parts.as_part(name, item.detach())) for name, item in parts.model.named_parameters()}
    return made.keys() == shards.keys() and all(torch.equal(made[name], shards[name]) for name in shards)


def broken(ranks: Ranks, folder: Path) -> str:
    """The message of the verification if outputs are not summed."""
    assembly = sharded(case("llama", folder, 2), ranks)
    added, tensor_parallel._added = tensor_parallel._added, lambda part, group: part.clone()
    try:
        with pytest.raises(VerificationFailed) as caught:
            verify(assembly)
    finally:
        tensor_parallel._added = added
    return str(caught.value)


def pretrained(folder: Path, models: dict[str, dict[str, Any]] = MODELS) -> Path:
    """Weights for every number of ranks: those drawn for parts are others than those for a whole."""
    for name, architecture in models.items():
        made = tiny_config(architecture)
        torch.manual_seed(1)
        model, _ = build_model(made, read_architecture(made), real_place(torch.device("cpu")))
        for parameter in model.parameters():  # norms that start from one, and biases from zero, would hide a fault
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = pretrained(tmp_path_factory.mktemp("tensor"))
    alone = tiny_assembly(case("adapter", folder, 1))
    curve(alone, steps=1)
    save_checkpoint(folder / "one", contents_of(alone, 1), 5)
    return folder, on_two(partial(look, to_make(request, QUICK, CASES)), folder)


@pytest.mark.parametrize("name", chosen(QUICK, CASES))
def test_two_that_share_each_matrix_learn_what_one_does_and_export_it(name, found):
    folder, (first, second) = found
    assert first[name] == second[name]
    alone = tiny_assembly(case(name, folder, 1))
    if name == "adapter":
        load_checkpoint(folder / STARTED, alone)
    exact = 5e-2 if name == "half" else 1e-5
    assert_alike(first[name], curve(alone), exact)
    own = {key: item.detach() for key, item in alone.model.named_parameters()}
    if name == "adapter":
        own = {key.replace(".default.", "."): item for key, item in own.items() if "lora_" in key}
        stored = load_file(folder / f"{name}-final" / "adapter_model.safetensors")
        assert stored.keys() == own.keys()
    else:
        stored = dict(AutoModelForCausalLM.from_pretrained(folder / f"{name}-final").named_parameters())
    for key, item in stored.items():
        torch.testing.assert_close(
            item.detach(), own[key], rtol=exact, atol=max(exact, 1e-4), msg=lambda text, key=key: f"{key} {text}"
        )


@pytest.mark.parametrize(("name", "tensors"), [("llama", 14), slow("biases", 20), ("adapter", 28)])
def test_the_table_says_which_matrices_are_in_parts_and_how_large(name, tensors, found):
    held, alike = found[1][1][name]["verified"]
    assert not found[1][1][name]["has a group of its own"], "each would be a communicator that the plan does not have"
    assert f"asked='1/2 of {tensors} tensors', found='1/2 of {tensors} tensors'" in held
    assert "self_attn.o_proj 32x" in held
    assert "logits of 8 tokens, which differ by 0e+00 in a group" in alike


@pytest.mark.parametrize("name", ["llama", "adapter"])
def test_what_a_rank_holds_is_what_was_planned(name, found):
    folder, ranks = found
    footprint = record(case(name, folder, 2)).footprint
    planned = [sum(footprint.weight_sizes), sum(footprint.state_sizes)]
    assert [rank[name]["held"] for rank in ranks] == [planned, planned]


def test_outputs_that_are_not_added_up_are_found_before_the_first_step(found):
    assert "asked the same on 2 devices, in effect predictions differ by" in found[1][0]["broken"]


def test_random_weights_are_drawn_as_for_shards(found):
    assert found[1][0]["drawn"]
    assert found[1][1]["drawn"]


@pytest.mark.parametrize("name", SAVED)
def test_a_run_resumes_with_as_many_and_with_one(name, found):
    folder, (first, _) = found
    assert first[name]["again"] == first[name]["on"]
    alone = tiny_assembly(case(name, folder, 1))
    assert load_checkpoint(folder / name / "checkpoints" / f"step-{STEPS:08d}", alone) == STEPS
    assert curve(alone, STEPS + 1)["loss"] == pytest.approx(first[name]["on"], rel=1e-5)


GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "copies": ("qwen3", {}),
    "shards": ("qwen3", {"enable_fsdp": True}),
    "kept shards": ("biases", {"enable_fsdp": True, "sharding_strategy": "SHARD_GRAD_OP"}),
    "sharded adapter": ("adapter", {"enable_fsdp": True}),
}


def look_in_groups(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found = {}
    for kind, (name, fsdp) in GROUPS.items():
        assembly = sharded(case(name, folder, 4, **fsdp), ranks)
        if name == "adapter":
            load_checkpoint(folder / STARTED, assembly)
        found[kind] = {"verified": len(rows_of_the_table(assembly)), **curve(assembly)}
        export_sharded(assembly, tokenizer(), folder / f"{kind}-final")
        checkpoint = saved(folder / kind, assembly, STEPS)
        found[kind]["on"] = curve(assembly, STEPS + 1)["loss"]
        again = sharded(case(name, folder, 4, **fsdp), ranks)
        load_checkpoint(checkpoint, again)
        found[kind]["again"] = curve(again, STEPS + 1)["loss"]
    return found


@pytest.mark.slow
def test_two_groups_of_two_have_rows_of_their_own_as_copies_and_as_shards(tmp_path):
    alone = tiny_assembly(case("adapter", pretrained(tmp_path), 1))
    curve(alone, steps=1)
    save_checkpoint(tmp_path / "one", contents_of(alone, 1), 5)
    ranks = on_two(look_in_groups, tmp_path, 4)
    assert all(rank == ranks[0] for rank in ranks)
    for kind, (name, _) in GROUPS.items():
        alone = tiny_assembly(case(name, tmp_path, 1))
        if name == "adapter":
            load_checkpoint(tmp_path / STARTED, alone)
        here = ranks[0][kind]
        assert_alike(here, curve(alone), 1e-5)
        if name != "adapter":
            own = dict(alone.model.named_parameters())
            for key, item in AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-final").named_parameters():
                torch.testing.assert_close(item.detach(), own[key].detach(), rtol=1e-5, atol=1e-4)
        assert here["verified"] == 2
        assert here["again"] == here["on"] == pytest.approx(curve(alone, STEPS + 1)["loss"], rel=1e-5)
        one = tiny_assembly(case(name, tmp_path, 1))
        load_checkpoint(tmp_path / kind / "checkpoints" / f"step-{STEPS:08d}", one)
        assert curve(one, STEPS + 1)["loss"] == pytest.approx(here["on"], rel=1e-5)


def of_kind(kind: str, folder: Path, world: int) -> TrainingConfig:
    training = {"per_device_train_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2}
    model = {"model_name": str(folder / kind), "load_pretrained_weights": True}
    gpu, fsdp = {"name": "cpu", "count": world}, {"tensor_parallel_size": world}
    return tiny_config(OTHERS[kind], model=model, training=training, gpu=gpu, fsdp=fsdp)


def look_at_kinds(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {kind: curve(sharded(of_kind(kind, folder, 2), ranks), steps=2) for kind in OTHERS}


@pytest.mark.slow
def test_other_models_with_a_plan_are_split_rightly_too(tmp_path):
    first, second = on_two(look_at_kinds, pretrained(tmp_path, OTHERS))
    assert first == second
    for kind, here in first.items():
        assert_alike(here, curve(tiny_assembly(of_kind(kind, tmp_path, 1)), steps=2), 5e-5)


def look_at_optimizers(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found = {}
    for optimizer in (choice for choice, facts in FACTS.items() if facts.shards is Shards.ELEMENTS):
        special = SPECIAL.get(optimizer, {})
        training = {"optimizer": str(optimizer), "learning_rate": 1e-3, **special.get("training", {})}
        gpu, fsdp = {"name": "cpu", "count": 2}, {"tensor_parallel_size": 2}
        made = tiny_config(LLAMA, gpu=gpu, fsdp=fsdp, training=training, model=special.get("model", {}))
        assembly = sharded(made, ranks)
        first = curve(assembly, steps=2)["loss"]
        checkpoint = saved(folder / str(optimizer), assembly, 2)
        again = sharded(made, ranks)
        load_checkpoint(checkpoint, again)
        found[str(optimizer)] = (first, curve(assembly, 3, 2)["loss"], curve(again, 3, 2)["loss"])
    return found


@pytest.mark.slow
def test_each_optimizer_trains_saves_and_resumes_as_if_nothing_had_been(tmp_path):
    first, second = on_two(look_at_optimizers, tmp_path)
    assert first == second
    for optimizer, (before, straight, resumed) in first.items():
        assert straight == resumed, optimizer
        assert straight != before


def whole_run(corpus, folder, world: int, size: int = 2) -> TrainingConfig:  # noqa: F811
    """A run from text to export."""
    made = config(corpus, folder, architecture=LLAMA, training={"save_steps": 6})
    gpu, fsdp = {"count": world}, {"tensor_parallel_size": size}
    return made.model_copy(
        update={"gpu": made.gpu.model_copy(update=gpu), "fsdp": made.fsdp.model_copy(update=fsdp if world > 1 else {})}
    )


def run_as_rank(corpus: str, folder: str) -> None:  # noqa: F811
    train(whole_run(corpus, Path(folder), 2), planner=plan_in_subprocess)


@pytest.mark.slow
def test_a_whole_run_on_two_resumes_with_one(corpus, tmp_path):  # noqa: F811
    script = "import sys; from tests.run.ranks.test_tensor import run_as_rank; run_as_rank(*sys.argv[1:])"
    both = ended(start(script, str(corpus), str(tmp_path / "run")))
    assert [rank.code for rank in both] == [0, 0], both
    losses = list(metrics(tmp_path / "run", "eval_loss").values())
    assert losses[-1] < losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["batch"]["tensor"] == 2
    (tmp_path / "run" / "checkpoints" / "step-00000012").rename(tmp_path / "aside")
    train(whole_run(corpus, tmp_path / "run", 1), resume=True)
    assert list(metrics(tmp_path / "run", "eval_loss").values())[-1] == pytest.approx(losses[-1], rel=1e-5)


def test_ranks_that_compute_the_same_draw_the_same_and_others_do_not():
    drawn = []
    for rank in range(4):
        seed_each_rank(7, Ranks(rank, 4, same_rows=2))
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
