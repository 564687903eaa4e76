"""Completions that bash, zsh and fish get after Tab."""

from pathlib import Path

import pytest

from framework.cli import main

SHELLS = {
    "bash": lambda words: {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
    "zsh": lambda words: {"_TYPER_COMPLETE_ARGS": words},
    "fish": lambda words: {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


def offered(monkeypatch, capsys, arguments: str, shell: str = "fish") -> str:
    """Output for the text typed so far, with exit code 0."""
    for name, value in SHELLS[shell](arguments).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_TUNESMITH_COMPLETE", f"complete_{shell}")
    assert main([]) == 0
    return capsys.readouterr().out


def names(text: str) -> list[str]:
    return [line.partition("\t")[0] for line in text.splitlines() if line.strip()]


def test_recipes_and_files(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("chats.yaml").write_text("")
    Path("chats.jsonl").write_text("")
    Path("champ").mkdir()
    Path("champ/own.yml").write_text("")
    assert names(offered(monkeypatch, capsys, "tunesmith train ch")) == ["chat", "champ/", "chats.yaml"]
    assert names(offered(monkeypatch, capsys, "tunesmith plan champ/")) == ["champ/own.yml"]


@pytest.mark.parametrize(
    ("typed", "has", "lacks"),
    [
        ("mod", {"model=", "model."}, {"data="}),
        ("optimizer", {"optimizer=", "optimizer=lion"}, set()),
        ("gpu=h100", {"gpu=h100_80gb"}, {"gpu=h200_141gb"}),
        ("training.opt", {"training.optimizer=", "training.optimizer_offload="}, {"training.seed="}),
        (
            "training.optimizer=l",
            {"training.optimizer=lion", "training.optimizer=lion_8bit"},
            {"training.optimizer=sgd"},
        ),
        ("training.use_peft=", {"training.use_peft=true", "training.use_peft=false"}, set()),
        ("training.learning_r", {"training.learning_rate=", "training.learning_rate=5e-05"}, set()),
        ("training.preference.lo", {"training.preference.loss_type=dpo"}, set()),
        ("no.such=", set(), set()),
    ],
)
def test_groups_keys_and_their_values(monkeypatch, capsys, typed, has, lacks):
    found = set(names(offered(monkeypatch, capsys, f"tunesmith train chat gpu=cpu {typed}")))
    assert has <= found
    assert not lacks & found
    assert has or not found


def test_bash_is_given_a_value_alone_as_it_splits_words(monkeypatch, capsys):
    assert names(offered(monkeypatch, capsys, "tunesmith train chat peft = ql", "bash")) == ["qlora"]
    assert names(offered(monkeypatch, capsys, "tunesmith train cha", "bash")) == ["chat"]


def test_zsh_gets_the_purpose_of_each(monkeypatch, capsys):
    found = offered(monkeypatch, capsys, "tunesmith train chat peft=ql", "zsh")
    assert '"peft=qlora":"LoRA on a base in 4 bits' in found
    assert len(found.splitlines()) == 1
