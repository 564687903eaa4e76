"""A path that does not exist is reported with the one probably intended, wherever a path is accepted."""

import json
from pathlib import Path

import pytest

from framework.cli import main
from framework.paths import path_like


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs, rows, cards and templates, where the command is typed."""
    for folder in ("runs/mine_2", "runs/others", "plots"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("runs/mine_2/plan.json", "runs/mine_1.log", "rows.jsonl", "my_card.yaml", "chat.jinja", "recipe.yaml"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("runs/mine", "runs/mine_2"),
        ("run/mine_2", "runs/mine_2"),
        ("run/mine", "runs/mine_2"),
        ("runs/zebra", None),
        ("nowhere/at/all", None),
        ("a/" + 300 * "b", None),
        ("a\0b", None),
    ],
)
def test_the_intended_folder(here: Path, written: str, meant: str | None) -> None:
    assert path_like(Path(written), Path.is_dir) == meant
    absolute = path_like(here / written, Path.is_dir)
    assert absolute == (str(here / meant) if meant else None)


def test_endings_make_no_names_alike(here: Path) -> None:
    assert path_like(Path("b.yaml"), Path.is_file, (".yaml", ".yml")) is None
    assert path_like(Path("recipes.yml"), Path.is_file, (".yaml", ".yml")) == "recipe.yaml"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["explain", "runs/mine_1.lo"], "runs/mine_1.log"),
        (["explain", "runs/mine_1.log", "--run", "runs/mine"], "runs/mine_2"),
        (["explain", "-", "--run", "run/mine_2"], "runs/mine_2"),
        (["predict", "runs/mine_3/", "rows.jsonl"], "runs/mine_2"),
        (["merge", "run/mine_2"], "runs/mine_2"),
        (["show", "recpe.yaml"], "recipe.yaml"),
        (["convert", "recpe.yaml"], "recipe.yaml"),
        (["report", "run/mine_2"], "runs/mine_2"),
        (["show", "quickstart", "gpu=./my_cards.yaml"], "./my_card.yaml"),
        (["data", "quickstart", "data.train=[{path: row.jsonl}]"], "rows.jsonl"),
        (["data", "quickstart", "model.tokenizer_name=./run"], "./runs"),
    ],
)
def test_every_verb_names_it(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str) -> None:
    assert main([*arguments, *(["--json"] if arguments[0] in ("explain", "data", "plan", "fit") else [])]) == 2
    out, err = capsys.readouterr()
    if out:
        assert meant in [problem["nearest"] for problem in json.loads(out)["errors"]]
    else:
        assert f"did you mean {meant}" in err
