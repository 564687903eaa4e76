"""The command line: exit codes, one JSON document, errors on stderr, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework import errors
from framework.cli import main
from framework.compose import compose

ROOT = Path(__file__).parents[2]

GOOD = "model: {model_name: a}\ndata: {train: [{path: user/set}]}\n"


@pytest.fixture
def run(capsys):
    """Runs one command; gives exit code, stdout and stderr."""

    def run_command(*arguments):
        code = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return run_command


def test_show_prints_yaml_that_composes_again(run, write):
    code, out, err = run("show", write(GOOD), "training.seed=3", "gpu=24gb", "model=gpt2_small")
    assert (code, err) == (0, "")
    assert compose(write(out, "again.yaml")).config.training.seed == 3
    assert "model_max_length: 1024\n" in out


def test_show_origin_says_who_wrote_each_value(run, write):
    _, out, _ = run("show", write(GOOD), "training.seed=3", "model.architecture={model_type: llama}", "--origin")
    lines = [line.strip() for line in out.splitlines()]
    assert "seed: 3  # command line: training.seed=3" in lines
    assert "model_name: a  # r.yaml:1" in lines
    assert "model_max_length: 2048  # default" in lines


def test_show_json(run, write):
    code, out, _ = run("show", write(GOOD), "--json")
    document = json.loads(out)
    assert (code, document["schema_version"], document["recipe"]) == (0, 1, "r")
    assert document["config"]["model"]["model_name"] == "a"
    assert document["origins"]["model.model_name"] == {"kind": "recipe", "where": "r.yaml:1"}


def test_show_keeps_auto_and_what_is_not_available(run, write):
    code, out, _ = run("show", write("training: {compile: auto}\ndata: {packing: true}\n"))
    assert code == 0
    assert "compile: auto" in out
    code, out, err = run("show", write("training: {compile: auto}\nmodel: {model_name: a}\n"), "gpu=cpu", "--resolve")
    assert code == 0
    assert "compile: false" in out
    assert "training.compile=false" in err


def test_problems_go_to_stderr_all_of_them_with_exit_2(run, write):
    code, out, err = run("check", write("training: {sed: 1}\n" + GOOD + "x: 1\n"), "--quick", "trainng.seed=1")
    assert (code, out) == (2, "")
    assert "training.sed" in err
    assert "r.yaml:4" in err
    assert "did you mean training.seed" in err
    assert "3 problems" in err


@pytest.mark.parametrize("verb", ["check", "show", "train"])
def test_problems_as_json_are_one_document(run, write, verb):
    code, out, _ = run(verb, write("training: {sed: 1}\n"), "--json")
    document = json.loads(out)
    assert code == 2
    assert document["schema_version"] == 1
    found = {error["key"]: error for error in document["errors"]}
    assert found["training.sed"] == {
        "key": "training.sed",
        "where": "r.yaml:1",
        "message": "there is no key `training.sed`",
        "expected": None,
        "nearest": "training.seed",
    }
    assert ("warnings" in document) == (verb == "check")


def test_check_quick_of_a_good_recipe(run, write):
    code, out, err = run("check", write(GOOD + "peft: {lora_r: 3}\n"), "--quick")
    assert code == 0
    assert "no problems" in out
    assert "warning peft.lora_r: has no effect: training.use_peft is false" in err
    code, out, _ = run("check", "r.yaml", "--quick", "--json")
    assert [warning["key"] for warning in json.loads(out)["warnings"]] == ["peft.lora_r"]


def test_diff(run, write):
    write("training: {seed: 1}\n", "b.yaml")
    code, out, _ = run("diff", write("training: {seed: 2}\n"), "b.yaml", "training.max_steps=4")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["training.seed", "a", "2", "r.yaml:1"],
        ["b", "1", "b.yaml:1"],
    ]
    document = json.loads(run("diff", "r.yaml", "b.yaml", "--json")[1])
    assert document["differences"][0]["origin_a"] == {"kind": "recipe", "where": "r.yaml:1"}
    assert run("diff", "r.yaml", "r.yaml")[1] == "no key differs\n"


def test_diff_writes_values_as_they_are_typed(run, write):
    write("training: {use_peft: true, max_steps: 2}\n", "b.yaml")
    out = run("diff", write("schema_version: 1\n"), "b.yaml")[1]
    assert [line.split()[-2] for line in out.splitlines()] == ["null", "2", "false", "true"]


def test_an_argument_that_is_missing_is_reported_where_it_is_listed(run):
    code, _, err = run("list")
    assert (code, err) == (2, "error Missing argument 'kind': `tunesmith list --help` explains it\n")


def test_a_recipe_without_a_name_is_refused(run):
    assert run("show", "")[2].splitlines()[0] == "error no recipe is called ''"


def test_a_group_without_presets_lists_none(run):
    code, out, err = run("list", "fsdp")
    assert (code, out, err) == (0, "", "no preset of fsdp is shipped: its keys are written in the recipe\n")
    assert json.loads(run("list", "fsdp", "--json")[1])["choices"] == []
    expected = run("show", "quickstart", "fsdp=full")[2].splitlines()[2].strip()
    assert expected == "expected the path of a YAML file"


def test_list(run):
    for kind in ("recipes", "gpus", "models", "optimizers", "datasets", "peft", "training"):
        code, out, _ = run("list", kind)
        assert code == 0
        assert all(len(line.split()) > 1 for line in out.splitlines())
    assert "h100_80gb" in run("list", "gpus")[1]
    code, _, err = run("list", "gpuz")
    assert code == 2
    assert "did you mean" in err


def test_schema_is_one_document(run):
    assert json.loads(run("schema")[1])["title"] == "tunesmith recipe"


def test_several_values_need_a_sweep(run, write):
    assert "-m" in run("train", write(GOOD), "training.seed=1,2")[2]
    assert "-m" in run("train", write(GOOD), "--fail-fast")[2]


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["show"], ["show", "a", "--nope"], ["check", "a", "--nproc", "0"], ["list"]]
)
def test_wrong_usage_exits_2_in_one_line(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert json.loads(run(*arguments, "--json")[1])["errors"][0]["message"]


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--gpu", "24gb"], "gpu=24gb"),
        (["--gpu=24gb", "--json"], "gpu=24gb"),
        (["--learning-rate", "1e-4"], "training.learning_rate=1e-4"),
        (["--training.max_steps=3"], "training.max_steps=3"),
        (["--lora_r", "--json"], "peft.lora_r=VALUE"),
        (["-c", "b.yaml"], "b.yaml, which comes first, without an option"),
        (["--config-name=b"], "b, which comes first, without an option"),
        (["--config-path", "presets"], "--config-dir presets, a folder of presets"),
        (["--blah"], None),
    ],
)
def test_an_option_of_other_tools_is_suggested_as_a_key_or_a_group(run, write, arguments, nearest):
    code, out, _ = run("plan", write(GOOD), *arguments, "--json")
    [problem] = json.loads(out)["errors"]
    assert code == 2
    assert "No such option" in problem["message"]
    assert problem["nearest"] == nearest


def test_cards_without_a_unit_are_suggested_with_one(run, write):
    _, out, _ = run("check", write(GOOD), "gpu=40,80", "--quick", "--json")
    assert [problem["nearest"] for problem in json.loads(out)["errors"]] == ["40gb", "80gb"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DoesNotFit("over"), 3),
        (errors.NonFinite("nan"), 4),
        (errors.Interrupted("saved"), 130),
        (KeyboardInterrupt(), 130),
        (errors.TunesmithError("fault"), 1),
        (ZeroDivisionError("oops"), 1),
    ],
)
def test_each_failure_has_its_exit_code(run, write, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("framework.checks.check_request", fail)
    found, out, err = run("check", write(GOOD), "--quick")
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert code != 1 or not isinstance(error, ZeroDivisionError) or "--debug" in err
    assert err.startswith("error") == (code != 130), "what was asked for is no error"
    found, out, err = run("check", write(GOOD), "--quick", "--json")
    [problem] = json.loads(out)["errors"]
    assert found == code
    assert str(error) in problem["message"]
    assert len(err.splitlines()) == 1, "a log that keeps stderr alone tells it too"


def test_debug_adds_the_traceback(capsys, write, monkeypatch):
    monkeypatch.setattr("framework.checks.check_request", lambda *_, **__: 1 / 0)
    assert main(["check", str(write(GOOD)), "--quick", "--debug"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err.splitlines()[-2]


def test_the_module_is_the_command_and_no_color_is_honored(write):
    write("training: {sed: 1}\n")
    command = [sys.executable, "-m", "framework", "check", "r.yaml", "--quick"]
    env = {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2
    assert "\x1b[3" not in done.stderr
    assert "training.seed" in done.stderr


@pytest.mark.fresh_process
def test_a_reader_that_leaves_is_no_fault():
    command = [sys.executable, "-m", "framework", "show", "quickstart"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as left:
        done = subprocess.run(command, stdout=left, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 141)
    assert [line for line in done.stderr.splitlines() if not line.startswith("working ")] == []


@pytest.mark.parametrize(
    "arguments",
    [pytest.param("show quickstart", marks=pytest.mark.fresh_process), "list gpus --json", "plan none.yaml --json"],
)
def test_a_full_disk_is_no_fault_of_ours(arguments):
    command = [sys.executable, "-m", "framework", *arguments.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    output = [line for line in done.stderr.splitlines() if not line.startswith("working ")]
    assert output == ["error not all could be written: No space left on device"]


def test_a_verb_that_composes_nothing_is_offered_no_key(run):
    code, _, err = run("predict", "runs/mine", "rows.jsonl", "--learning-rate", "1")
    assert (code, err) == (2, "error No such option: --learning-rate\n")


@pytest.mark.parametrize(
    ("verb", "nearest"), [("version", "--version"), ("plam", "plan"), ("generate", "predict"), ("xyz", None)]
)
def test_an_unknown_verb_names_the_nearest(run, verb, nearest):
    code, out, _ = run(verb, "--json")
    assert (code, json.loads(out)["errors"][0]["nearest"]) == (2, nearest)


def test_the_version_is_printed(run):
    assert run("--version")[:2] == (0, "0.1.0\n")
