"""The pages about data and tasks: what they tell to write composes, passes the check and reads rows; what they tell to
type is understood; and keys, row formats and answers that they name exist."""

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import framework
from framework.build.data.prepare import read_splits
from framework.build.text.format_table import FORMATS
from framework.build.text.row_formats import tasks_for
from framework.checks import TRAIN, check_request
from framework.cli.app import app
from framework.installation import shipped
from framework.run.predict import _one
from framework.schema.choices import RowFormat
from framework.schema.config import TrainingConfig

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    *("quickstart.md", "data.md", "preference.md", "distillation.md", "classification.md", "adapters.md"),
    "trackers.md",
    "regularization.md",
)
ROWS = {
    "chats.jsonl": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "code.jsonl": {"text": "a = 1"},
    "pairs.jsonl": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "tickets.jsonl": {"text": "where is it", "label": "delivery"},
}
"""Files that recipes of the pages name, and a row of each."""
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
"""The config of `runs/sft/final`, which recipes name as an adapter."""
PRESETS = "defaults: [model: llama3.2_1b, optimizer: adamw_torch_fused]\n"
"""Presets for a block that is only a part of a recipe."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


RECIPES = [(page, text) for page in PAGES for text in blocks(page, "yaml")]
NAMED = [
    (page, key)
    for page in PAGES
    for key in re.findall(r"`((?:training|model|peft|fsdp|data|gpu)\.[a-z_.]+)", (DOCS / page).read_text())
]


def commands(page: str) -> list[str]:
    """Arguments after `tunesmith` in blocks and within lines."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^(?:    |\$ )tunesmith (.*)$", text, re.M)
    return [*blocks, *re.findall(r"`tunesmith ([^`]+)`", text)]


TYPED = [(page, words) for page in PAGES for words in commands(page)]


def test_each_page_has_a_recipe_and_commands_are_found() -> None:
    assert {page for page, _ in RECIPES} == set(PAGES)
    assert {arguments.split()[0] for _, arguments in TYPED} >= {"data", "check", "train", "predict"}


@pytest.mark.parametrize(("page", "text"), RECIPES)
def test_what_is_to_be_written_passes_the_check_and_reads_its_rows(page, text, write) -> None:
    for name, row in ROWS.items():
        write("".join(json.dumps(row) + "\n" for _ in range(60)), name)
    Path("runs/sft/final").mkdir(parents=True)
    write(json.dumps(ADAPTER), "runs/sft/final/adapter_config.json")
    is_whole = "defaults" in yaml.safe_load(text)
    report = check_request(write(text if is_whole else PRESETS + text), needs=TRAIN)
    assert report.problems == ()
    assert report.composition is not None
    assert len(read_splits(report.composition.config).train) >= 50


@pytest.mark.parametrize(("page", "arguments"), TYPED)
def test_what_is_to_be_typed_is_understood(page, arguments) -> None:
    verb, *rest = shlex.split(arguments.partition(" > ")[0].partition("   #")[0])
    command = get_command(app).commands[verb]
    asked = command.make_context(verb, rest).params
    recipe = asked.get("recipe")
    if recipe is not None and recipe != "RECIPE":
        report = check_request(recipe, asked["overrides"] or ())
        assert report.problems == ()


@pytest.mark.parametrize(("page", "key"), sorted(set(NAMED)))
def test_a_key_that_is_named_is_there(page, key) -> None:
    kind = TrainingConfig
    for name in key.rstrip(".").split("."):
        fields = getattr(kind, "model_fields", {})
        assert name in fields, f"{page}: {key}"
        kind = fields[name].annotation
        kind = next((part for part in getattr(kind, "__args__", ()) if hasattr(part, "model_fields")), kind)


def test_forms_are_as_the_table_says() -> None:
    found = {}
    for line in (DOCS / "data.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and cells[0].strip("` ") in FORMATS:
            found[cells[0].strip("` ")] = cells[1:]
    assert set(found) == {str(row_format) for row_format in FORMATS}
    for name, (columns, tasks) in found.items():
        row_format = FORMATS[RowFormat(name)]
        needs, _, also = (re.sub(r"\([^)]*\)", "", columns)).partition("[")
        if row_format.name is not RowFormat.LABELLED:  # whose columns have other names as well
            assert set(re.findall(r"`(\w+)`", needs)) == set(row_format.needs)
            assert set(re.findall(r"`(\w+)`", also)) == set(row_format.also)
        assert set(re.findall(r"[a-z]+", re.sub(r"\([^)]*\)", "", tasks))) == set(map(str, tasks_for(row_format.name)))


def test_rows_from_python_are_given_as_train_takes_them(monkeypatch) -> None:
    (text,) = blocks("data.md", "python")
    called, signature = [], inspect.signature(framework.train)
    monkeypatch.setattr(
        framework, "train", lambda *arguments, **names: called.append(signature.bind(*arguments, **names))
    )
    exec(text, {"framework": framework, "config": TrainingConfig(), "rows": [], "rows_of_my_database": list})
    assert len(called) == text.count("framework.train(")


def test_an_answer_is_as_it_is_shown() -> None:
    (text,) = blocks("classification.md", "json")
    shown = json.loads(text)
    assert _one(list(shown["probabilities"]), list(shown["probabilities"].values())) == shown


def test_recipes_that_are_named_are_shipped() -> None:
    for page in PAGES:
        for name in re.findall(r"`model=([\w.]+)`", (DOCS / page).read_text()):
            assert (shipped("conf") / "model" / f"{name}.yaml").exists(), name
