"""Recipes by task and what they are composed with: presets that suggest, earlier names, presets of one's own, and what
Hydra users write in `defaults:`."""

import re
from pathlib import Path

import pytest

from framework.checks import check_request
from framework.cli import main
from framework.compose import compose, load
from framework.compose.overrides import listed
from framework.compose.shipped import EARLIER_RECIPES, EARLIER_UNTIL, presets, recipes
from framework.compose.sweep import sweep_of
from framework.compose.writing import amended
from framework.errors import RequestError

RATE = "training.learning_rate"
CARD = "gpu: {usable_bytes: 9_000_000_000, capability: '8.6'}\n"


def problems_of(recipe, *arguments):
    with pytest.raises(RequestError) as caught:
        compose(recipe, arguments)
    return caught.value.problems


def earlier(model: str, way: str) -> str:
    """The text that a recipe of that name had before recipes were composed."""
    peft = {"full": "", "lora": "  - peft: lora\n", "qlora": "  - peft: qlora\n"}[way]
    return (
        f"schema_version: 1\ndefaults:\n  - model: {model}\n  - data: everyday_chats\n{peft}"
        "  - optimizer: adamw_torch_fused\n  - training: fastest\ntraining:\n  num_train_epochs: 2\n"
        f"  global_batch_size: 16\n  learning_rate: {'1e-5' if way == 'full' else '2e-4'}\n"
        "  lr_scheduler_type: cosine\n  warmup_ratio: 0.03\n"
    )


@pytest.mark.parametrize("name", [name for name in EARLIER_RECIPES if name != "classify_docstrings"])
def test_an_earlier_name_is_the_recipe_that_it_was(write, name):
    model, _, way = name.rpartition("_")
    before = load(write(earlier(model, way)), ["gpu=h100_80gb"])
    found = compose(name, ["gpu=h100_80gb"])
    assert found.config == before
    assert found.recipe == name
    assert found.warnings == (
        f"`{name}` is now `{EARLIER_RECIPES[name].typed}`; the earlier name is removed in version {EARLIER_UNTIL}",
    )
    if model == "qwen3_4b":
        recipe, *arguments = EARLIER_RECIPES[name].typed.split()
        now = compose(recipe, [*arguments, "gpu=h100_80gb"])
        assert (now.config, now.warnings) == (before, ())


def test_earlier_names_are_of_recipes_and_presets_that_there_are():
    assert len(EARLIER_RECIPES) == 28
    assert not set(EARLIER_RECIPES) & set(recipes())
    for old in EARLIER_RECIPES.values():
        assert old.recipe in recipes()
        assert all(name in presets(group) for group, name in old.choices.items())


def test_an_earlier_name_takes_overrides_and_is_reported_once(write, capsys):
    write("")
    found = compose("qwen3_8b_qlora", ["model=qwen3_0.6b", "peft=lora", "gpu=cpu"]).config
    assert (found.model.model_name, found.peft.q_lora, found.training.learning_rate) == ("Qwen/Qwen3-0.6B", False, 2e-4)
    assert main(["check", "qwen3_8b_qlora", "--quick", "gpu=cpu"]) == 0
    assert capsys.readouterr().err.count("is now `chat model=qwen3_8b peft=qlora`") == 1


def test_a_rate_that_an_adapter_suggests_gives_way_to_whatever_is_written(write):
    write("training: {learning_rate: 7e-7}\n", "rate.yaml")
    plain = write("model: {model_name: a}\n", "plain.yaml")
    written = write("defaults: [peft: lora]\ntraining: {learning_rate: 3e-6}\n", "written.yaml")
    assert load(plain, ["peft=lora"]).training.learning_rate == 2e-4
    assert load(written).training.learning_rate == load(written, ["peft=lora"]).training.learning_rate == 3e-6
    assert load(plain, ["peft=lora", "training=rate.yaml"]).training.learning_rate == 7e-7
    assert load(plain, ["training=rate.yaml", "peft=lora"]).training.learning_rate == 7e-7
    assert load(plain, ["peft=lora", f"{RATE}=1"]).training.learning_rate == 1


def test_every_adapter_suggests_a_rate_and_learns_faster_than_all_weights(write):
    recipe = write("model: {model_name: a}\n")
    rates = {}
    for name in presets("peft"):
        found = compose(recipe, [f"peft={name}"])
        assert f"peft/{name}.yaml:" in found.origins[RATE].where
        rates[name] = found.config.training.learning_rate
    assert rates["none"] == 1e-5
    assert rates["lora"] == rates["qlora"] == 2e-4
    assert min(rate for name, rate in rates.items() if name != "none") > rates["none"]


def test_what_is_suggested_comes_back_when_a_key_is_taken_back_and_goes_with_its_preset(write):
    recipe = write("defaults: [peft: lora]\ntraining: {learning_rate: 3e-6}\n")
    assert load(recipe, [f"~{RATE}"]).training.learning_rate == 2e-4
    assert load(recipe, [f"~{RATE}", "~peft"]).training.learning_rate == 5e-5


def test_a_suggestion_is_checked_like_any_key_and_stands_in_presets_alone(write):
    write("unless_written: {training: {lerning_rate: 1}}\n", "a.yaml")
    write("unless_written: 3\n", "b.yaml")
    recipe = write("model: {model_name: a}\n")
    [problem] = problems_of(recipe, "training=a.yaml")
    assert (problem.key, problem.where, problem.nearest) == ("training.lerning_rate", "preset a.yaml:1", RATE)
    [problem] = problems_of(recipe, "training=b.yaml")
    assert "is not a mapping" in problem.message
    [problem] = problems_of(write("unless_written: {training: {learning_rate: 1}}\n"))
    assert problem.key == "unless_written"


def own(folder: str, group: str, name: str, text: str) -> None:
    Path(folder, group).mkdir(parents=True, exist_ok=True)
    Path(folder, group, f"{name}.yaml").write_text(text)


def test_a_preset_next_to_the_recipe_is_found_by_name(write, monkeypatch):
    own("mine/conf", "gpu", "mycard", CARD)
    Path("mine/r.yaml").write_text("model: {model_name: a}\n")
    found = compose("mine/r.yaml", ["gpu=mycard"])
    assert found.config.gpu.usable_bytes == 9_000_000_000
    assert found.origins["gpu.usable_bytes"].where == "mine/conf/gpu/mycard.yaml:1"
    assert found.config.gpu.name == "mycard"  # which the file leaves out
    Path("mine/r.yaml").write_text("defaults: [gpu: mycard]\n")
    assert load("mine/r.yaml").gpu.usable_bytes == 9_000_000_000
    [problem] = problems_of(write("model: {model_name: a}\n"), "gpu=mycard")
    assert "no preset is called 'mycard'" in problem.message
    [problem] = problems_of("mine/r.yaml", "gpu=mycrad")
    assert "mycard" in problem.nearest
    monkeypatch.chdir("mine")
    assert load("chat", ["gpu=mycard"]).gpu.usable_bytes == 9_000_000_000  # of a shipped recipe: where it was typed


def test_a_folder_of_presets_is_named_on_the_command_line(write, capsys):
    own("presets", "peft", "tiny", "training: {use_peft: true}\npeft: {lora_r: 2}\n")
    recipe = str(write("model: {model_name: a}\n"))
    assert load(recipe, ["config_dir=presets", "peft=tiny"]).peft.lora_r == 2
    for arguments in (["--config-dir", "presets"], ["--config-dir=presets"]):
        assert main(["show", *arguments, recipe, "peft=tiny", "--origin"]) == 0
        assert "lora_r: 2  # preset presets/peft/tiny.yaml:2" in capsys.readouterr().out
    [problem] = problems_of(recipe, "config_dir=preset")
    assert (problem.key, problem.nearest) == ("config_dir", "presets")
    assert main(["check", recipe, "--quick", "--config-dir"]) == 2
    assert "names no folder" in capsys.readouterr().err


def test_a_comma_in_the_name_of_the_folder_is_no_list(write):
    own("a,b", "peft", "tiny", "training: {use_peft: true}\npeft: {lora_r: 2}\n")
    overrides = ["config_dir=a,b", "peft=tiny,lora"]
    assert list(listed(overrides, takes_cards=False)[1]) == ["tiny", "lora"]
    assert (sweep_of(overrides).overrides, sweep_of(overrides).swept) == (
        ("config_dir=a,b", "peft"),
        {"peft": "tiny,lora"},
    )
    assert load(write("model: {model_name: a}\n"), ["config_dir=a,b", "peft=tiny"]).peft.lora_r == 2


def test_an_own_preset_comes_before_a_shipped_one_of_its_name_and_that_is_a_warning(write, capsys):
    own("conf", "gpu", "l4_24gb", CARD)
    found = compose(write("model: {model_name: a}\n"), ["gpu=l4_24gb"])
    assert found.config.gpu.usable_bytes == 9_000_000_000
    assert any("conf/gpu/l4_24gb.yaml is used instead of the shipped preset" in warning for warning in found.warnings)
    assert main(["list", "gpus"]) == 0
    assert "l4_24gb" in capsys.readouterr().out


def test_a_recipe_with_presets_of_its_own_is_written_so_that_it_composes(write):
    own("presets", "peft", "tiny", "training: {use_peft: true}\npeft: {lora_r: 2}\n")
    overrides = ["config_dir=presets", "peft=tiny", "training=low_memory", "gpu=cpu"]
    config = load("chat", overrides)
    text = amended("chat", overrides, config, [])
    assert load(write(text), ["gpu=cpu"]) == config
    plain = ["training=low_memory", "gpu=cpu"]
    kept = amended("qwen3_4b_lora", plain, load("qwen3_4b_lora", plain), [])
    assert "model: qwen3_4b" in kept
    assert "peft: lora" in kept


@pytest.mark.parametrize(
    ("defaults", "optimizer", "decay"),
    [
        ("[optimizer: lion, _self_]", "lion", 0.5),
        ("[/optimizer: lion]", "lion", 0.5),
        ("[optimizer: lion, override optimizer: sgd]", "sgd", 0.5),
        ("[override /optimizer: sgd]", "sgd", 0.5),
        ("[optimizer: null]", "adamw_torch", 0.5),
        ("[optional optimizer: sgd]", "sgd", 0.5),
    ],
)
def test_what_hydra_users_write(write, defaults, optimizer, decay):
    training = load(write(f"defaults: {defaults}\ntraining: {{weight_decay: {decay}}}\n")).training
    assert (training.optimizer, training.weight_decay) == (optimizer, decay)


def test_an_optional_preset_that_is_not_there_is_reported(write):
    found = compose(write("defaults: [optional gpu: mycard]\nmodel: {model_name: a}\n"))
    assert found.config.gpu.name == "cpu"
    assert any("no preset mycard" in warning and "optional" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("defaults", "says"),
    [
        ("[_self_, optimizer: lion]", "put it last"),
        ("[optimizer@training: lion]", "have no package"),
        ("[quickstart]", "a list of `- group: preset`"),
        ("[model/llama: x]", "is not a preset of a group"),
        ("[mandatory optimizer: x]", "is not a preset of a group"),
        ("[optimizer: lion, optimizer: sgd]", "chosen twice"),
        ("[optimizer: {name: lion}]", "is not a preset of a group"),
        ("[optimizer: [lion, null]]", "is not a preset of a group"),
    ],
)
def test_what_means_something_else_here_says_what_to_write(write, defaults, says):
    [problem] = problems_of(write(f"defaults: {defaults}\n"))
    assert problem.key.startswith("defaults[")
    assert problem.where == "r.yaml:1"
    assert says in str(problem)


def test_the_page_lists_every_recipe_and_its_commands_compose(write):
    write("")
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    table = text.partition("| --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])} == set(recipes())
    typed = re.findall(r"^    tunesmith (?:train|show) (.*)$", text, re.M)
    assert len(typed) == 2
    for arguments in typed:
        recipe, *rest = (word for word in arguments.split() if not word.startswith("--"))
        assert not check_request(recipe, rest).problems
    [card] = re.findall(r"```yaml\n# conf/gpu/mycard.yaml\n(.*?)```", text, re.S)
    own("conf", "gpu", "mycard", card)
    assert load("chat", ["gpu=mycard"]).gpu.usable_bytes == 23_000_000_000
