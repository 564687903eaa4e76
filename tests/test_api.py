"""The public names, from Python: pinned, typed by names that are public too, and as docs/python.md shows them."""

import ast
import collections.abc
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import typing
import zipfile
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

import framework
import tunesmith
from framework import api
from framework.memory.search.found import Change, Found
from framework.memory.units import size
from framework.run.planning import plan_pool
from tests.reports.plans import GIB, PLAN, on

ROOT = Path(__file__).parents[1]
FUNCTIONS = (
    *("assemble", "check", "convert", "evaluate", "explain", "export_gguf", "fit", "load", "merge", "plan", "predict"),
    *("push", "report", "to_yaml", "train", "train_step"),
)
RESULTS = (
    *("Assembly", "Conversion", "Explanation", "Found", "Merged", "Metrics", "Plan", "Problem", "RunResult"),
    *("StepResult", "PythonRows", "Objective", "Evaluated", "Exported", "Pushed"),
)
CONFIG = (
    *("AllocatorParams", "Batch", "DataParams", "DatasetParams", "DistillationParams", "FSDPParams", "GPUParams"),
    *("HostParams", "ParameterGroup", "RopeScaling", "RopeType", "LoraInit", "EmaDevice"),
    *("GradientCheckpointingKwargs", "ModelParams", "PeftParams", "PreferenceParams", "TeacherParams"),
    *("TokenizerTraining", "TrainingConfig", "TrainingParams"),
    *("Attention", "BackwardPrefetch", "CheckpointingPolicy", "CompileScope", "Divergence", "Fp8", "MixedPrecision"),
    *("Mixing", "OnOutOfMemory", "Optimizer", "OptimizerOffload", "PeftMethod", "PeftSaveMode", "PreferenceLoss"),
    *("Quantization", "Rounding", "RowFormat", "Scheduler", "SdpaBackend", "ShardingStrategy", "StateDictType"),
    *("Supervise", "Task", "TorchDtype", "Tracker", "Truncation"),
)
ERRORS = (
    *("BrokenRows", "DoesNotFit", "Interrupted", "NonFinite", "OutOfMemory", "RequestError", "SaveFailed"),
    *("TrainingStopped", "TunesmithError", "VerificationFailed", "WorkersLost"),
)


def test_the_public_names_are_these() -> None:
    assert set(framework.__all__) == {*FUNCTIONS, *RESULTS, *CONFIG, *ERRORS}
    assert len(framework.__all__) == len(set(framework.__all__))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_takes_and_gives_is_public(name: str) -> None:
    """Each annotation is made of public names and those of the standard library, and of torch's tensors."""
    function = getattr(framework, name)
    assert callable(function)
    assert inspect.getdoc(function)
    known = {name: getattr(framework, name) for name in framework.__all__}
    known |= {**vars(collections.abc), **vars(typing), "Path": pathlib.Path, "Tensor": object}
    for annotation in function.__annotations__.values():
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        text = re.sub(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])", "", text)
        names = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
        assert names <= {*known, *dir(__builtins__), *__builtins__}, f"{name}: {annotation}"


@pytest.mark.parametrize("name", ["train", "predict", "train_step"])
def test_each_argument_of_a_docstring_has_its_line(name: str) -> None:
    """Text that is wrapped anew easily joins them."""
    function = getattr(framework, name)
    _, _, after = inspect.getdoc(function).partition("Args:\n")
    listed = after.partition("\n\n")[0]
    named = "|".join(inspect.signature(function).parameters)
    lines = re.findall(rf"^    ({named}): ", listed, re.MULTILINE)
    assert lines == re.findall(rf"(?<!`)\b({named}): ", listed)
    assert len(lines) > 1


def test_every_section_and_choice_of_the_config_is_public() -> None:
    def classes(kind: typing.Any) -> collections.abc.Iterator[type]:
        for part in get_args(kind) if get_origin(kind) else (kind,):
            if get_origin(part):
                yield from classes(part)
            elif isinstance(part, type) and part.__module__.startswith("framework.schema."):
                yield part
                if issubclass(part, BaseModel):
                    yield from (inner for field in part.model_fields.values() for inner in classes(field.annotation))

    found = {kind.__name__ for kind in classes(framework.TrainingConfig)} - {"FrozenMapping"}
    assert len(found) > 30
    assert found <= set(framework.__all__)


def test_tunesmith_is_framework_by_another_name() -> None:
    assert tunesmith.__all__ == framework.__all__
    assert all(getattr(tunesmith, name) is getattr(framework, name) for name in framework.__all__)
    assert set(framework.__all__) <= set(dir(tunesmith))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tunesmith.nothing
    with pytest.raises(ModuleNotFoundError):  # else its classes would be loaded twice, none an instance of the other's
        __import__("tunesmith.schema")


@pytest.mark.fresh_process
def test_both_names_load_no_torch_and_run_as_modules(tmp_path) -> None:
    """From a wheel, whose files are all there is of the package here; `mypy` finds `py.typed` in both."""
    from hatchling.builders.wheel import WheelBuilder

    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name for path in (installed / "tunesmith").iterdir()} == {"__init__.py", "__main__.py", "py.typed"}
    assert not (installed / "framework" / "alias").exists()
    code = "import tunesmith, sys; tunesmith.plan, tunesmith.TrainingConfig; print('torch' in sys.modules, {})"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    for arguments, message in (
        (["-c", code.format("tunesmith.__file__")], f"False {installed / 'tunesmith' / '__init__.py'}\n"),
        (["-m", "tunesmith", "list", "gpus"], "h100_80gb"),
    ):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert message in done.stdout


def test_a_module_of_the_same_name_does_not_hide_a_function() -> None:
    """`import framework.report` would put the module in the function's place."""
    modules = {path.stem for path in (ROOT / "framework").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert not modules & set(framework.__all__)


def test_a_config_prints_what_differs_from_the_defaults() -> None:
    assert repr(framework.TrainingConfig()) == "TrainingConfig()"
    config = framework.TrainingConfig(training={"learning_rate": 1e-4}, data={"train": [{"path": "a.jsonl"}]})
    assert repr(config) == (
        "TrainingConfig(training=TrainingParams(learning_rate=0.0001), "
        "data=DataParams(train=(DatasetParams(path='a.jsonl'),)))"
    )


def test_a_plan_and_a_proposal_are_a_line_or_tables() -> None:
    plan = on(24)
    assert repr(plan).startswith(f"<Plan: fits on {plan.device.name}: {size(plan.peak.device_bytes)}, up to ")
    assert "does not fit" in repr(on(1))
    page = plan._repr_html_()
    assert page.count("<table>") == 2
    assert all(f"<td>{phase.name}</td><td>{size(phase.allocated_bytes)}</td>" in page for phase in plan.phases)
    change = Change("training.optimizer", "adamw_torch", "<lion>", 2 * GIB, 0.25, False, "smaller states")
    found = Found(framework.TrainingConfig(), plan, None, (change,), (), 3, 1, remarks=())
    assert repr(found) == f"<Found: training.optimizer=<lion>; {plan!r}>"
    row = (
        "<td>training.optimizer: adamw_torch -&gt; &lt;lion&gt;</td><td>-2.00 GiB</td><td>+0.250 s</td><td>CHANGED</td>"
    )
    assert row in found._repr_html_()
    assert found._repr_html_().endswith(page)


def test_a_plan_of_what_is_auto_says_what_replaced_it(monkeypatch) -> None:
    monkeypatch.setattr(plan_pool.Rehearsals, "tried", lambda _, asked: [PLAN] * len(asked))
    config = framework.TrainingConfig(training={"optimizer": "auto", "max_steps": 1}, gpu={"name": "cpu"})
    added = framework.plan(config).assumptions[len(PLAN.assumptions) :]
    assert any(line.startswith("auto training.optimizer=") for line in added)
    assert framework.plan(framework.TrainingConfig()) == PLAN


def test_a_report_is_written_where_it_says(tmp_path) -> None:
    with pytest.raises(framework.RequestError):
        framework.report(tmp_path)
    with pytest.raises(framework.RequestError, match="no folder"):
        framework.report(str(tmp_path), tmp_path / "none" / "page.html")


def test_an_assembly_needs_a_length_and_what_can_be_built() -> None:
    config = framework.TrainingConfig(model={"architecture": {"model_type": "llama"}})
    with pytest.raises(framework.RequestError, match="schedule"):
        framework.assemble(config)
    with pytest.raises(framework.RequestError, match="auto"):
        framework.assemble(framework.TrainingConfig(training={"optimizer": "auto", "max_steps": 1}))


def test_the_page_does_what_it_shows(tmp_path, monkeypatch, capsys) -> None:
    """Its blocks are one program. The search and the plans, which take a minute, are made by hand."""
    monkeypatch.chdir(tmp_path)
    config = framework.load("quickstart", ["gpu=rtx4090_24gb"])
    monkeypatch.setattr(plan_pool.Rehearsals, "tried", lambda _, asked: [PLAN] * len(asked))
    asked = inspect.signature(api.fit)
    found = Found(config, PLAN, None, (), (), 1, 1)
    monkeypatch.setattr(api, "fit", lambda *arguments, **names: asked.bind(*arguments, **names) and found)
    trained, wanted = api.train, []
    monkeypatch.setattr(
        api, "train", lambda *arguments, **names: wanted.append(names) or trained(*arguments, **names, plan=False)
    )
    page = (ROOT / "docs" / "python.md").read_text()
    names: dict[str, typing.Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block, names)
    run = names["run"]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert names["losses"] == [line["loss"] for line in lines if "loss" in line]
    assert names["evals"] == [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert [folder.name for folder in names["saved"]] == ["step-00000010", "step-00000020"]
    assert len(names["losses"]) == run.steps == 20
    assert [value["eval_loss"] for value in run.evals] == names["evals"]
    output = capsys.readouterr().out
    assert f"<RunResult: 20 steps in {run.folder}, eval_loss " in output
    assert "True True step-00000020" in output
    assert "True 128 32" in output
    assert names["page"].read_text().startswith("<!DOCTYPE html>")
    own = names["own"].folder
    assert json.loads((own / "environment.json").read_text())["optimizer"] == "torch.optim.radam.RAdam"
    theirs = map(json.loads, (own / "metrics.jsonl").read_text().splitlines())
    first = next(line["loss"] for line in theirs if "loss" in line)
    assert first == pytest.approx(0.5 * names["losses"][0], rel=1e-6)


def test_the_version_is_that_of_the_distribution() -> None:
    assert framework.__version__ == tunesmith.__version__ == importlib.metadata.version("tunesmith")


def test_every_public_function_and_result_is_on_the_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert all(f"`{name}`" in page for name in (*FUNCTIONS, *RESULTS))
