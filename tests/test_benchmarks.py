"""Scripts for a card cannot run here, but what they ask for can be checked."""

import importlib.util
from pathlib import Path

import pytest

from framework.build.loading.model import read_architecture
from framework.checks import PLAN, check
from framework.memory.cards import read_card
from tests.grids import slow

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TASKS = script("tasks_card")


@pytest.mark.parametrize("tiny", [True, slow(False)])
@pytest.mark.parametrize("row", TASKS.ROWS)
def test_each_task_is_asked_for_as_it_may_be(row, tiny, monkeypatch):
    monkeypatch.setattr(TASKS, "detect", lambda: "h100_80gb")
    config = TASKS.config_of(row, tiny)
    check(config, PLAN)
    assert config.gpu.name == ("cpu" if tiny else read_card("h100_80gb")["name"])
    assert read_architecture(config).model_type == config.model.architecture["model_type"]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_loader_is_measured_on_a_run_that_may_be(streaming, monkeypatch):
    loader = script("loader_wait")
    monkeypatch.setattr(loader, "detect", lambda: "h100_80gb")
    check(loader.config_of(False, streaming, 30))


@pytest.mark.parametrize("size", ["small", "large", "card"])
def test_saves_are_measured_on_runs_that_may_be(size, monkeypatch):
    script_of = script("async_save")
    monkeypatch.setattr(script_of, "detect", lambda: "h100_80gb")
    for is_async in (False, True):
        check(script_of.config_of(size, is_async), PLAN)


def test_loss_curves_are_asked_for_as_they_may_be(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    curves = script("loss_curves")
    monkeypatch.setattr(curves, "MODEL", [*curves.MODEL, "gpu=h100_80gb"])
    for variant in curves.VARIANTS.values():
        config, architecture = curves.config_of(variant, None, 20)
        check(config, PLAN)
        assert architecture.num_hidden_layers == curves.LAYERS
        assert config.training.use_peft is variant.is_adapter
        assert variant.against in curves.VARIANTS
