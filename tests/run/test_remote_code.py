"""Python code that comes with a model runs where this command line or recipe says so, and a run's files never do."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from framework.build.text.tokenizer import train_tokenizer
from framework.cli import main
from framework.compose import load, to_yaml
from tests.tiny import LLAMA

CODE = """
with open({mark!r}, "a") as mark:
    mark.write("x")
from transformers import LlamaConfig, LlamaForCausalLM
class MarkedConfig(LlamaConfig):
    model_type = "marked"
class MarkedModel(LlamaForCausalLM):
    config_class = MarkedConfig
"""
RECIPE = """
model: {{model_name: {base}, trust_remote_code: {trust}, model_max_length: 32}}
data: {{train: [{{path: {rows}}}]}}
training: {{max_steps: 1, per_device_train_batch_size: 2, global_batch_size: 2, output_dir: {run}, use_peft: {peft}}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model folder with code of its own that leaves a mark; gives the folder, the mark, and a file of rows."""
    folder = tmp_path_factory.mktemp("remote")
    base, mark, rows = folder / "base", folder / "mark", folder / "rows.jsonl"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 300})).save_pretrained(base)
    train_tokenizer(["a red apple and a blue sky"] * 9, 300).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "own.MarkedConfig", "AutoModelForCausalLM": "own.MarkedModel"}
    (base / "config.json").write_text(json.dumps({**config, "model_type": "marked", "auto_map": classes}))
    (base / "own.py").write_text(CODE.format(mark=str(mark)))
    rows.write_text('{"text": "a red apple"}\n' * 4)
    return base, mark, rows


@pytest.fixture
def recipe(base, tmp_path, monkeypatch):
    """Writes a recipe with the model; gives its path. No mark is there, and no code is loaded."""
    model, mark, rows = base
    mark.unlink(missing_ok=True)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("framework.compose.request.detect", lambda: None)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def write(trust: bool, peft: bool = False) -> str:
        text = RECIPE.format(base=model, trust=str(trust).lower(), rows=rows, run="run", peft=str(peft).lower())
        Path("mine.yaml").write_text(text)
        return "mine.yaml"

    return write


@pytest.fixture
def foreign_run(base, recipe):
    """A run folder as it may come from anyone: its config trusts the code of that model, and of a teacher."""
    run = Path("run")
    (run / "final").mkdir(parents=True)
    overrides = ["gpu=cpu", "model.trust_remote_code=true", f"training.teacher.model_name={base[0]}"]
    config = load(recipe(True), [*overrides, "training.teacher.trust_remote_code=true", "training.task=distillation"])
    (run / "config.yaml").write_text(to_yaml(config))
    for name in ("plan.json", "environment.json"):
        (run / name).write_text("{}")
    shutil.copytree(base[0], run / "final", dirs_exist_ok=True)
    return run


def printed(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_recipe_allows_it_and_it_is_reported_with_the_revision(base, recipe, capsys):
    assert main(["check", recipe(True), "gpu=cpu", "model.model_revision=abc123"]) == 0
    assert base[1].exists()
    assert f"code that comes with {base[0]} runs with your permissions (revision abc123)" in printed(capsys)


def test_no_code_runs_unless_allowed_and_the_key_is_named(base, recipe, capsys):
    assert main(["check", recipe(False), "gpu=cpu", "--json"]) == 2
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert any("model.trust_remote_code=true" in (error["expected"] or "") for error in errors)
    assert not base[1].exists()


def test_a_runs_config_gives_no_leave_to_any_verb(base, foreign_run, capsys):
    written = str(foreign_run / "config.yaml")
    Path("link.yaml").symlink_to(written)
    (foreign_run / "inner").mkdir()
    shutil.copy(written, foreign_run / "inner" / "recipe.yaml")
    (foreign_run / "chooses.yaml").write_text("defaults: [{model: ./preset.yaml}]\n")
    Path("preset.yaml").write_text("model: {trust_remote_code: true}\n")
    Path("mine.yaml").write_text(f"defaults: [{{model: ./{foreign_run}/trusts.yaml}}]\n")
    (foreign_run / "trusts.yaml").write_text("model: {trust_remote_code: true}\n")
    recipes = ["link.yaml", str(foreign_run / "inner" / "recipe.yaml"), str(foreign_run / "chooses.yaml"), "mine.yaml"]
    commands = [["check", one] for one in recipes]
    commands += [[verb, written] for verb in ("check", "plan", "train", "data", "fit", "show")]
    commands += [["train", written, "--resume"], ["diff", written, written, "--memory"]]
    for command in commands:
        assert main([*command, "gpu=cpu"]) == 2, command
        assert "`model.trust_remote_code=true` on the command line" in printed(capsys), command
    for command in (["predict", str(foreign_run), str(base[2])], ["merge", str(foreign_run)]):
        assert main(command) == 2, command
        assert "--trust-remote-code, if you trust" in printed(capsys)
    assert not base[1].exists()


def test_each_leave_is_repeated_by_itself(base, foreign_run, capsys):
    arguments = [str(foreign_run / "config.yaml"), "gpu=cpu", "model.trust_remote_code=true"]
    assert main(["show", *arguments]) == 2
    output = printed(capsys)
    assert "error training.teacher.trust_remote_code" in output
    assert "error model.trust_remote_code" not in output
    assert main(["show", *arguments, "training.teacher.trust_remote_code=true"]) == 0
    assert main(["show", *arguments, "training.teacher.trust_remote_code=false"]) == 0


def test_a_report_reads_the_config_and_runs_nothing(base, foreign_run):
    assert main(["report", str(foreign_run)]) == 0
    assert "trust_remote_code: true" in (foreign_run / "report.html").read_text()
    assert not base[1].exists()


def test_a_folder_without_a_run_is_not_asked_about_and_not_trusted(base, recipe, capsys, monkeypatch):
    """transformers would ask at the terminal whether the code may run."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert main(["predict", str(base[0]), str(base[2])]) == 2
    assert "--trust-remote-code" in printed(capsys)
    assert not base[1].exists()


def test_pickled_weights_are_not_read(base, recipe, capsys, monkeypatch):
    folder = shutil.copytree(base[0], "pickled")
    Path(folder, "model.safetensors").unlink()
    config = json.loads(Path(folder, "config.json").read_text())
    config.pop("auto_map")
    Path(folder, "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    torch.save(LlamaForCausalLM(LlamaConfig(**LLAMA)).state_dict(), Path(folder, "pytorch_model.bin"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    assert main(["predict", str(folder), str(base[2])]) == 2
    assert "pickled (pytorch_model.bin)" in printed(capsys)
    Path("mine.yaml").write_text(Path(recipe(False)).read_text().replace(str(base[0]), str(Path(folder).absolute())))
    assert main(["train", "mine.yaml", "gpu=cpu", "--quiet"]) == 2
    assert "pickle" in printed(capsys)


def test_an_attention_of_the_hub_is_no_business_of_a_models_files(base, recipe, capsys):
    folder = shutil.copytree(base[0], "kernels")
    config = json.loads(Path(folder, "config.json").read_text())
    config.pop("auto_map")
    for key in ("attn_implementation", "_attn_implementation"):
        Path(folder, "config.json").write_text(json.dumps({**config, "model_type": "llama", key: "someone/kernel"}))
        Path("mine.yaml").write_text(Path(recipe(False)).read_text().replace(str(base[0]), "./kernels"))
        assert main(["check", "mine.yaml", "gpu=cpu"]) == 2
        assert "names code of a hub as its attention: someone/kernel" in printed(capsys)


@pytest.mark.slow
def test_a_run_of_trusted_code_is_planned_trained_asked_and_merged(base, recipe, capsys):
    assert (
        main(["train", recipe(True, peft=True), "gpu=cpu", "peft.lora_target_modules=[all-linear]", "--quiet"]) == 0
    ), printed(capsys)
    assert main(["check", "run/config.yaml", "gpu=cpu", "model.trust_remote_code=true"]) == 0
    for command in (["predict", "run", str(base[2]), "--max-new-tokens", "2"], ["merge", "run"]):
        assert main(command) == 2
        base[1].unlink(missing_ok=True)
        assert main([*command, "--trust-remote-code"]) == 0, printed(capsys)
        assert "no revision is set" in printed(capsys)
