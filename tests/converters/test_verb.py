"""`tunesmith convert`: the recipe on stdout, the rest on stderr, nothing heavy loaded."""

import re
from pathlib import Path

from framework.cli import main


def test_the_recipe_is_on_stdout_and_what_is_left_on_stderr(tmp_path, capsys) -> None:
    file = tmp_path / "theirs.yml"
    file.write_text("base_model: a/b\nlearning_rate: 1e-4\nsequence_len: 512\nplot_everything: 1\n")
    assert main(["convert", str(file)]) == 0
    captured = capsys.readouterr()
    recipe = tmp_path / "ours.yaml"
    recipe.write_text(captured.out)
    assert f"{file}:4: plot_everything: 1: no equivalent" in captured.err
    assert "3 of 4 values of Axolotl are carried" in captured.err
    assert main(["check", str(recipe), "--quick"]) == 0


def test_a_refusal_exits_2_and_prints_no_recipe(tmp_path, capsys) -> None:
    file = tmp_path / "theirs.yml"
    file.write_text("base_model: a/b\nrl: grpo\n")
    assert main(["convert", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file}:2" in captured.err
    assert "Traceback" not in captured.err
    assert main(["convert", str(tmp_path / "none.yml")]) == 2


def test_the_page_shows_what_is_printed(tmp_path, capsys, monkeypatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    theirs, ours = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (blocks,) = re.findall(r"```text\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    Path("theirs.yml").write_text(theirs)
    assert main(["convert", "theirs.yml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ours
    assert captured.err == blocks
