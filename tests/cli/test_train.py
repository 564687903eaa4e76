"""`train` from the command line: what it prints, what it exits with, and how far it is to the optimizer."""

import json
import traceback
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

import framework
from framework.cli import main

RECIPE = """
training: {task: pretrain, max_steps: 2, per_device_train_batch_size: 2, output_dir: run}
model:
  load_pretrained_weights: false
  tokenizer: {train: bpe, vocab_size: 300}
  model_max_length: 16
  architecture: {model_type: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}
data: {train: [{path: rows.txt, format: text}]}
"""
OURS = str(Path(framework.__file__).parent)
MAX_FRAMES = 4


@pytest.fixture
def recipe(write, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(framework.__file__).parents[1]))  # for processes that `train` starts
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    return write(RECIPE)


def losses(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_its_distance_to_the_optimizer_and_its_config_trained_again(recipe, capsys):
    frames: list[list[str]] = []

    def look(*_):
        stack = traceback.extract_stack()
        frames.append([frame.name for frame in stack if frame.filename.startswith(OURS)])

    hook = register_optimizer_step_pre_hook(look)
    try:
        assert main(["train", str(recipe), "--json", "gpu=cpu"]) == 0
    finally:
        hook.remove()
    assert len(frames) == 2
    assert all(len(names) <= MAX_FRAMES for names in frames), frames[0]
    assert frames[0][0] == "main"
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == 2
    assert Path(document["folder"]) == Path("run").absolute()

    assert main(["train", str(recipe)]) == 2
    assert "training.output_dir" in capsys.readouterr().err
    assert main(["train", "run/config.yaml", "training.output_dir=again"]) == 0
    assert "run folder" in capsys.readouterr().out
    assert losses("again") == losses("run")


def test_a_dry_run_writes_nothing(recipe):
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert not Path("run").exists()


def test_check_continues_with_tokenizer_model_and_rows(recipe, capsys):
    assert main(["check", str(recipe)]) == 0
    assert "tokenizer, model and all 64 training rows" in capsys.readouterr().out
    assert main(["check", str(recipe), "data.streaming=true", "data.shuffle_buffer=8"]) == 0
    assert "tokenizer, model and the first 8 rows of a stream" in capsys.readouterr().out
    assert main(["check", str(recipe), "model.architecture.hiden_size=3", "--json"]) == 2
    [error] = json.loads(capsys.readouterr().out)["errors"]
    assert error["key"] == "model.architecture.hiden_size"
    assert error["where"] == "command line"


@pytest.mark.parametrize("sharing", ["fsdp.tensor_parallel_size=2", "model.attn_implementation=ring_attention"])
def test_check_looks_at_what_devices_share_without_any(sharing, recipe, capsys):
    sizes = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4"
    asked = ["check", str(recipe), "gpu.count=2", sharing]
    llama = f"model.architecture={{model_type: llama, {sizes}, num_key_value_heads: 2}}"
    assert main([*asked, llama]) == 0, capsys.readouterr().err
    if "tensor" in sharing:
        assert main([*asked, llama.replace("heads: 2", "heads: 1")]) == 2
        assert "1 key and value heads of llama are not 2 equal parts" in capsys.readouterr().err
        assert main([*asked, llama.replace("llama", "cohere, use_qk_norm: true")]) == 2
        assert "transformers' plan does not mention" in capsys.readouterr().err


def test_check_tells_what_training_would_warn_of(write, capsys):
    write("".join(json.dumps({"text": f"a {n}", "label": 2e9 + n}) + "\n" for n in range(40)), "rows.jsonl")
    text = RECIPE.replace("task: pretrain", "task: " + "regression").replace(
        "{path: rows.txt, format: text}", "{path: rows.jsonl}"
    )
    assert main(["check", str(write(text)), "--json"]) == 0
    [warning] = [one for one in json.loads(capsys.readouterr().out)["warnings"] if "float32" in one["message"]]
    assert warning["key"] == "data.train"
    assert warning["where"] == "r.yaml:9"
    assert "subtract 2000000020 from" in warning["message"]


def test_check_reports_a_single_class(write, capsys):
    write("".join(json.dumps({"text": f"a {n}", "label": "one"}) + "\n" for n in range(40)), "rows.jsonl")
    text = RECIPE.replace("task: pretrain", "task: " + "classification").replace(
        "{path: rows.txt, format: text}", "{path: rows.jsonl}"
    )
    assert main(["check", str(write(text))]) == 2
    assert "nothing to tell apart" in capsys.readouterr().err


def test_what_is_wrong_with_the_model_is_placed_by_train_too(recipe, capsys):
    targets = "peft.lora_target_modules=[c_attn]"
    assert main(["train", str(recipe), "training.use_peft=true", targets, "--json"]) == 2
    [error] = json.loads(capsys.readouterr().out)["errors"]
    assert (error["key"], error["where"]) == ("peft.lora_target_modules[0]", "command line")


def test_check_tells_what_an_adapter_leaves_out(recipe, capsys):
    targets = "peft.lora_target_modules=[q_proj,c_attn]"
    assert main(["check", str(recipe), "training.use_peft=true", targets, "--json"]) == 0
    [warning] = json.loads(capsys.readouterr().out)["warnings"]
    assert "'c_attn' names no module" in warning["message"]
    assert (warning["key"], warning["where"]) == ("peft.lora_target_modules", "command line")


def test_a_run_that_is_done_says_so_when_it_is_resumed(recipe, capsys):
    assert main(["train", str(recipe), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["train", str(recipe), "--resume"]) == 0
    assert "after step 2 of 2: nothing is left to train" in capsys.readouterr().err
    assert main(["train", str(recipe), "--resume", "--allow", "max_steps"]) == 2
    assert "did you mean training.max_steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["training.learning_rate=1e30", "training.max_steps=9"], 4, "loss"),
        (["gpu.usable_bytes=1000"], 3, "usable"),
        (["training.learning_rate=x"], 2, "cannot be 'x'"),
    ],
)
def test_what_ends_a_run_early_is_one_document(recipe, capfd, arguments, code, message):
    assert main(["train", str(recipe), "--json", "gpu=cpu", *arguments]) == code
    [problem] = json.loads(capfd.readouterr().out)["errors"]
    assert message in problem["message"]
