"""Installed libraries of unsupported versions are reported before they are imported."""

import sys
from importlib.metadata import PackageNotFoundError, requires

import pytest
from packaging.requirements import Requirement

from framework import installation
from framework.cli import main

INSTALLED = {"torch": "2.13.0+cu130", "transformers": "5.24.0", "peft": "0.21.0", "accelerate": "1.15.0"}


def found(monkeypatch, **changes):
    installed = {**INSTALLED, **changes}

    def version(name):
        if installed[name] is None:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(installation, "version", version)
    return installation.version_problems()


def test_the_supported_ones_are_no_problem(monkeypatch):
    assert found(monkeypatch) == []
    assert found(monkeypatch, torch="2.14.0a0+git1234", transformers="5.17.0") == []


@pytest.mark.parametrize(("name", "version"), [("transformers", "4.57.1"), ("torch", "2.10.0"), ("peft", "0.17.1")])
def test_another_version_is_reported_with_the_range_that_is_needed(monkeypatch, name, version):
    [problem] = found(monkeypatch, **{name: version})
    wanted = next(item for text in requires("tunesmith") if (item := Requirement(text)).name == name)
    assert version in problem.message
    assert str(wanted) in problem.expected


def test_all_that_is_wrong_is_reported_at_once(monkeypatch):
    assert len(found(monkeypatch, torch="1.0", transformers="4.57.1", accelerate=None)) == 3


@pytest.mark.parametrize("verb", ["check", "plan", "fit", "train", "data", "doctor", "predict", "merge", "evaluate"])
def test_every_verb_that_loads_them_exits_2(monkeypatch, capsys, verb):
    found(monkeypatch, transformers="4.57.1")
    arguments = {"doctor": [], "predict": ["run", "rows.jsonl"], "merge": ["run"], "evaluate": ["run"]}.get(
        verb, ["quickstart"]
    )
    assert main([verb, *arguments]) == 2
    assert "transformers 4.57.1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list", "gpus"], ["show", "quickstart"], ["check", "quickstart", "--quick"]])
def test_what_loads_none_of_them_does_not_ask(monkeypatch, capsys, arguments):
    found(monkeypatch, transformers="4.57.1")
    assert main(arguments) == 0


def test_python_is_warned_as_well(monkeypatch):
    import framework

    found(monkeypatch, transformers="4.57.1")
    with pytest.raises(framework.RequestError, match="transformers"):
        framework.train(framework.TrainingConfig())
    monkeypatch.delitem(sys.modules, "framework.build.assembly", raising=False)  # asked before it is imported
    with pytest.raises(framework.RequestError, match="transformers"):
        _ = framework.Assembly
    with pytest.raises(framework.RequestError, match="transformers"):
        framework.plan(framework.TrainingConfig())
