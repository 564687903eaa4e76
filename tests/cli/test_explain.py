"""`tunesmith explain`: run folders, logs and standard input; exit codes and the JSON document."""

import copy
import io
import json
import os
import sys

import pytest

from framework import explain as explain_here
from framework.cli import main
from framework.memory.explain import evidence
from framework.memory.explain.text import explanation_lines
from tests.cli.test_front_rooms import HEAVY, loaded
from tests.memory.explain.test_moves import FULL, lever, plan

KEYS = {
    "schema_version", "kind", "phase", "cause", "request_bytes", "capacity_bytes", "free_bytes", "allocated_bytes",
    "reserved_unallocated_bytes", "other_process_bytes", "moves", "repairs",
}  # fmt: skip


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        code = main(["explain", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run_command


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan(lever("training.optimizer", {"backward": 2**30}))))
    (tmp_path / "oom.txt").write_text(f"phase: backward\nstep: 3\n\n{FULL}\n")
    return tmp_path


def test_a_run_folder(run, folder):
    code, out, _ = run(folder, "--json")
    document = json.loads(out)
    assert code == 0
    assert document.keys() == KEYS
    assert (document["phase"], document["cause"], document["request_bytes"]) == ("backward", "capacity", 2 * 2**30)
    assert document["moves"] == [
        {"override": "training.optimizer=x", "saves_bytes": 2**30, "costs": "time", "exact": True}
    ]
    code, out, _ = run(folder)
    assert code == 0
    assert out.startswith("out of memory in backward (step 3): ")


def test_the_newest_report_of_a_run_counts(run, folder):
    """Memory ran out and was repaired; what ended the run came later."""
    (folder / "stopped.txt").write_text("step: 9\n\nstep 9: loss nan, gradient norm nan over 106 supervised tokens\n")
    os.utime(folder / "oom.txt", (1, 1))
    code, out, _ = run(folder, "--json")
    assert (code, json.loads(out)["kind"], json.loads(out)["moves"]) == (0, "nan", [])
    assert run(folder)[1].startswith("a value is not finite (step 9)\n")
    os.utime(folder / "stopped.txt", (0, 0))
    assert json.loads(run(folder, "--json")[1])["cause"] == "capacity"


def test_a_log_next_to_the_plan_of_its_run_or_with_one_named(run, folder, tmp_path_factory):
    (folder / "train.log").write_text(FULL)
    elsewhere = tmp_path_factory.mktemp("logs") / "a.log"
    elsewhere.write_text(FULL)
    in_folder, named = run(folder / "train.log", "--json"), run(elsewhere, "--run", folder, "--json")
    alone = run(elsewhere, "--json")
    saves = [{move["saves_bytes"] for move in json.loads(out)["moves"]} for _, out, _ in (in_folder, named, alone)]
    assert saves == [{2**30}, {2**30}, {None}]


def test_a_folder_without_a_report_is_searched_for_logs(run, folder):
    (folder / "oom.txt").unlink()
    (folder / "b.log").write_text("all is well\n")
    code, _, err = run(folder)
    assert code == 2
    assert "oom.txt" in err
    assert "b.log" in err
    (folder / "c.err").write_text("Killed\n")
    code, out, _ = run(folder, "--json")
    assert (code, json.loads(out)["cause"]) == (0, "host")


def test_standard_input_with_any_bytes(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe loss\r" + FULL.encode())))
    code, out, _ = run("-", "--json")
    assert (code, json.loads(out)["cause"]) == (0, "capacity")


def test_a_log_that_powershell_has_written(run, tmp_path):
    (tmp_path / "a.log").write_bytes(FULL.encode("utf-16"))
    code, out, _ = run(tmp_path / "a.log", "--json")
    assert (code, json.loads(out)["request_bytes"]) == (0, 2 * 2**30)


def test_a_log_longer_than_what_is_read_is_read_from_its_end(run, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "_MOST_BYTES", 4096)
    progress = "step 3/9  loss 2.3170  lr 1.00e-05\n" * 2000
    (tmp_path / "a.log").write_text(progress + FULL)
    code, out, _ = run(tmp_path / "a.log", "--json")
    assert (code, json.loads(out)["cause"]) == (0, "capacity")
    (tmp_path / "a.log").write_text(FULL + "\n" + progress + "Killed\n")  # the first failure counts
    _, out, _ = run(tmp_path / "a.log", "--json")
    assert json.loads(out)["cause"] == "capacity"


def test_of_the_logs_of_all_ranks_the_one_where_memory_ran_out_counts(run, tmp_path):
    """Torchrun writes a folder for each rank; rank 0 only saw that the others were gone."""
    for rank, text in enumerate(("Watchdog caught collective operation timeout: WorkNCCL(", "{'loss': nan}", FULL)):
        (tmp_path / "logs" / "attempt_0" / str(rank)).mkdir(parents=True)
        (tmp_path / "logs" / "attempt_0" / str(rank) / "stderr.log").write_text(text)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "a.txt").write_text("Killed\n")  # a vocabulary
    code, out, _ = run(tmp_path, "--json")
    assert (code, json.loads(out)["cause"]) == (0, "capacity")


def test_a_named_run_without_a_plan_is_no_run(run, tmp_path):
    (tmp_path / "a.log").write_text(FULL)
    for arguments in ((tmp_path / "a.log",), ("-",)):
        for folder, reason in ((tmp_path / "none", "is not a folder"), (tmp_path, "holds no plan.json")):
            code, out, _ = run(*arguments, "--run", folder, "--json")
            [error] = json.loads(out)["errors"]
            assert (code, error["key"]) == (2, "--run")
            assert f"{folder} {reason}" in error["message"]


def test_an_unknown_text_and_a_missing_file_exit_2(run, tmp_path):
    (tmp_path / "a.log").write_text("ValueError: no")
    code, out, _ = run(tmp_path / "a.log", "--json")
    assert code == 2
    assert "no known kind of failure" in json.loads(out)["errors"][0]["message"]
    code, _, err = run(tmp_path / "b.log")
    assert code == 2
    assert "b.log" in err
    assert f"did you mean {tmp_path / 'a.log'}" in err


def test_from_python_a_text_is_as_good_as_a_file(folder):
    assert explain_here(FULL).cause == "capacity"
    assert explain_here(folder).phase == explain_here(str(folder)).phase == "backward"
    assert explain_here(FULL, run=folder).moves[0].saves_bytes == 2**30


def test_it_loads_neither_torch_nor_hydra(folder):
    modules = loaded(f"from framework.cli import main; main(['explain', {str(folder)!r}])")
    assert "framework" in modules
    assert not modules & {*HEAVY, "hydra", "omegaconf"}


def places(value, path=()):
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*path, key))


ABSENT = "no such key"


def changed(document, path, value):
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, -1, 1.5, 2**70, "x", [], {}, [1], {"a": 1}, True, ABSENT], ids=str)
def test_a_plan_that_was_damaged_costs_its_figures_and_no_explanation(folder, wrong):
    """Every place of it holds something else, or nothing."""
    document = json.loads((folder / "plan.json").read_text())
    whole = explain_here(folder)
    assert whole.moves[0].saves_bytes == 2**30
    for path in list(places(document))[1:]:
        (folder / "plan.json").write_text(json.dumps(changed(document, path, wrong)))
        found = explain_here(folder)
        assert (found.phase, found.cause) == (whole.phase, whole.cause)
        assert explanation_lines(found)
        assert json.dumps(found.to_json())


@pytest.mark.parametrize("text", ["", "[", "null", "[1]", "7", '"x"', "{}", "[" * 100_000, "\xe9", '{"phases": NaN}'])
def test_a_plan_that_cannot_be_read_is_reported(run, folder, text):
    (folder / "plan.json").write_bytes(text.encode("latin-1"))
    code, out, err = run(folder, "--json")
    assert (code, {move["saves_bytes"] for move in json.loads(out)["moves"]}) == (0, {None})
    assert "plan.json cannot be read" in err
    code, out, _ = run(folder / "oom.txt", "--run", folder, "--json")
    assert (code, json.loads(out)["errors"][0]["key"]) == (2, "--run")
