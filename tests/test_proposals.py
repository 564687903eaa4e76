"""What a message proposes is accepted by the verb that it proposes."""

import shlex
from pathlib import Path

import pytest

from framework.checks import CHECK, PLAN, check_request
from framework.cli.plan import _fit_command
from framework.compose import compose
from framework.memory.explain.causes import Cause
from framework.memory.explain.moves import rank_moves
from framework.memory.explain.proposals import propose
from framework.memory.resolve import resolve
from framework.schema.keys import every_key

REQUESTS = [
    ("qwen3_0.6b_full", "gpu=rtx4090_24gb"),
    ("qwen3_0.6b_full", "gpu=h100_80gb", "gpu.count=2", "fsdp.enable_fsdp=true"),
    ("qwen3_0.6b_full", "gpu=v100_16gb", "training.global_batch_size=64"),
    ("gemma3_1b_full", "gpu=a100_40gb", "training.task=preference", "training.optimizer=sgd"),
    ("qwen3_1.7b_lora", "gpu=t4_16gb"),
    ("qwen3_1.7b_qlora", "gpu=rtx3060_12gb", "training.enable_gradient_checkpointing=false"),
    ("quickstart", "gpu=cpu"),
    ("classify_docstrings", "gpu=rtx4090_24gb"),
]
PHASES = (None, "load", "forward", "loss", "backward", "optimizer_step", "eval", "save", "resume")


def problems(words, needs=CHECK):
    return [str(problem) for problem in check_request(words[0], words[1:], None, needs).problems]


@pytest.mark.parametrize("words", REQUESTS, ids=" ".join)
def test_what_explain_proposes_for_a_run_composes_with_it(words):
    config = resolve(compose(words[0], words[1:]).config)
    proposals = propose(config)
    assert proposals
    refused = {each.override: found for each in proposals if (found := problems([*words, *shlex.split(each.override)]))}
    assert not refused


def test_what_explain_proposes_without_a_run_composes_with_a_plain_recipe():
    words = ("qwen3_0.6b_full", "gpu=h100_80gb")
    found = {move.override for phase in PHASES for cause in Cause for move in rank_moves(None, phase, cause)}
    assert len(found) > 8
    refused = {override: said for override in found if (said := problems([*words, *shlex.split(override)]))}
    assert not refused


@pytest.mark.parametrize("section", ["training", "model", "peft", "fsdp", "data"])
def test_a_key_that_check_proposes_is_one(section):
    """Each key of a section without one of its letters."""
    for key in (key for key in every_key() if key.startswith(f"{section}.") and key.count(".") == 1):
        misspelt = f"{key[: (at := (len(section) + len(key)) // 2)]}{key[at + 1 :]}"
        found = check_request("quickstart", [f"{misspelt}=null"], None, CHECK).problems
        assert any(problem.nearest in every_key() for problem in found if problem.key == misspelt), (misspelt, found)


@pytest.mark.parametrize(
    "more",
    [(), ("training.run_name='a b#c=d'",), ("gpu=h100_80gb", "data.train=[{path: 'a b.jsonl'}]"), ("gpu.count=2",)],
    ids=str,
)
def test_the_search_that_plan_proposes_is_a_request(more, write):
    write("model: {load_pretrained_weights: false, architecture: {model_type: llama, hidden_size: 64}}\n", "a b.yaml")
    Path("a b.jsonl").write_text('{"text": "a"}\n')
    composition = compose("a b.yaml", more)
    tunesmith, fit, *words = shlex.split(_fit_command("a b.yaml", more, None, composition))
    assert (tunesmith, fit) == ("tunesmith", "fit")
    assert problems(words, PLAN) == []
    assert compose(words[0], words[1:]).config.model_dump() == composition.config.model_dump()
