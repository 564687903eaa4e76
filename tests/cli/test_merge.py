"""`merge` from the command line, and adapted runs from end to end."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import framework
from framework.cli import main
from tests.cli.test_train import RECIPE
from tests.grids import first

IDS = torch.arange(12).view(2, 6)


@pytest.fixture
def run(write):
    """Trains the tiny recipe with overrides; gives the run folder."""
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    recipe = write(RECIPE)

    def train(*overrides, folder="run"):
        keys = ["gpu=cpu", "training.learning_rate=0.01", f"training.output_dir={folder}", *overrides]
        assert main(["train", str(recipe), *keys]) == 0
        return Path(folder)

    return train


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(autouse=True)
def _unplanned(monkeypatch):
    monkeypatch.setattr("framework.run.trainer.train.__kwdefaults__", {**_defaults(), "planner": None})


def _defaults():
    from framework.run import trainer

    return dict(trainer.train.__kwdefaults__)


@pytest.mark.parametrize("method", first(2, ["dora", "pissa", "lora", "vera"]))
def test_the_merged_folder_computes_what_the_run_did(run, method, capsys):
    folder = run(f"peft={method}", "peft.peft_save_mode=adapter_and_base_model")
    base = AutoModelForCausalLM.from_pretrained(folder / "final" / "base_model")
    expected = logits(PeftModel.from_pretrained(base, folder / "final"))
    capsys.readouterr()
    assert main(["merge", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"schema_version": 1, "folder": str(folder / "merged"), "dtype": "float32", "dequantized": None}
    merged = logits(AutoModelForCausalLM.from_pretrained(folder / "merged"))
    assert torch.allclose(merged, expected, atol=1e-5)
    assert (folder / "merged" / "tokenizer.json").exists()
    assert main(["merge", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("peft", first(2, ["pissa", "loftq", "lora", "qlora"]))
def test_a_base_that_was_not_saved_is_made_again(run, peft, capsys):
    if peft in ("qlora", "loftq"):
        pytest.importorskip("bitsandbytes")
    wanted = run(f"peft={peft}", "peft.peft_save_mode=merged", folder="wanted")
    folder = run(f"peft={peft}")
    capsys.readouterr()
    assert main(["merge", str(folder), "--output", "out"]) == 0
    output = capsys.readouterr().out
    assert ("dequantised to float32" in output) is (peft in ("qlora", "loftq"))
    expected = logits(AutoModelForCausalLM.from_pretrained(wanted / "final"))
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained("out")), expected, atol=1e-5)


def test_a_folder_that_cannot_be_made_is_reported_before_anything_is_loaded(run, capsys, monkeypatch):
    folder = run("peft=lora")
    monkeypatch.setattr("framework.run.checkpoints.merge.load_base", None)
    capsys.readouterr()
    for output in (str(folder / "config.yaml" / "merged"), "/dev/full/merged"):
        assert main(["merge", str(folder), "--output", output, "--json"]) == 2
        [problem] = json.loads(capsys.readouterr().out)["errors"]
        assert problem["key"] == "--output"
        assert problem["message"].startswith(f"{output} cannot be created or written to: ")


def test_a_damaged_export_is_named(run, capsys):
    """Cut files and missing ones: the user's disk, not a fault of the program, and nothing is asked of a hub."""
    adapted, plain = run("peft=lora"), run("training.use_peft=false", folder="plain")
    for folder, name, message in (
        (adapted, "adapter_model.safetensors", "does not fit its base: Error while deserializing header"),
        (adapted, "adapter_model.safetensors", "has no adapter_model.safetensors"),
        (adapted, "adapter_config.json", "adapter_config.json cannot be read"),
        (plain, "model.safetensors", "model.safetensors cannot be read: Error while deserializing header"),
    ):
        file = folder / "final" / name
        content = file.read_bytes()
        file.unlink() if "has no" in message else file.write_bytes(content[:100])
        capsys.readouterr()
        ask = ["predict", str(folder), "rows.txt"] if folder == plain else ["merge", str(folder)]
        assert main(ask) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        file.write_bytes(content)


def test_what_cannot_be_merged_is_named(run, capsys):
    plain = run("training.use_peft=false")
    capsys.readouterr()
    prompt = run("peft=prompt", folder="prompt")
    assert "tunesmith merge" not in capsys.readouterr().out
    Path("empty").mkdir()
    unfinished = Path("unfinished")
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text((plain / "config.yaml").read_text())
    for folder, reason in (
        (plain, "is a plain model already"),
        (prompt, "nothing to add to the weights"),
        (Path("empty"), "neither a model nor a run"),
        (Path("absent"), "is not a folder"),
        (unfinished, "has not finished"),
    ):
        capsys.readouterr()
        assert main(["merge", str(folder)]) == 2
        assert reason in capsys.readouterr().err
        assert not (folder / "merged").exists()


def test_an_adapter_folder_alone(run, capsys):
    folder = run("peft=lora", "peft.peft_save_mode=adapter_and_base_model")
    expected = logits(
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder / "final" / "base_model"), folder / "final"
        )
    )
    assert main(["merge", str(folder / "final"), "--output", "alone"]) == 0
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained("alone")), expected, atol=1e-5)
    other = run("peft=lora", folder="other")
    shutil.copytree(other / "final", "elsewhere")
    assert main(["merge", "elsewhere"]) == 2
    assert "which base" in capsys.readouterr().err
    assert main(["merge", str(other / "final")]) == 0, "the run that it came from is next to it"


@pytest.mark.parametrize("peft", first(2, ["prefix", "ia3", "prompt", "olora", "rslora"]))
def test_each_preset_trains_from_end_to_end(run, peft, capsys):
    folder = run(f"peft={peft}")
    printed = capsys.readouterr()
    assert f"peft.peft_method {peft}" in " ".join((printed.out + printed.err).split())
    assert f"adapter     {folder / 'final'}" in printed.out.replace(str(Path.cwd()) + "/", "")
    assert (folder / "final" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_merge_draws_no_bars_into_a_pipe(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(framework.__file__).parents[1]))
    command = [sys.executable, "-m", "framework", "merge", str(run("peft=lora").absolute())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "shards" not in done.stderr
