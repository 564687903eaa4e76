"""Keys that do not exist, in files and on the command line, and recipes of another schema."""

import shlex
from pathlib import Path

import pytest

from framework.compose import compose, load
from framework.errors import RequestError
from framework.schema import keys
from framework.schema.renamed import OldName
from framework.text import to_yaml


def problems_of(recipe, *arguments):
    with pytest.raises(RequestError) as caught:
        compose(recipe, arguments)
    return {problem.key: problem for problem in caught.value.problems}


def test_every_kind_of_wrong_key_is_reported_at_once_with_line_and_nearest(write):
    recipe = write(
        "learning_rate: 1e-5\n"
        "training:\n  num-train-epochs: 3\n  lora_r: 8\n  num_epochs: 2\n  lerning_rate: 1\n  _target_: os.system\n"
        "fsdp:\n  enable_fsdp: false\n  shardng_strategy: FULL_SHARD\n"
        "traning:\n  seed: 1\n"
        "data:\n  train:\n    - path: a\n      colums: {}\n"
        "model:\n  tokenizer: {vocabsize: 3}\n"
        "hydra: {run: {dir: x}}\noptimizer: sgd\ntraining.seed: 3\n"
    )
    found = {key: (problem.where, problem.nearest) for key, problem in problems_of(recipe).items()}
    assert found == {
        "learning_rate": ("r.yaml:1", "training.learning_rate"),
        "training.num-train-epochs": ("r.yaml:3", "training.num_train_epochs"),
        "training.lora_r": ("r.yaml:4", "peft.lora_r"),
        "training.num_epochs": ("r.yaml:5", "training.num_train_epochs"),
        "training.lerning_rate": ("r.yaml:6", "training.learning_rate"),
        "training._target_": ("r.yaml:7", None),
        "fsdp.shardng_strategy": ("r.yaml:10", "fsdp.sharding_strategy"),
        "traning": ("r.yaml:11", "training"),
        "data.train[0].colums": ("r.yaml:16", "data.train.columns"),
        "model.tokenizer.vocabsize": ("r.yaml:18", "model.tokenizer.vocab_size"),
        "hydra": ("r.yaml:19", None),
        "optimizer": ("r.yaml:20", "training.optimizer"),
        "training.seed": ("r.yaml:21", "training.seed"),
    }
    assert "section `peft`" in problems_of(recipe)["training.lora_r"].message
    assert "Hydra" in problems_of(recipe)["hydra"].message


def test_a_misspelt_override_names_the_nearest_key_and_its_value_and_never_suggests_to_add(write):
    recipe = write("training: {learning_rate: 3e-4}\n")
    problem = problems_of(recipe, "trainng.learning_rate=1e-5")["trainng.learning_rate"]
    assert problem.nearest == "training.learning_rate"
    assert "training.learning_rate is now 0.0003" in problem.message
    assert problem.where == "command line"
    assert "+" not in str(problem)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model={model_name: a}", "chooses a preset"),
        ("training={seed: 1}", "chooses a preset"),
        ("training.seed", "`=` is missing"),
        ("seed", "section `training`"),
        ("training.seed=", "cannot be ''"),
        ("training.seed=1,2", "sweep"),
        ("training.seed=range(1,3)", "sweep"),
        ("training.run_name='a", "cannot be read"),
        ("training.run_name=[a", "cannot be read"),
        ("training.run_name=a=b", "cannot be read"),
        ("hydra.run.dir=x", "Hydra's own"),
        ("hydra/launcher=x", "Hydra's own"),
        ("+hydra.verbose=true", "Hydra's own"),
        ("~hydra.run", "Hydra's own"),
        ("~training.seed=3", "takes no value"),
        ("training._target_=os.system", "no key"),
        ("gpu@model=h100_80gb", "no key"),
        ("=3", "is not `key=value`"),
        ("3", "is not `key=value`"),
        ("=", "is not `key=value`"),
        ("training.seed.0=3", "is not a list"),
        ("~data.train.0", "not one item"),
        ("training.seed=" + "1" * 10_000, "longer than"),
        ("training.run_name=" + "[" * 1_500, "cannot be read"),
    ],
    ids=lambda value: value[:20],
)
def test_wrong_overrides(write, word, message):
    [problem] = problems_of(write("model: {model_name: a}\n"), word).values()
    assert message in problem.message
    assert problem.where == "command line"


def test_problems_of_overrides_and_file_are_reported_together(write):
    assert len(problems_of(write("training: {sed: 1}\n"), "training.max_step=1", "gpu=x", "training.seed=a")) == 4


def test_a_newer_schema_says_what_is_needed(write):
    problem = problems_of(write("schema_version: 9\n"))["schema_version"]
    assert problem.message == "this recipe needs schema version 9, you have 1: upgrade tunesmith"
    assert problem.where == "r.yaml:1"
    assert problem.expected == "1"


@pytest.mark.parametrize("spelling", ["2", "2.0", '"2"', "99", "99.0", '"99"', "9.9e1"])
def test_a_newer_schema_is_refused_in_every_spelling(write, spelling):
    for problems in (
        problems_of(write(f"schema_version: {spelling}\n")),
        problems_of(write("model: {model_name: a}\n"), f"schema_version={spelling}"),
    ):
        assert "upgrade tunesmith" in problems["schema_version"].message


@pytest.mark.parametrize("spelling", ["0", "0.0", '"0"', "-0", "-1.0"])
def test_there_is_no_schema_before_the_first(write, spelling):
    assert "no schema version" in problems_of(write(f"schema_version: {spelling}\n"))["schema_version"].message


@pytest.mark.parametrize("spelling", ["1", "1.0", '"1"'])
def test_this_schema_is_accepted_in_every_spelling_and_saved_as_a_number(write, spelling):
    saved = to_yaml(load(write(f"schema_version: {spelling}\n")))
    assert load(write(saved)).schema_version == 1
    assert saved.startswith("schema_version: 1\n")


def test_a_removed_key_says_when_and_what_to_use(write, monkeypatch):
    monkeypatch.setitem(keys.OLD_NAMES, "training.old", OldName("training.seed", removed_in=1))
    problem = problems_of(write("training: {old: 1}\n"))["training.old"]
    assert problem.message == "removed in schema version 1, use training.seed"
    assert problem.nearest == "training.seed"


def test_every_old_name_leads_to_a_key():
    assert {old.use for old in keys.OLD_NAMES.values() if old.use} <= set(keys.every_key())
    assert not {name for name in keys.OLD_NAMES if name in keys.every_key()}
    assert not {key.rpartition(".")[2] for key in keys.every_key()} & keys.OLD_NAMES.keys()
    assert all(old.how for old in keys.OLD_NAMES.values() if not old.use)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.device_map=auto", "--nproc N"),
        ("training.greater_is_better=true", "training.best_metric"),
        ("training.resume_from_checkpoint=a", "tunesmith train --resume"),
        ("fsdp.limit_all_gathers=false", "fsdp.forward_prefetch"),
        ("tokenizer.padding_side=left", "padded on the right"),
        ("training.prediction_loss_only=false", "keeps no logits"),
        ("training.find_unused_parameters=true", "no search for unused ones"),
        ("training.logging_nan_inf_filter=true", "stops the run"),
    ],
)
def test_what_no_recipe_says_here_tells_what_does(write, word, message):
    [problem] = problems_of(write("model: {model_name: a}\n"), word).values()
    assert message in problem.message
    assert problem.nearest is None


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("base_model=a", "model.model_name"),
        ("model_name_or_path=a", "model.model_name"),
        ("training.save_strategy=steps", "training.save_steps"),
        ("training.auto_find_batch_size=true", "training.on_oom"),
        ("training.torch_empty_cache_steps=4", "training.empty_device_cache_steps"),
        ("optimizer_in_bwd=true", "training.optimizer_in_backward"),
        ("unfrozen_parameters=[a]", "model.freeze_layers"),
        ("load_in_8bit=true", "peft.q_lora_bits"),
        ("lora_query=true", "peft.lora_target_modules"),
    ],
)
def test_what_others_call_it_leads_to_ours(write, word, nearest):
    [problem] = problems_of(write("model: {model_name: a}\n"), word).values()
    assert problem.nearest == nearest


@pytest.mark.parametrize("name", ["peft.bias", "training.quarz", "data.train[0].typ"])
def test_where_nothing_is_near_the_keys_of_the_section_are_named(write, name):
    """The name of the section itself is no likeness: `training.quarz` is not `training.seed`."""
    recipe = write("data: {train: [{path: a}]}\n")
    [problem] = problems_of(recipe, f"{name}=3").values()
    assert problem.nearest is None
    assert {"peft.bias": "lora_alpha", "training.quarz": "tunesmith show"}.get(name, "columns") in problem.expected


def test_an_argument_that_is_neither_key_nor_value_is_reported(write):
    [problem] = problems_of(write("model: {model_name: a}\n"), "1e-5").values()
    assert (problem.message, problem.nearest) == ("`1e-5` is not `key=value`", None)


@pytest.mark.parametrize("value", ["3", "=3", "a/b", "1e-5"])
def test_a_value_after_a_key_without_an_equals_sign_is_joined_to_it(write, value):
    problem = problems_of(write("model: {model_name: a}\n"), "training.max_steps", value)["training.max_steps"]
    assert problem.nearest == f"training.max_steps={value.lstrip('=')}"


def test_a_key_after_a_key_without_an_equals_sign_is_no_value(write):
    problems = problems_of(write("model: {model_name: a}\n"), "training.max_steps", "training.seed")
    assert [problem.nearest for problem in problems.values()] == [None, None]


@pytest.mark.parametrize("value", ["a=b", "a#b", "x;y", "a&b"])
def test_a_value_with_special_characters_is_shown_in_the_quotes_that_it_needs(write, value):
    [problem] = problems_of(write("model: {model_name: a}\n"), f"training.run_name={value}").values()
    [word] = shlex.split(problem.nearest)
    assert load(write("model: {model_name: a}\n"), [word]).training.run_name == value


def test_a_group_chosen_twice_on_the_command_line_is_refused(write):
    problem = problems_of(write("model: {model_name: a}\n"), "gpu=t4_16gb", "gpu=h100_80gb")["gpu"]
    assert problem.message == "is chosen twice, by `gpu=t4_16gb` and by `gpu=h100_80gb`"


def test_a_key_written_twice_on_the_command_line_takes_the_last_and_is_warned_about(write):
    overrides = ["training.seed=1", "training.seed=2", "model.freeze_layers+=[a]", "model.freeze_layers+=[b]"]
    found = compose(write("model: {model_name: a}\n"), overrides)
    assert (found.config.training.seed, found.config.model.freeze_layers) == (2, ("a", "b"))
    [warning] = found.warnings
    assert "`training.seed=1` has no effect: `training.seed=2` comes after it" in warning
    assert not compose(write("model: {model_name: a}\n"), ["training.seed=1", "training.seed=1"]).warnings


@pytest.mark.parametrize("name", ["r", "./r", "r.yml"])
def test_a_recipe_without_its_ending_is_suggested_with_it(write, name):
    write("")
    with pytest.raises(RequestError) as caught:
        compose(name)
    assert Path(caught.value.problems[0].nearest) == Path("r.yaml")


@pytest.mark.parametrize("name", ["gone.yaml", "nowhere/gone.yml", "quickstrat", "folder"])
def test_a_missing_recipe_names_the_nearest(write, tmp_path, name):
    (tmp_path / "folder").mkdir(exist_ok=True)
    write("", "x.yaml")
    with pytest.raises(RequestError) as caught:
        compose(name)
    [problem] = caught.value.problems
    assert name in problem.message
    if name.endswith(("yaml", "yml")):
        assert str(tmp_path / name) in problem.message
    if name == "quickstrat":
        assert problem.nearest == "quickstart"


@pytest.mark.parametrize("name", ["recipe.yml", "folder/../recipes.yaml"])
def test_a_missing_file_names_the_most_similar_one_in_its_folder(write, tmp_path, name):
    (tmp_path / "folder").mkdir()
    write("", "recipe.yaml")
    write("", "other.yaml")
    with pytest.raises(RequestError) as caught:
        compose(name)
    [problem] = caught.value.problems
    assert problem.nearest.endswith("recipe.yaml")
    assert (tmp_path / problem.nearest).exists()


def test_an_ending_that_all_have_makes_no_two_files_alike(write):
    write("", "g.yaml")
    with pytest.raises(RequestError) as caught:
        compose("nope.yaml")
    assert caught.value.problems[0].nearest is None


def test_a_path_needs_an_ending_or_a_slash(write, tmp_path):
    write("training: {seed: 5}\n", "plain")
    assert compose("./plain").config.training.seed == 5
    with pytest.raises(RequestError):
        compose("plain")
    assert compose(tmp_path / "plain").recipe == "plain"
