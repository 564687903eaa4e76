"""A run folder read again: whole, cut short, damaged, or no run's."""

import json
import math
import re

import pytest

from framework.errors import RequestError
from framework.reports.run_files import Series, read_run
from framework.reports.run_page import run_page
from tests.grids import thinned
from tests.reports.plans import GIB, PLAN
from tests.reports.runs import REPAIR, checkpoint, config, evaluation, export, make_run, step, write_memory


def test_a_whole_run_lacks_nothing(tmp_path):
    folder = make_run(tmp_path / "mine", [evaluation(0, 3.5), step(1), step(2), evaluation(2, 2.5)])
    write_memory(folder, 2, repairs=[REPAIR], growth={"per_step": 7, "step": 2, "full_at": 9})
    export(folder)
    checkpoint(folder, 2)
    run = read_run(folder)
    assert run.lacks == ()
    assert (run.name, run.plan, run.checkpoints, run.is_exported) == ("mine", PLAN, (2,), True)
    assert run.config is not None
    assert run.config.batch.global_size == 8
    assert run.environment is not None
    assert run.environment.git == "1bfc1f2a-dirty"
    assert run.metrics.trained("loss") == Series(((1, 2.99), (2, 2.98)))
    assert run.metrics.evaluated("eval_loss") == Series(((0, 3.5), (2, 2.5)))
    assert run.memory is not None
    found = {pair.name: (pair.predicted, pair.measured, pair.error) for pair in (*run.memory.phases, run.memory.peak)}
    assert found == {
        "load": (2 * GIB, 2 * GIB, 0.0),
        "backward": (18.5 * GIB, 18 * GIB, pytest.approx(0.5 / 18, abs=1e-6)),
        "optimizer_step": (10 * GIB, None, None),
        "eval": (None, 7 * GIB, None),
        "peak of the run": (18.5 * GIB, 18 * GIB, pytest.approx(0.5 / 18, abs=1e-6)),
    }
    assert run.memory.repairs[0].after == 2
    assert (run.memory.is_of_card, run.memory.last_step, run.memory.growth_bytes) == (True, 2, 7)


def test_on_the_cpu_nothing_is_of_a_card(tmp_path):
    folder = make_run(tmp_path / "mine", [step(1)])
    write_memory(folder, 1, baseline=GIB)
    memory = read_run(folder).memory
    assert memory is not None
    assert not memory.is_of_card
    assert memory.peak.measured == 18 * GIB, "what the process held before is taken off"


def test_values_that_are_not_finite_are_steps_and_no_values(tmp_path):
    odd = [step(1), step(2, loss=math.nan), step(3, loss=math.inf), step(4, loss=10**400), step(5, loss=None)]
    run = read_run(make_run(tmp_path / "mine", odd))
    assert run.metrics.trained("loss") == Series(((1, 2.99),), (2, 3, 4))
    assert len(run.metrics.trained("grad_norm").points) == 5


def test_lines_that_are_not_whole_are_left_out_and_reported(tmp_path):
    folder = make_run(tmp_path / "mine", [step(1), step(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"loss": 2}\n{"step": "3", "loss": 2}\n\n{"step": true}\n{"step": 3, "lo')
    run = read_run(folder)
    assert run.metrics.last_step == 2
    assert "metrics.jsonl: 5 lines are incomplete, and skipped" in run.lacks


def test_of_two_lines_of_a_step_the_later_counts(tmp_path):
    run = read_run(make_run(tmp_path / "mine", [step(1), step(2), step(2, loss=9.0)]))
    assert run.metrics.trained("loss").points == ((1, 2.99), (2, 9.0))


@pytest.mark.parametrize(
    ("text", "name"),
    thinned(
        [None, "{", "[1]", '{"schema_version": 1, "device": {"sise": 3}}', "7", '"\\ud800"'],
        ["config.yaml", "plan.json", "environment.json", "memory.json"],
    ),
)
def test_a_file_that_cannot_be_read_is_reported_and_the_others_are_read(tmp_path, name, text):
    folder = make_run(tmp_path / "mine", [step(1)])
    write_memory(folder, 1)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    run = read_run(folder)
    assert [line.partition(".")[0] for line in run.lacks] == [name.partition(".")[0]]
    assert run.metrics.last_step == 1
    found = {"config": run.config, "plan": run.plan, "environment": run.environment, "memory": run.memory}
    assert [key for key, value in found.items() if value is None] == [name.partition(".")[0]]


@pytest.mark.parametrize(
    ("value", "name"),
    thinned(
        ["NaN", "Infinity", "9" * 400, "1e308", '"many"', "[1]", '{"a": 1}', "null", "true", "-3", "0"],
        ["plan.json", "memory.json", "environment.json", "metrics.jsonl"],
    ),
)
def test_numbers_of_another_kind_cost_no_page(tmp_path, name, value, monkeypatch):
    """Numbers of a file, one by one, are something else; the page says so, or has a gap there."""
    folder = make_run(tmp_path / "mine", [step(1), step(2)])
    write_memory(folder, 2)
    text = (folder / name).read_text()
    numbers = list(re.finditer(r"(?<=: )-?\d[\d.e-]*", text))
    monkeypatch.setattr("framework.reports.run_files.load_of_run", lambda file: config())
    for found in numbers if name == "metrics.jsonl" else numbers[::7]:
        (folder / name).write_text(text[: found.start()] + value + text[found.end() :])
        page = run_page(read_run(folder))
        assert page.endswith("</html>\n")
        assert not re.search(r'="[^"]*\b(nan|inf)\b', page)


@pytest.mark.parametrize("name", ["plan.json", "memory.json", "environment.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_file_that_is_nested_too_deep_is_reported(tmp_path, name, text):
    folder = make_run(tmp_path / "mine", [step(1)])
    write_memory(folder, 1)
    (folder / "oom.txt").write_text("phase: backward\nstep: 1\n\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    (folder / name).write_text(text)
    run = read_run(folder)
    assert [line.partition(" ")[0].rstrip(":") for line in run.lacks] == [name]
    assert run_page(run)


def test_what_a_file_says_instead_is_named(tmp_path):
    folder = make_run(tmp_path / "mine", [step(1)])
    document = json.loads((folder / "plan.json").read_text())
    document["phases"][1]["terms"]["weights"] = "many"
    (folder / "plan.json").write_text(json.dumps(document))
    write_memory(folder, 1)
    assert read_run(folder).lacks == ("plan.json cannot be read: TypeError phases.terms.weights is 'many'",)


def test_what_is_no_run_names_the_intended_run(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in ("mine", "mine-2"):
        make_run(runs / name, [step(1)])
    export(runs / "mine")
    (tmp_path / "empty").mkdir()
    meant = {
        runs / "mime": str(runs / "mine"),
        runs: f"{runs / 'mine'}, {runs / 'mine-2'}",
        runs / "mine" / "final": str(runs / "mine"),
        runs / "mine" / "metrics.jsonl": str(runs / "mine"),
        tmp_path / "empty": None,
    }
    for folder, nearest in meant.items():
        with pytest.raises(RequestError) as caught:
            read_run(folder)
        [problem] = caught.value.problems
        assert (problem.nearest, problem.key) == (nearest, "RUN")
        assert str(folder) in problem.message


def test_a_recipe_next_to_its_data_is_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text("training: {max_steps: 3}\n")
    with pytest.raises(RequestError, match="is no run folder"):
        read_run(tmp_path)


def test_a_config_of_another_version_is_shown_as_it_is(tmp_path):
    folder = make_run(tmp_path / "mine", [step(1)])
    (folder / "config.yaml").write_text("training: {a_key_of_later: 3}\n")
    run = read_run(folder)
    assert run.config is None
    assert "a_key_of_later" in run.config_text
    assert "a_key_of_later" in run.lacks[0]


def test_plans_are_read_with_what_the_levers_save(tmp_path):
    folder = make_run(tmp_path / "mine", [])
    assert "levers" in json.loads((folder / "plan.json").read_text())
    assert read_run(folder).plan == PLAN
