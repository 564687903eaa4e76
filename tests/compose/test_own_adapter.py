"""An adapter's own config overrides presets, and must agree with written values."""

import json

import pytest

from framework.compose import compose
from framework.compose.request import draft

SAVED = {
    "peft_type": "LORA",
    "base_model_name_or_path": "org/base",
    "r": 6,
    "lora_alpha": 12,
    "lora_dropout": 0.1,
    "target_modules": ["v_proj", "q_proj"],
    "modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "init_lora_weights": True,
}
RECIPE = "defaults: [{peft: lora}]\npeft: {adapter_path: saved}\ntraining: {max_steps: 1}\n"


@pytest.fixture
def recipe(write, tmp_path):
    save(tmp_path / "saved")
    return write(RECIPE)


def save(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SAVED, **changes}))


def test_the_adapter_decides_over_a_preset_and_names_its_base(recipe, tmp_path):
    config = compose(recipe).config
    assert (config.peft.lora_r, config.peft.lora_alpha, config.peft.lora_dropout) == (6, 12, 0.1)
    assert config.peft.lora_target_modules == ("q_proj", "v_proj")
    assert config.training.use_peft
    assert config.model.model_name == "org/base"
    assert config.peft.adapter_path == str(tmp_path / "saved")
    assert "adapter_config.json" in str(compose(recipe).origins["peft.lora_r"])


def test_the_kind_is_that_of_the_adapter(recipe, tmp_path):
    save(tmp_path / "saved", use_dora=True)
    assert compose(recipe).config.peft.peft_method == "dora"
    save(tmp_path / "saved", peft_type="PROMPT_TUNING", num_virtual_tokens=7)
    config = compose(recipe).config
    assert (config.peft.peft_method, config.peft.num_virtual_tokens) == ("prompt", 7)


def test_written_values_that_differ_are_problems_with_their_place(recipe):
    found = draft(recipe, ["peft.lora_r=8", "peft.peft_method=dora", "peft.lora_dropout=0.2", "peft.lora_alpha=12"])
    assert [problem.key for problem in found.problems] == ["peft.peft_method", "peft.lora_r"]
    assert "is 8, and the adapter in" in found.problems[1].message
    assert "has 6" in found.problems[1].message
    assert found.problems[1].where == "command line"


def test_another_model_than_its_base_is_a_warning(recipe):
    [warning] = draft(recipe, ["model.model_name=org/other"]).warnings
    assert "is org/other, and the adapter in" in warning.message
    assert "was trained on org/base" in warning.message
    assert not draft(recipe, ["model.model_name=org/base"]).warnings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bias": "all"}, "bias: all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"peft_type": "LOHA"}, "the kind LOHA"),
        ({"use_dora": True, "use_rslora": True}, "the kind LORA"),
    ],
)
def test_an_adapter_that_is_not_trained_here_is_refused(recipe, tmp_path, changes, expected):
    save(tmp_path / "saved", **changes)
    [problem] = draft(recipe).problems
    assert problem.key == "peft.adapter_path"
    assert expected in problem.message


def test_a_run_is_as_good_as_its_final_folder(write, tmp_path):
    save(tmp_path / "runs" / "sft" / "final")
    path = write(RECIPE.replace("saved", "runs/sft"))
    assert compose(path).config.peft.lora_r == 6


@pytest.mark.parametrize(
    ("files", "path", "message", "expected"),
    [
        ((), "gone/far/away", "there is no folder", None),
        (("runs/sft/config.yaml",), "runs/sft", "has not finished", "--resume"),
        (("runs/sft/final/config.json",), "runs/sft", "holds a full model", "model.model_name="),
        (("runs/sft/config.yaml",), "runs/sft/checkpoints/step-00000002", "holds a checkpoint", "--resume"),
        (("empty/x",), "empty", "has no adapter_config.json", "an adapter's folder"),
    ],
)
def test_a_path_that_holds_no_adapter_is_reported_with_what_to_write(write, tmp_path, files, path, message, expected):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    if "step" in path:
        (tmp_path / path).mkdir(parents=True)
    [problem] = draft(write(RECIPE.replace("saved", path))).problems
    assert message in problem.message
    assert problem.where == "r.yaml:2"
    assert expected is None or expected in str(problem.expected)
