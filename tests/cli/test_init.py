"""`tunesmith init`: the recipe that it writes for each kind of rows, and what it shows and refuses."""

import json
from pathlib import Path

import pytest
import yaml

from framework.checks import check_request
from framework.cli import main

ROWS = {
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "pretrain": {"text": "a = 1"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
    "classification": {"text": "where is it", "label": "delivery"},
}


@pytest.fixture
def shown(write, monkeypatch):
    """The parts of the recipe that were shown, in order; the plan says that it fits."""
    calls = []
    for verb, module in (("check", "look"), ("data", "look"), ("plan", "plan")):
        monkeypatch.setattr(
            f"framework.cli.{module}.{verb}",
            lambda recipe, arguments, verb=verb, **more: calls.append((verb, recipe, arguments, more)) or 0,
        )
    return calls


def rows(name: str) -> str:
    Path("rows.jsonl").write_text("".join(json.dumps(ROWS[name]) + "\n" for _ in range(60)))
    return "rows.jsonl"


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_each_kind_get_a_short_recipe_that_passes_the_check(shown, capsys, name):
    model = "modernbert_base" if name == "classification" else "qwen3_0.6b"
    assert main(["init", "--model", model, "--data", rows(name), "--gpu", "l4_24gb"]) == 0
    overrides = ["gpu=l4_24gb"]
    assert shown == [
        ("check", "recipe.yaml", overrides, {}),
        ("data", "recipe.yaml", overrides, {"rows": 3}),
        ("plan", "recipe.yaml", overrides, {}),
    ]
    assert capsys.readouterr().out.endswith("Next: tunesmith train recipe.yaml gpu=l4_24gb\n")
    text = Path("recipe.yaml").read_text()
    assert len(text.splitlines()) < 20
    assert Path(text.splitlines()[0].partition("$schema=")[2]).is_file()
    written = yaml.safe_load(text)
    assert written["training"]["task"] == ("preference" if name == "kto" else name)
    assert written["training"].get("preference", {}).get("loss_type") == {"preference": "dpo", "kto": "kto"}.get(name)
    assert not check_request("recipe.yaml", overrides).problems


def test_a_model_of_ones_own_is_named_and_an_adapter_chosen(shown):
    assert main(["init", "mine.yaml", "--model", "acme/model", "--data", rows("sft"), "--peft", "qlora"]) == 0
    written = yaml.safe_load(Path("mine.yaml").read_text())
    assert written["model"] == {"model_name": "acme/model"}
    assert {"peft": "qlora"} in written["defaults"]
    assert shown[-1] == ("plan", "mine.yaml", [], {})


def test_what_does_not_fit_is_reported_with_the_command_that_looks_on(shown, capsys, monkeypatch):
    monkeypatch.setattr("framework.cli.plan.plan", lambda recipe, arguments: 3)
    assert main(["init", "--model", "qwen3_8b", "--data", rows("sft")]) == 3
    assert capsys.readouterr().out.endswith("Next: tunesmith fit recipe.yaml\n")


def test_nothing_is_written_over_and_everything_missing_is_reported_at_once(shown, capsys):
    assert main(["init"]) == 2
    output = capsys.readouterr().err
    assert "--model" in output
    assert "--data" in output
    assert not Path("recipe.yaml").exists()
    Path("recipe.yaml").write_text("mine")
    assert main(["init", "--model", "qwen3_0.6b", "--data", rows("sft")]) == 2
    assert Path("recipe.yaml").read_text() == "mine"
    assert not shown


def test_what_is_no_yaml_file_is_not_written(shown, capsys):
    assert main(["init", "--model", "qwen3_0.6b", "--data", rows("sft"), "gpu=l4_24gb"]) == 2
    output = capsys.readouterr().err
    assert "gpu=l4_24gb is not a YAML file" in output
    assert "did you mean --gpu l4_24gb" in output
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_a_terminal_is_asked(shown, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["qwen3_0.6b", rows("sft")])
    monkeypatch.setattr("typer.prompt", lambda question: next(answers))
    assert main(["init"]) == 0
    assert "model: qwen3_0.6b" in Path("recipe.yaml").read_text()


def test_what_is_wrong_with_the_recipe_is_reported_and_the_recipe_kept(write, capsys):
    assert main(["init", "--model", "qwen3_0.6b", "--data", rows("sft"), "--gpu", "l4_24g"]) == 2
    output = capsys.readouterr().err
    assert "no preset is called 'l4_24g'" in output
    assert "recipe.yaml is written; mend this there, then: tunesmith check recipe.yaml gpu=l4_24g" in output
    assert Path("recipe.yaml").exists()
