"""Low to high: schema defaults, the recipe's presets, its body, presets and then keys of the command line."""

import pytest

from framework.compose import compose, load
from framework.errors import RequestError

LOW = "training: {seed: 1, weight_decay: 0.1, warmup_ratio: 0.1}\nmodel: {freeze_layers: [embed]}\n"
HIGH = "training: {seed: 2, weight_decay: 0.2}\nmodel: {freeze_layers: [layers.0]}\n"
RECIPE = "defaults:\n  - training: low.yaml\ntraining: {weight_decay: 0.3, max_grad_norm: 3}\n"


@pytest.fixture
def recipe(write):
    write(LOW, "low.yaml")
    write(HIGH, "high.yaml")
    return write(RECIPE)


def refused(recipe, *arguments):
    with pytest.raises(RequestError) as caught:
        compose(recipe, arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    ("arguments", "seed", "decay", "ratio", "norm"),
    [
        ((), 1, 0.3, 0.1, 3),
        (("training=high.yaml",), 2, 0.2, 0.0, 3),
        (("training.seed=9",), 9, 0.3, 0.1, 3),
        (("training.seed=9", "training=high.yaml"), 9, 0.2, 0.0, 3),
        (("optimizer=high.yaml",), 2, 0.2, 0.1, 3),
        (("training=low.yaml", "model=high.yaml"), 1, 0.1, 0.1, 3),
        (("model=high.yaml", "training=low.yaml"), 1, 0.1, 0.1, 3),
        (("~training",), 42, 0.0, 0.0, 1),
        (("~training.weight_decay",), 1, 0.0, 0.1, 3),
        (("training.seed=9", "~training.seed"), 42, 0.3, 0.1, 3),
        (("~training.seed", "training.seed=9"), 9, 0.3, 0.1, 3),
        (("+training.seed=8",), 8, 0.3, 0.1, 3),
        (("++training.seed=8", "training.seed=7"), 7, 0.3, 0.1, 3),
    ],
)
def test_the_higher_layer_wins(recipe, arguments, seed, decay, ratio, norm):
    training = load(recipe, arguments).training
    assert (training.seed, training.weight_decay, training.warmup_ratio, training.max_grad_norm) == (
        seed,
        decay,
        ratio,
        norm,
    )


def test_only_written_keys_count_as_written(recipe):
    config = load(recipe, ["training.seed=42"])
    assert config.training.model_fields_set == {"seed", "weight_decay", "warmup_ratio", "max_grad_norm"}


def test_lists_replace_and_a_preset_that_replaces_one_is_warned_about(recipe):
    composition = compose(recipe, ["model=high.yaml"])
    assert composition.config.model.freeze_layers == ("layers.0",)
    assert len(composition.warnings) == 1
    assert "embed" in composition.warnings[0]
    assert "low.yaml:2" in composition.warnings[0]
    assert not compose(recipe, ["model.freeze_layers=[x]"]).warnings


def test_lists_append_and_keep_the_origin_of_each_item(recipe, write):
    write("model:\n  freeze_layers: {append: [layers.0]}\n", "more.yaml")
    composition = compose(recipe, ["model=more.yaml", "model.freeze_layers+=[layers.1]", "model.freeze_layers+=[b]"])
    assert composition.config.model.freeze_layers == ("embed", "layers.0", "layers.1", "b")
    assert not composition.warnings
    assert [str(composition.origins[f"model.freeze_layers[{index}]"]) for index in range(3)] == [
        "preset low.yaml:2",
        "preset more.yaml:2",
        "command line: model.freeze_layers+=[layers.1]",
    ]


def test_a_list_of_sections_appends_too(write):
    recipe = write("data:\n  train: [{path: a.jsonl}]\n")
    config = load(recipe, ["data.train+=[{path: b.jsonl, weight: 2}]", "data.train[0].format=text"])
    assert [source.path.rpartition("/")[2] for source in config.data.train] == ["a.jsonl", "b.jsonl"]
    assert config.data.train[0].format == "text"


def test_an_index_beyond_the_list_is_refused(write):
    recipe = write("data:\n  train: [{path: a.jsonl}]\n")
    assert "has 1 item," in refused(recipe, "data.train.3.path=x")[0].message


@pytest.mark.parametrize(
    ("body", "arguments", "accumulation", "global_size"),
    [
        ("global_batch_size: 64", ["training.gradient_accumulation_steps=2"], 2, None),
        ("gradient_accumulation_steps: 2", ["training.global_batch_size=64"], None, 64),
        ("gradient_accumulation_steps: 2", ["training.global_batch_size=null"], 2, None),
        ("seed: 1", ["training.global_batch_size=64", "training.gradient_accumulation_steps=8"], 8, 64),
    ],
)
def test_accumulation_and_global_batch_drop_each_other(write, body, arguments, accumulation, global_size):
    training = load(write(f"training: {{{body}}}\n"), arguments).training
    assert (training.gradient_accumulation_steps, training.global_batch_size) == (accumulation, global_size)


def test_a_whole_architecture_replaces_and_a_part_changes(write):
    recipe = write("model: {architecture: {model_type: llama, hidden_size: 64, x: 1}}\n")
    assert load(recipe, ["model.architecture.hidden_size=32"]).model.architecture.thaw() == {
        "model_type": "llama",
        "hidden_size": 32,
        "x": 1,
    }
    assert load(recipe, ["model.architecture={model_type: gpt2, n_embd: 8}"]).model.architecture.thaw() == {
        "model_type": "gpt2",
        "n_embd": 8,
    }
    assert "x" not in load(recipe, ["model=llama3.2_1b"]).model.architecture


def test_choosing_an_adapter_preset_switches_adapters_on(write):
    recipe = write("training: {seed: 1}\n")
    assert load(recipe, ["peft=lora"]).training.use_peft
    assert not load(recipe).training.use_peft
    assert not load(write("defaults: [{peft: lora}]\n"), ["~peft"]).training.use_peft


def test_cards(write):
    recipe = write("training: {seed: 1}\n")
    assert load(recipe).gpu.name == "cpu"
    assert load(recipe, ["gpu=h100_80gb"]).gpu.capability == "9.0"
    assert load(recipe, ["gpu=24gb"]).gpu.capability == "8.6"
    mixed = load(recipe, ["gpu=40gb,80gb,40gb"]).gpu
    assert (mixed.name, mixed.count) == ("40gb", 3)
    assert load(recipe, ["gpu=40gb,80gb", "gpu.count=1"]).gpu.count == 1
    write("gpu: {name: mine, count: 4}\n", "card.yaml")
    assert load(recipe, ["gpu=./card.yaml"]).gpu.name == "mine"
    assert "own" in refused(recipe, "gpu=cpu,40gb")[0].message
    [problem] = refused(recipe, "gpu=h100")
    assert problem.nearest == "h100_80gb"
    assert problem.where == "command line"


def test_without_a_choice_the_detected_card_is_taken_and_anything_written_is_above_it(write, monkeypatch):
    monkeypatch.setattr("framework.compose.request.detect", lambda: "t4_16gb")
    assert load(write("training: {seed: 1}\n")).gpu.name == "t4_16gb"
    assert load(write("gpu: {count: 2}\n")).gpu.count == 2
    assert load(write("gpu: {name: other, usable_bytes: 1000}\n")).gpu.capability is None
    assert load(write("defaults: [{gpu: cpu}]\n")).gpu.name == "cpu"
    assert load(write("defaults: [{gpu: cpu}]\n"), ["~gpu"]).gpu.name == "t4_16gb"


def test_the_number_of_processes_is_the_number_of_cards(write):
    assert compose(write("training: {seed: 1}\n"), world=2).config.gpu.count == 2
    assert compose(write("gpu: {count: 2}\n"), world=2).config.gpu.count == 2
    with pytest.raises(RequestError, match="2 cards are written, but 3 processes") as caught:
        compose(write("gpu: {count: 2}\n"), world=3)
    assert caught.value.problems[0].where == "r.yaml:1"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("x", "cannot be 'x'"),
        ("null", "cannot be null"),
        ("[2]", "cannot be"),
        ("1.5", "cannot be 1.5"),
        ("3.0", "3 cards"),
    ],
)
def test_an_invalid_number_of_cards_is_reported_with_a_number_of_processes(write, count, message):
    with pytest.raises(RequestError) as caught:
        compose(write("gpu: {name: t4}\n"), [f"gpu.count={count}"], world=2)
    assert any(message in problem.message for problem in caught.value.problems)


@pytest.mark.parametrize("count", ["2", "2.0", "'2'", "${training.seed}"])
def test_a_number_of_cards_in_any_spelling_agrees_with_the_processes(write, count):
    assert compose(write("training: {seed: 2}\n"), [f"gpu.count={count}"], world=2).config.gpu.count == 2


@pytest.mark.parametrize(
    ("defaults", "word"),
    [
        ("{training: low_memory}", "not a list"),
        ("[low_memory]", "not a preset of a group"),
        ("[{trainin: low_memory}]", "not a preset of a group"),
        ("[{training: low_memory}, {training: low_memory}]", "chosen twice"),
        ("[{training: low_memori}]", "no preset is called"),
        ("[{training: ./gone.yaml}]", "gone.yaml"),
        ("[{training: ~nobody-of-that-name/x.yaml}]", "no such file"),
        ("[{training: '" + "x" * 5000 + ".yaml'}]", "no such file"),
        ("[{training: [low_memory, low_memory]}]", "takes one preset"),
        ("[{training: {a: b}}]", "not a preset of a group"),
    ],
)
def test_wrong_defaults(write, defaults, word):
    [problem] = refused(write(f"defaults: {defaults}\n"))
    assert word in problem.message
    assert problem.where == "r.yaml:1"


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gpu: {name: h100_80gb, count: 2}\n", []),
        ("gpu: {count: 2}\n", ["gpu.name=h100_80gb"]),
        ("defaults: [{gpu: h100_80gb}]\ngpu: {count: 2}\n", ["gpu.name=h100_80gb"]),
    ],
)
def test_the_name_of_a_card_means_its_facts(write, recipe, overrides):
    expected = load(write("gpu: {count: 2}\n"), ["gpu=h100_80gb"]).gpu
    assert expected.usable_bytes
    assert load(write(recipe), overrides).gpu == expected


def test_facts_given_with_the_name_of_a_card_are_above_its_own(write):
    card = load(write("gpu: {name: h100_80gb, usable_bytes: 1000}\n")).gpu
    assert (card.usable_bytes, card.capability) == (1000, "9.0")


def test_a_size_as_name_is_that_size(write):
    assert load(write("gpu: {name: 24gb}\n")).gpu == load(write("training: {seed: 1}\n"), ["gpu=24gb"]).gpu


@pytest.mark.parametrize(
    ("recipe", "overrides", "message", "expected"),
    [
        ("gpu: {name: h100}\n", [], "no card is called 'h100', and no facts", "usable_bytes"),
        (
            "training: {seed: 1}\n",
            ["gpu=a100_80gb", "gpu.name=h100_80gb"],
            "differs from gpu=a100_80gb",
            "gpu=h100_80gb",
        ),
    ],
)
def test_a_name_without_facts_or_against_them_is_refused(write, recipe, overrides, message, expected):
    with pytest.raises(RequestError) as caught:
        load(write(recipe), overrides)
    (problem,) = caught.value.problems
    assert problem.key == "gpu.name"
    assert message in problem.message
    assert expected in (problem.expected or "")
