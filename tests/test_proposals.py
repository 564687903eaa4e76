"""Proposals in messages are accepted by the verb that they are for."""

import shlex
from pathlib import Path

import pytest

from framework.checks import CHECK, PLAN, check_request
from framework.cli.plan import _fit_command
from framework.compose import compose
from framework.memory.explain.causes import Cause
from framework.memory.explain.moves import propose, rank_moves
from framework.memory.resolve import resolve
from framework.schema.keys import every_key
from tests.folders import save_model

RECIPE = """
defaults: [{model: qwen3_0.6b}]
training: {per_device_train_batch_size: 4, gradient_accumulation_steps: 4}
"""
REQUESTS = [
    ("gpu=rtx4090_24gb", "training.optimizer=adamw_torch"),
    ("gpu=h100_80gb", "gpu.count=2", "fsdp.enable_fsdp=true"),
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            ("gpu=a100_40gb", "training.task=preference", "training.optimizer=sgd"),
            ("gpu=rtx3060_12gb", "peft=qlora"),
            ("gpu=cpu", "peft=lora"),
        )
    ),
]
PHASES = (None, "load", "forward", "loss", "backward", "optimizer_step", "eval", "save", "resume")


def problems(arguments, needs=CHECK):
    return [str(problem) for problem in check_request(arguments[0], arguments[1:], None, needs).problems]


@pytest.mark.parametrize("arguments", REQUESTS, ids=" ".join)
def test_what_explain_proposes_for_a_run_composes_with_it(arguments, write):
    write(RECIPE)
    proposals = propose(resolve(compose("r.yaml", arguments).config))
    assert len(proposals) > 5
    refused = {each.override: problems(["r.yaml", *arguments, *shlex.split(each.override)]) for each in proposals}
    assert {override: message for override, message in refused.items() if message} == {}


def test_what_explain_proposes_without_a_run_composes_with_a_plain_recipe(write):
    write(RECIPE)
    found = {move.override for phase in PHASES for cause in Cause for move in rank_moves(None, phase, cause)}
    assert len(found) > 8
    plain = ["r.yaml", "gpu=h100_80gb", "training.gradient_accumulation_steps=1"]
    refused = {override: problems([*plain, *shlex.split(override)]) for override in found}
    assert {override: message for override, message in refused.items() if message} == {}


def test_a_key_that_check_proposes_is_one(write):
    """Each key of a section, in one request, without one of its letters."""
    write(RECIPE)
    keys = [key for key in every_key() if key.count(".") == 1]
    middles = {key: (len(key.partition(".")[0]) + len(key)) // 2 for key in keys}
    misspelt = {f"{key[:at]}{key[at + 1 :]}": key for key, at in middles.items()}
    found = check_request("r.yaml", [f"{word}=null" for word in misspelt if word not in keys], None, CHECK).problems
    proposed = {problem.key: problem.nearest for problem in found if problem.key in misspelt}
    assert len(proposed) > 100
    assert {word: nearest for word, nearest in proposed.items() if nearest not in every_key()} == {}


@pytest.mark.parametrize(
    "more",
    [(), ("training.run_name='a b#c=d'",), ("gpu=h100_80gb", "data.train=[{path: 'a b.jsonl'}]"), ("gpu.count=2",)],
    ids=str,
)
def test_the_search_that_plan_proposes_is_a_request(more, write):
    write("model: {load_pretrained_weights: false, architecture: {model_type: llama, hidden_size: 64}}\n", "a b.yaml")
    Path("a b.jsonl").write_text('{"text": "a"}\n')
    composition = compose("a b.yaml", more)
    command = _fit_command("a b.yaml", more, None, composition)
    tunesmith, fit, *arguments = shlex.split(command.replace("\\\n", ""))
    assert (tunesmith, fit) == ("tunesmith", "fit")
    assert problems(arguments, PLAN) == []
    assert compose(arguments[0], arguments[1:]).config.model_dump() == composition.config.model_dump()


@pytest.mark.parametrize("word", ["./base", "base", "base/config.json"])
def test_a_model_in_place_of_a_recipe(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}')
    (problem,) = check_request(word).problems
    assert "not a recipe" in problem.message
    recipe, override = str(problem.nearest).split()
    assert recipe == "finetune_local"
    assert override.removeprefix("model.model_name=") in ("base", "./base")
    assert problems([recipe, override, "gpu=cpu"]) == []


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("r.yaml", "./r.yaml"), ("r/config.yaml", "./r/config.yaml"), ("r/recipe.yaml", "./r/recipe.yaml")],
)
def test_a_folder_in_place_of_a_recipe(name, nearest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / name).write_text(RECIPE)
    (problem,) = check_request("./r").problems
    assert ("is a folder" in problem.message, problem.nearest) == (True, nearest)
    assert problems([nearest, "gpu=cpu"]) == []
