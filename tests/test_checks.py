"""Tier A: syntax and values checked together, every problem located, nothing reported twice or by mistake."""

from pathlib import Path

import pytest

from framework.checks import CHECK, TRAIN, check, check_request, located
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig

GOOD = "model: {model_name: a}\ndata: {train: [{path: user/set}]}\n"


def report(recipe, *arguments, needs=CHECK):
    found = check_request(recipe, arguments, needs=needs)
    return {problem.key: problem for problem in found.problems}, {warning.key for warning in found.warnings}


def test_a_good_request_gives_its_composition(write):
    found = check_request(write(GOOD), needs=TRAIN)
    assert found.problems == found.warnings == ()
    assert found.composition is not None
    assert found.composition.config.model.model_name == "a"


def test_syntax_and_values_are_reported_together(write):
    recipe = write(
        "training:\n  lerning_rate: 1\n  seed: x\n  warmup_steps: 9\n  max_steps: 3\n"
        "model: {attn_implementation: ring_attention}\n"
        "gpu: {name: t4, capability: '7.5'}\n"
    )
    problems, warnings = report(recipe, "training.mixed_precision_dtype=bf16")
    assert {key: problem.where for key, problem in problems.items()} == {
        "training.lerning_rate": "r.yaml:2",
        "training.seed": "r.yaml:3",
        "training.warmup_steps": "r.yaml:4",
        "model.attn_implementation": "r.yaml:6",
        "training.mixed_precision_dtype": "command line",
        "model.model_name": None,
    }
    assert "gpu.name at r.yaml:7" in problems["training.mixed_precision_dtype"].message
    assert warnings == {"data.train"}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("training: {warmup_steps: x, max_steps: 3}\n" + GOOD, {"training.warmup_steps"}),
        ("training: {warmup_steps: 9, max_steps: x}\n" + GOOD, {"training.max_steps"}),
        ("model: {modle_name: a}\n", {"model.modle_name"}),
        ("model: {model_name: 3}\n", {"model.model_name"}),
        (
            "data: {eval: [{pth: a}]}\ntraining: {eval_steps: 3}\nmodel: {model_name: a}\n",
            {"data.eval[0].pth", "data.eval[0].path"},
        ),
        ("defaults: [{model: nope}]\n", {"model"}),
        ("- a\n", {""}),
    ],
)
def test_a_rule_is_silent_about_a_key_that_is_wrong_already(write, text, keys):
    assert set(report(write(text))[0]) == keys


def test_a_misspelt_key_is_reported_even_where_its_section_is_switched_off(write):
    problems, _ = report(write(GOOD + "fsdp: {enable_fsdp: false, shard: 1}\npeft: {rank: 8}\n"))
    assert set(problems) == {"fsdp.shard", "peft.rank"}
    assert problems["peft.rank"].nearest == "peft.lora_r"


def test_a_section_of_a_section_that_is_written_empty_has_its_place(write):
    (problem,) = check_request(
        write("defaults: [{model: qwen3_0.6b}]\nmodel:\n  tokenizer: {}\n"), ["gpu=cpu"]
    ).problems
    assert (problem.key, problem.where) == ("model.tokenizer", "r.yaml:3")


@pytest.mark.parametrize("name", ["x" * 9000, "~nobody-here/model"])
@pytest.mark.parametrize("key", ["model.model_name", "peft.adapter_path"])
def test_a_name_that_no_folder_can_have_is_a_problem_among_others(write, key, name):
    overrides = ["gpu=cpu", "model=qwen3_0.6b", f"{key}={name}", "training.seed=x"]
    assert "training.seed" in {problem.key for problem in check_request(write("{}\n"), overrides).problems}


def test_missing_files_show_the_written_and_the_absolute_path_to_verbs_that_need_them(write):
    recipe = write("model: {model_name: ./gone}\ndata: {train: [{path: no/rows.jsonl}, {path: user/set}]}\n")
    assert not report(recipe)[0]
    problems, _ = report(recipe, needs=TRAIN)
    assert set(problems) == {"model.model_name", "data.train[0].path"}
    assert problems["data.train[0].path"].message == (
        f"no such file or folder: no/rows.jsonl ({Path.cwd() / 'no/rows.jsonl'})"
    )
    assert problems["model.model_name"].where == "r.yaml:1"


@pytest.mark.parametrize(
    ("written", "message", "reads_rows"),
    [
        ("s3://b/x.jsonl", "s3:// is remote storage, which is neither read nor written; expected a local copy", True),
        ("gs://b/x/*.parquet", "gs:// is remote storage", True),
        ("https://huggingface.co/datasets/owner/name", "expected owner/name", False),
        ("https://huggingface.co/datasets/owner/name/resolve/main/a.csv", "expected owner/name", True),
        ("hf://datasets/owner/name@main/a.parquet", "expected owner/name", True),
        ("hf://datasets/owner/name", "expected owner/name", False),
        ("file:///a/x.jsonl", "expected /a/x.jsonl", False),
    ],
)
def test_a_url_is_not_taken_for_a_path_but_rows_are_read_from_one(write, written, message, reads_rows):
    recipe = f'model: {{model_name: "{written}"}}\ndata: {{train: [{{path: "{written}"}}]}}\n'
    problems, _ = report(write(recipe + f'training: {{output_dir: "{written}"}}\n'))
    refused = {"model.model_name", "training.output_dir"}
    assert set(problems) == refused | (set() if reads_rows else {"data.train[0].path"})
    assert all(message in str(problem) for problem in problems.values())


def test_a_glob_is_there_when_a_file_matches_it(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows_1.jsonl", "rows_2.csv.gz"):
        (tmp_path / name).write_text("")
    recipe = write(
        'data: {train: [{path: "rows_*.jsonl"}, {path: "**/*.csv.gz"}, {path: "no_*.csv"}, {path: "no_*.gz"}]}\n'
    )
    problems, _ = report(recipe, needs=TRAIN)
    assert {key for key in problems if key.startswith("data")} == {"data.train[2].path", "data.train[3].path"}


def test_a_missing_recipe_is_a_report_too():
    assert "no recipe" in check_request("nothing-of-that-name").problems[0].message


def test_a_config_made_in_python_is_checked_the_same():
    config = TrainingConfig.model_validate(
        {"training": {"eval_steps": 3}, "model": {"model_name": "a", "attn_implementation": "ring_attention"}}
    )
    with pytest.raises(RequestError) as caught:
        check(config)
    assert {problem.key for problem in caught.value.problems} == {
        "training.eval_steps",
        "model.attn_implementation",
        "data.train",
    }
    assert check(TrainingConfig.model_validate({"model": {"model_name": "a"}}), CHECK)[0].key == "data.train"


def test_problems_found_later_get_their_place(write):
    composition = check_request(write(GOOD)).composition
    assert composition is not None
    found = located(
        [Problem("data.train[0].path", "x"), Problem("data", "x"), Problem("fsdp", "x")], composition.origins
    )
    assert [problem.where for problem in found] == ["r.yaml:2", "r.yaml:2", None]
