"""docs/preference.md and docs/distillation.md: what they run runs, and what they say of keys and losses is so."""

import re
from pathlib import Path

import pytest

import framework
from framework.run import trainer
from framework.schema.choices import Divergence, PreferenceLoss
from framework.schema.keys import uses_of
from framework.schema.objectives import DEFAULT_BETA, PreferenceParams

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Runs the page's program in a folder of its own, without the plan next to it; gives its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)
    original = framework.train

    def run(page):
        (text,) = blocks(page, "python")
        names = {}
        monkeypatch.setattr("framework.train", lambda *args, **options: original(*args, **options, plan=False))
        exec(compile(text, page, "exec"), names)
        return names

    return run


def test_the_preference_page_learns_what_it_says(program, capsys):
    names = program("preference.md")
    assert names["after"]["reward_margin"] > names["before"]["reward_margin"]
    assert names["after"]["reward_accuracy"] == 1.0
    assert len(capsys.readouterr().out.split()) == 3


def test_the_distillation_page_learns_what_it_says(program):
    evals = program("distillation.md")["run"].evals
    assert evals[-1]["divergence"] < 0.5 * evals[0]["divergence"]


def _read_by(loss):
    """The keys that only some losses read, this one among them."""
    uses = {key: uses_of(f"training.preference.{key}")[1:] for key in PreferenceParams.model_fields}
    return {key for key, (*_, last) in ((key, use) for key, use in uses.items() if use) if last.fits(loss)}


def test_every_loss_and_its_keys_are_on_the_page():
    page = (DOCS / "preference.md").read_text()
    for loss in PreferenceLoss:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{loss}` |"))
        assert f"`beta` {DEFAULT_BETA[loss]:g}" in line
        assert all(f"`{key}`" in line for key in _read_by(loss) - {"precompute_reference"})
    assert all(f"| `{kind}` |" in (DOCS / "distillation.md").read_text() for kind in Divergence)
