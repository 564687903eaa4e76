"""Calls of trackers, with stand-ins of their packages: project, name, config, figures; and one that fails."""

import importlib.machinery
import sys
import types

import pytest
from accelerate.state import PartialState

from framework.errors import RequestError
from framework.run.record.run_folder import RunFolder
from framework.run.record.trackers import Trackers
from framework.schema.config import TrainingConfig


class Told:
    """A package, a run of it and a config of it at once: notes each call."""

    def __init__(self) -> None:
        self.calls = []
        self.config = self

    def __getattr__(self, name):
        def call(*args, **values):
            self.calls.append((name, args, values))
            return self

        return call

    def __setitem__(self, key, value):
        self.calls.append((key, (value,), {}))

    def named(self, name):
        return [(args, values) for called, args, values in self.calls if called == name]


@pytest.fixture
def package(monkeypatch, request):
    """The stand-in of one package."""
    PartialState()
    calls = Told()
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.__version__ = "9.9.9"
    module.__getattr__ = lambda name: getattr(calls, name)  # type: ignore[method-assign]
    module.config = calls
    module.utils = types.SimpleNamespace(
        validation=types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
    )
    module.search_experiments = lambda **_: []
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param, calls


STARTS = {
    "wandb": ("init", {"project": "P", "name": "R"}),
    "swanlab": ("init", {"project": "P", "experiment_name": "R"}),
    "trackio": ("init", {"project": "P", "name": "R"}),
    "comet_ml": ("start", {"project_name": "P"}),
    "mlflow": ("start_run", {"run_name": "R"}),
}


def config(name, **training):
    return TrainingConfig(training={"trackers": [name], "tracker_project": "P", "run_name": "R", **training})


@pytest.mark.parametrize("package", STARTS, indirect=True)
def test_a_tracker_gets_project_name_config_and_figures(package, tmp_path):
    name, calls = package
    started, expected = STARTS[name]
    trackers = Trackers(config(name, learning_rate=0.25), RunFolder(tmp_path), pytest.fail)
    (_, values), *_ = calls.named(started)
    assert expected.items() <= values.items()
    if name == "comet_ml":
        assert calls.named("set_name") == [(("R",), {})]
    if name == "mlflow":
        assert calls.named("create_experiment")[0][1]["name"] == "P"
    stored = str(calls.calls)
    assert "'training.learning_rate': 0.25" in stored
    trackers.log({"loss": 1.5, "grad_norm": None}, 3)
    called = {"mlflow": "log_metrics", "comet_ml": "log_metric"}.get(name, "log")
    (args, values), *_ = calls.named(called)
    assert "1.5" in str(args)
    assert "grad_norm" not in str(args)
    assert values.get("step", 3) == 3
    trackers.close()


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
def test_one_that_does_not_start_is_an_error_before_the_first_step(package, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError("no server")

    monkeypatch.setattr(sys.modules["trackio"], "init", refuse, raising=False)
    with pytest.raises(RequestError, match=r"training\.trackers\[0\]: trackio cannot be started: OSError: no server"):
        Trackers(config("trackio"), RunFolder(tmp_path), pytest.fail)


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_one_that_fails_later_is_left_out_and_reported(package, tmp_path, monkeypatch):
    _, calls = package
    messages = []
    trackers = Trackers(config("wandb"), RunFolder(tmp_path), messages.append)
    monkeypatch.setattr(calls, "log", lambda *_, **__: 1 / 0, raising=False)
    trackers.log({"loss": 1.0}, 1)
    trackers.log({"loss": 1.0}, 2)
    assert messages == ["warning   wandb is dropped from step 1 on: ZeroDivisionError: division by zero"]


def test_tensorboard_writes_into_the_run_folder_alone(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    PartialState()
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    trackers = Trackers(config("tensorboard", run_name="elsewhere"), RunFolder(folder), pytest.fail)
    trackers.log({"loss": 1.0}, 1)
    trackers.log_texts({"samples/1": "a text"}, 1)
    trackers.close()
    assert [path.name for path in folder.iterdir()] == ["tensorboard"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
