"""Ranks that share rows (gloo on the CPU) learn what one process does from the same rows."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.build.assembly import Assembly
from framework.build.data.batches import GlobalBatches, eval_batches
from framework.build.loading.model import build_model, read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks
from framework.build.verify import verify
from framework.errors import VerificationFailed
from framework.run.checkpoints.checkpoint import load_checkpoint
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.grids import chosen, to_make
from tests.run.ranks.test_ranks import rows_of_many_lengths
from tests.run.ranks.test_sharded import saved
from tests.run.several import ended, start
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401
from tests.sharded import SMOOTH, on_two, sharded, weights
from tests.tiny import LLAMA, tiny_assembly, tiny_config

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
STEPS = 2
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 1}
CONVOLUTIONS = {**LLAMA, "model_type": "lfm2", "full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]}
MODELS = {"llama": LLAMA, "qwen3": QWEN3}
SHARDED = {"enable_fsdp": True}
CASES: dict[str, dict[str, Any]] = {
    "sharded": {"fsdp": SHARDED, "training": {"enable_gradient_checkpointing": True}},
    "kept attention": {
        "fsdp": {**SHARDED, "sharding_strategy": "SHARD_GRAD_OP"},
        "training": {"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": "save_attention"},
    },
    "copies in chunks": {"model": {"chunked_loss": 16}},
    "grouped differently": {"of": "qwen3", "fsdp": SHARDED, "training": {"activation_offload": True}},
    "adapter": {"training": {"use_peft": True}, "peft": {"lora_dropout": 0.0}},
    "half": {"training": {"mixed_precision_dtype": "bf16"}},
}
QUICK = ("sharded", "grouped differently")


def case(name: str, folder: Path, world: int, size: int | None = None) -> TrainingConfig:
    """Rows of many lengths, 4 a step and 2 a micro-batch; on one process the same rows as a whole."""
    sections = json.loads(json.dumps(CASES[name]))
    training = {"per_device_train_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2, "adam_epsilon": SMOOTH}
    sections["training"] = {**training, **sections.get("training", {})}
    weights_of = {"model_name": str(folder / sections.pop("of", "llama")), "load_pretrained_weights": True}
    kernel = "ring_attention" if world > 1 else "sdpa"
    sections["model"] = {**weights_of, "attn_implementation": kernel, **sections.get("model", {})}
    fsdp = sections.pop("fsdp", {})
    sections["fsdp"] = {**fsdp, "context_parallel_size": size} if world > 1 else {}
    gpu = {"name": "cpu", "count": world}
    return tiny_config(MODELS[Path(weights_of["model_name"]).name], gpu=gpu, **sections)


def curve(assembly: Assembly, first: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """Losses, norms and counts of steps, and an evaluation."""
    made = assembly.config
    rank, world = assembly.ranks.rank // made.sharing, made.batch.world
    rows, multiple = rows_of_many_lengths(), made.padded(1)
    batches = GlobalBatches(rows, made.batch, 0, 0, rank, multiple=multiple).start(first - 1)
    results = [train_step(assembly, next(batches), step) for step in range(first, first + steps)]
    held_out = eval_batches(rows, 2, 0, rank, world, multiple=multiple)
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "terms": [result.terms for result in results],
        **evaluate(assembly, held_out, lambda phase: None),
    }


def look(cases: Sequence[str], ranks: Ranks, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in cases:
        assembly = sharded(case(name, folder, ranks.world), ranks)
        rows = [str(item) for item in verify(assembly) if item.key == "fsdp.context_parallel_size"]
        found[name] = {**curve(assembly), "verified": rows}
        after = weights(assembly)
        if ranks.is_main:
            save_file({key: value.contiguous() for key, value in after.items()}, folder / f"{name}.safetensors")
        if name == "sharded":
            saved(folder, assembly, STEPS)
            found["straight"] = curve(assembly, STEPS + 1)["loss"]
            again = sharded(case(name, folder, ranks.world), ranks)
            load_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}", again)
            found["resumed"] = curve(again, STEPS + 1)["loss"]
    mixed = tiny_config(CONVOLUTIONS, model={"attn_implementation": "ring_attention"}, gpu={"count": ranks.world})
    assembly = sharded(mixed, ranks)
    for parameter in assembly.model.parameters():  # with the usual starting weights layers hardly matter
        parameter.data.mul_(4)
    with pytest.raises(VerificationFailed) as caught:
        verify(assembly)
    return {**found, "mixed": str(caught.value)}


def pretrained(folder: Path) -> Path:
    """Weights for every number of ranks: those drawn for shards are others than those for a whole."""
    for name, architecture in MODELS.items():
        made = tiny_config(architecture)
        torch.manual_seed(1)
        model, _ = build_model(made, read_architecture(made), real_place(torch.device("cpu")))
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = pretrained(tmp_path_factory.mktemp("context"))
    return folder, on_two(partial(look, to_make(request, QUICK, CASES)), folder)


def assert_alike(here: dict[str, Any], alone: dict[str, Any], exact: float) -> None:
    assert here["terms"] == alone["terms"]
    for key in ("loss", "grad_norm", "eval_loss", "token_accuracy"):
        assert here[key] == pytest.approx(alone[key], rel=exact), key


@pytest.mark.parametrize("name", chosen(QUICK, CASES))
def test_two_that_share_each_row_learn_what_one_does(name, found):
    folder, (first, second) = found
    assert first[name] == second[name]
    assembly = tiny_assembly(case(name, folder, 1))
    alone = curve(assembly)
    assert_alike(first[name], alone, 2e-2 if name == "half" else 1e-5)
    after = load_file(folder / f"{name}.safetensors")
    for key, value in weights(assembly).items():
        if name != "half":
            torch.testing.assert_close(after[key], value, rtol=1e-5, atol=2e-5, msg=key)
    [row] = first[name]["verified"]
    assert "asked='2 devices share each row', found='2 devices share each row'" in row
    assert "ring_attention of 2 layers" in row


def test_a_run_resumes_with_as_many_and_with_one(found):
    folder, (first, _) = found
    assert first["resumed"] == first["straight"]
    alone = tiny_assembly(case("sharded", folder, 1))
    assert load_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}", alone) == STEPS
    assert curve(alone, STEPS + 1)["loss"] == pytest.approx(first["straight"], rel=1e-5)


def test_a_model_with_other_layers_that_mix_tokens_is_found_before_the_first_step(found):
    assert "more than attention mixes tokens" in found[1][0]["mixed"]


def look_in_groups(ranks: Ranks, folder: Path) -> dict[str, Any]:
    return {name: curve(sharded(case(name, folder, 4, 2), ranks)) for name in ("sharded", "copies in chunks")}


@pytest.mark.slow
def test_two_groups_of_two_share_rows_and_have_rows_of_their_own(tmp_path):
    pretrained(tmp_path)
    ranks = on_two(look_in_groups, tmp_path, 4)
    assert all(rank == ranks[0] for rank in ranks)
    for name, here in ranks[0].items():
        assert_alike(here, curve(tiny_assembly(case(name, tmp_path, 1))), 1e-5)


def whole_run(corpus, folder, world: int) -> TrainingConfig:  # noqa: F811
    """A run from text to export."""
    kernel = "ring_attention" if world > 1 else "sdpa"
    made = config(corpus, folder, architecture=LLAMA, model={"attn_implementation": kernel}, training={"save_steps": 6})
    return made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": world})})


def run_as_rank(corpus: str, folder: str) -> None:  # noqa: F811
    train(whole_run(corpus, Path(folder), 2))


@pytest.mark.slow
def test_a_whole_run_writes_what_one_process_would(corpus, tmp_path):  # noqa: F811
    script = "import sys; from tests.run.ranks.test_context import run_as_rank; run_as_rank(*sys.argv[1:])"
    both = ended(start(script, str(corpus), str(tmp_path / "run")))
    assert [rank.code for rank in both] == [0, 0], both
    train(whole_run(corpus, tmp_path / "alone", 1))
    for key in ("loss", "eval_loss"):
        here, there = (list(metrics(tmp_path / name, key).values()) for name in ("run", "alone"))
        assert here == pytest.approx(there, rel=1e-5)
    (tmp_path / "run" / "checkpoints" / "step-00000012").rename(tmp_path / "aside")
    train(whole_run(corpus, tmp_path / "run", 1), resume=True, allow=("model.attn_implementation",))
    assert list(metrics(tmp_path / "run").values()) == pytest.approx(
        list(metrics(tmp_path / "alone").values()), rel=1e-5
    )
