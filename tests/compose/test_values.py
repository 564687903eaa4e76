"""Values as written: numbers in every spelling, strict types, references between keys, paths."""

from pathlib import Path

import pytest

from framework.compose import compose, load
from framework.errors import RequestError
from framework.schema.keys import every_key, key_at


def problems_of(recipe, *arguments):
    with pytest.raises(RequestError) as caught:
        compose(recipe, arguments)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    "spelling", ["1e-5", "1E-5", "1.0e-5", "'1e-5'", '"1e-5"', "0.00001", "1_0e-6", "+1e-5", ".1e-4"]
)
def test_every_spelling_of_a_number_is_that_number(write, spelling):
    assert load(write(f"training: {{learning_rate: {spelling}}}\n")).training.learning_rate == 1e-5
    if not spelling.startswith(("'", '"', "+")):
        assert (
            load(write("training: {seed: 1}\n"), [f"training.learning_rate={spelling}"]).training.learning_rate == 1e-5
        )


@pytest.mark.parametrize("spelling", ["1e3", "1000", "1_000", "'1000'", "1000.0"])
def test_a_whole_number_in_any_spelling_is_an_integer(write, spelling):
    assert load(write(f"training: {{max_steps: {spelling}}}\n")).training.max_steps == 1000


@pytest.mark.parametrize(
    ("section", "key", "text", "expected", "nearest"),
    [
        ("training", "learning_rate", "1e5x", "a number, at least 0", None),
        ("training", "learning_rate", "true", "a number, at least 0", None),
        ("training", "learning_rate", "-1", "a number, at least 0", None),
        ("peft", "q_lora_bits", "5", "one of: 4, 8", None),
        ("training", "max_steps", "1.5", "a whole number, at least 1", None),
        ("training", "max_steps", "true", "a whole number, at least 1", None),
        ("training", "use_peft", "yes", "true or false", "true"),
        ("training", "use_peft", "off", "true or false", "false"),
        ("training", "use_peft", "1", "true or false", None),
        ("training", "optimizer", "adamw_torch_fuse", "one of", "adamw_torch_fused"),
        ("training", "optimizer", "3", "one of", None),
        ("training", "run_name", "2024", "text, in quotes", None),
        ("training", "trackers", "wandb", "a list", "[wandb]"),
        ("training", "compile", "'true'", "true or false", "true, without quotes"),
        ("training", "optimizer", "adam", "one of", "adamw_torch"),
        ("training", "task", "dpo", "one of", "preference, with training.preference.loss_type=dpo"),
        ("model", "attn_implementation", "flash", "one of", "flash_attention_2"),
        ("data", "train", "rows.jsonl", "a list", "[{path: rows.jsonl}]"),
        ("training", "parameter_groups", "embed_tokens", "a list", None),
        ("model", "freeze_layers", "{a: b}", "a list", None),
        ("model", "freeze_layers", "{append: a}", "a list", None),
        ("model", "architecture", "llama", "a mapping", None),
    ],
)
def test_a_wrong_value_is_reported_with_key_line_and_what_was_expected(write, section, key, text, expected, nearest):
    recipe = write(f"{section}:\n  {key}: {text}\n")
    problem = problems_of(recipe)[f"{section}.{key}"]
    assert problem.where == "r.yaml:2"
    assert problem.nearest == nearest
    assert expected in problem.expected


@pytest.mark.parametrize(("section", "preset"), [("gpu", "h100_80gb"), ("model", "qwen3_0.6b"), ("peft", "lora")])
def test_a_preset_in_place_of_a_section_is_reported_with_its_place(write, section, preset):
    (problem,) = problems_of(write(f"{section}: {preset}\n")).values()
    assert (problem.key, problem.nearest) == (section, f"defaults: [{{{section}: {preset}}}]")


@pytest.mark.parametrize(("name", "shown"), [("null", "null"), ("[a]", "['a']"), ("3", "3"), ("{a: b}", "{'a': 'b'}")])
def test_a_card_that_is_no_name_is_reported_as_it_was_written(write, name, shown):
    (problem,) = problems_of(write(f"gpu: {{name: {name}}}\n")).values()
    assert (problem.key, problem.message) == ("gpu.name", f"cannot be {shown}")


def test_rows_in_place_of_a_source_are_reported_with_how_to_write_one(write):
    for key in ("train", "eval"):
        (problem,) = problems_of(write(f"data: {{{key}: [rows.jsonl]}}\n")).values()
        assert (problem.key, problem.nearest) == (f"data.{key}[0]", "{path: rows.jsonl}")
        compose(write(f"data: {{{key}: [{problem.nearest}]}}\n"))


def test_an_unknown_item_of_a_list_is_not_told_to_be_a_list(write):
    problem = problems_of(write("training: {trackers: [neptune]}\n"))["training.trackers[0]"]
    assert problem.nearest is None
    assert problem.expected == "one of: tensorboard, wandb, mlflow, comet_ml, swanlab, trackio"


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e999", "'1e999'", "9" * 400 + ".0"])
def test_no_key_takes_a_number_that_is_not_finite(write, value):
    """Every key that takes a number, infinite or not: found through its schema, so that a new one is among them."""
    numbers = [key for key in every_key() if "a number" in key_at(tuple(key.split("."))).expected]
    assert len(numbers) > 25
    for key in numbers:
        parts = key.split(".")
        text, place = str(value), parts[-1]
        for depth in range(len(parts) - 1, 0, -1):  # from the inside out; a list of sections has one item
            is_list = key_at(tuple(parts[:depth])).is_list
            text = f"[{{{parts[depth]}: {text}}}]" if is_list else f"{{{parts[depth]}: {text}}}"
            place = f"{parts[depth - 1]}{'[0]' * is_list}.{place}"
        assert place in problems_of(write(f"{parts[0]}: {text}")), place


def test_all_wrong_values_are_reported_at_once_with_the_index_in_lists(write):
    recipe = write(
        "training: {seed: x, max_steps: 0}\n"
        "data:\n  train:\n    - path: a\n    - {path: 3, weight: no}\n    - name: b\n"
        "model:\n  freeze_layers:\n    - a\n    - 3\n"
    )
    found = {key: problem.where for key, problem in problems_of(recipe).items()}
    assert found == {
        "training.seed": "r.yaml:1",
        "training.max_steps": "r.yaml:1",
        "data.train[1].path": "r.yaml:5",
        "data.train[1].weight": "r.yaml:5",
        "data.train[2].path": "r.yaml:6",
        "model.freeze_layers[1]": "r.yaml:10",
    }


def test_an_empty_section_writes_nothing(write):
    assert load(write("training:\nmodel: {model_name: a}\n")).training.model_fields_set == set()


def test_references_see_written_and_default_keys(write):
    recipe = write(
        "training: {run_name: '${model.model_name}-${training.seed}', save_steps: '${training.eval_steps}'}\n"
        "model: {model_name: org/m, chat_template: '\\${x}'}\n"
    )
    config = load(recipe, ["training.eval_steps=7"])
    assert config.training.run_name == "org/m-42"
    assert config.training.save_steps == 7
    assert config.model.chat_template == "${x}"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("${oc.env:HOME}", "never call a resolver"),
        ("x${oc.env:HOME,${training.seed}}", "never call a resolver"),
        ("${oc.decode:1}", "never call a resolver"),
        ("${hydra:runtime.cwd}", "never call a resolver"),
        ("${model.${training.task}}", "full key"),
        ("${.seed}", "full key"),
        ("${training.nope}", "does not exist"),
        ("${hydra.run.dir}", "does not exist"),
        ("${training}", "whole section"),
        ("${training.run_name}", "refers to itself"),
        ("${training", "not a reference"),
        ("???", "placeholder"),
    ],
)
def test_references_to_anything_but_a_key_are_refused(write, text, word):
    recipe = write(f"model: {{model_name: a}}\ntraining:\n  run_name: '{text}'\n")
    problem = problems_of(recipe)["training.run_name"]
    assert word in problem.message
    assert problem.where == "r.yaml:3"


def test_resolvers_are_refused_on_the_command_line_and_where_a_higher_layer_hides_them(write):
    recipe = write("training: {run_name: '${oc.env:HOME}'}\n")
    assert "resolver" in problems_of(recipe, "training.run_name=x")["training.run_name"].message
    recipe = write("training: {seed: 1}\n")
    assert problems_of(recipe, "training.run_name=${oc.env:HOME}")["training.run_name"].where == "command line"


@pytest.mark.slow
def test_references_cannot_grow_without_bound(write):
    chain = ", ".join(f"a{i}: '${{model.architecture.a{i + 1}}}${{model.architecture.a{i + 1}}}'" for i in range(60))
    found = problems_of(write(f"model: {{architecture: {{{chain}, a60: yy}}}}\n"))
    assert "grows to more than" in found["model.architecture.a0"].message
    assert "model.architecture.a59" not in found


def test_paths_are_made_absolute_where_the_command_was_typed(write):
    write("{}", "rows.jsonl")
    write("{{ messages }}", "chat.jinja")
    Path("weights").mkdir()
    recipe = write(
        "training: {output_dir: out}\nmodel: {model_name: weights, tokenizer_name: gpt2, chat_template: chat.jinja}\n"
        "data: {train: [{path: rows.jsonl}, {path: ./gone}, {path: user/set}, {path: python_stdlib}, {path: 'r*.gz'}],"
        " eval: []}\n"
    )
    config, here = load(recipe), str(Path.cwd())
    assert config.training.output_dir == f"{here}/out"
    assert (config.model.model_name, config.model.tokenizer_name) == (f"{here}/weights", "gpt2")
    assert config.model.chat_template == f"{here}/chat.jinja"
    assert [source.path for source in config.data.train] == [
        f"{here}/rows.jsonl",
        f"{here}/gone",
        "user/set",
        "python_stdlib",
        f"{here}/r*.gz",
    ]
    assert str(Path.cwd()) == here


@pytest.mark.parametrize("body", ["data: []", "data: 3", "training: [a]", "model: {architecture: [1]}", "gpu: [x]"])
@pytest.mark.parametrize("arguments", [(), ("training.run_name=${training.seed}", "gpu=24gb", "training=low_memory")])
def test_a_section_of_the_wrong_kind_is_reported_not_merged(write, body, arguments):
    with pytest.raises(RequestError, match="cannot be"):
        compose(write(f"{body}\npeft: {{lora_alpha: '${{peft.lora_r}}'}}\n"), arguments)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("gpu=80gb,", "gpu=80gb"), ("gpu=,80gb", "gpu=80gb"), ("gpu=40gb,,80gb", "gpu=40gb,80gb"), ("gpu=,", None)],
)
def test_a_comma_too_many_is_reported_in_plain_words(write, word, nearest):
    problem = problems_of(write("schema_version: 1\n"), word)[word]
    assert problem.message == "a value is missing before or after a comma"
    assert problem.nearest == nearest
