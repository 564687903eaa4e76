import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch
import yaml
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoModelForCausalLM, AutoTokenizer

from framework.build.levers import compiled
from framework.errors import BrokenRows, DoesNotFit, Interrupted, NonFinite, RequestError, VerificationFailed
from framework.memory.explain import explain
from framework.memory.units import size
from framework.run import session as session_module
from framework.run import trainer
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.setup import start as opening
from framework.schema.config import TrainingConfig
from tests.grids import chosen, first, slow
from tests.tiny import GPT2, LLAMA

ROWS = 40


def train(config, **options):
    """A run without a plan, which takes seconds to make; what a plan does to a run is tested below."""
    return trainer.train(config, **{"planner": None, "quiet": True, **options})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Real text that every machine has: docstring-sized pieces of a standard library module, as JSONL."""
    text = Path(json.__file__).with_name("decoder.py").read_text().split("\n\n")
    file = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    pieces = [piece for piece in text if len(piece) > 40]
    file.write_text("".join(json.dumps({"text": pieces[i % len(pieces)] + f" # {i}"}) + "\n" for i in range(ROWS)))
    return file


def config(corpus, folder, *, training=None, model=None, data=None, architecture=GPT2, peft=None):
    architecture = {**architecture, "resid_pdrop": 0.1} if architecture is GPT2 else dict(architecture)
    architecture.pop("vocab_size")
    return TrainingConfig(
        training={
            "task": "pretrain",
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 16,
            "global_batch_size": 4,
            "learning_rate": 1e-2,
            "output_dir": str(folder),
            **(training or {}),
        },
        model={
            "architecture": architecture,
            "load_pretrained_weights": False,
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "model_max_length": 32,
            **(model or {}),
        },
        data={"train": [{"path": str(corpus)}], "eval_fraction": 0.03, **(data or {})},
        peft=peft or {},
    )


def metrics(folder, key="loss"):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def final_weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupt_after(step, monkeypatch):
    """Press Ctrl-C while step `step` is being made."""
    original = session_module.Session._log

    def log(self, *arguments):
        original(self, *arguments)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session_module.Session, "_log", log)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """Twelve steps in one go: more than one epoch, dropout on, shuffled."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(config(corpus, folder))
    return metrics(folder), final_weights(folder), folder


@pytest.mark.parametrize("step", chosen((4, 9), range(1, 12)))
def test_resuming_at_any_step_is_exact(corpus, straight, tmp_path, monkeypatch, step):
    """Stopped after each step of 12, mid-epoch and at its edge; the same losses, the same weights bit for bit."""
    losses, weights, _ = straight
    with monkeypatch.context() as patched:
        interrupt_after(step, patched)
        with pytest.raises(Interrupted, match=f"after step {step}"):
            train(config(corpus, tmp_path / "run"))
    torch.manual_seed(999)  # whatever the process drew meanwhile
    workers = 2 if step in (3, 9) else 0
    train(config(corpus, tmp_path / "run", data={"workers": workers}), resume=True)
    assert metrics(tmp_path / "run") == losses
    assert same(final_weights(tmp_path / "run"), weights)


def test_workers_do_not_change_the_trained_weights(corpus, straight, tmp_path):
    train(config(corpus, tmp_path / "run", data={"workers": 2}))
    assert multiprocessing.active_children() == [], "workers end with the run"
    assert metrics(tmp_path / "run") == straight[0]
    assert same(final_weights(tmp_path / "run"), straight[1])


@pytest.mark.parametrize(("micro", "total"), first(1, [(4, 4), (1, 4)]))
def test_the_split_into_micro_batches_does_not_change_the_trained_weights(corpus, tmp_path, micro, total):
    plain = {**GPT2, "resid_pdrop": 0.0}
    sizes = {"per_device_train_batch_size": micro, "global_batch_size": total}
    reference = config(corpus, tmp_path / "a", architecture=plain)
    train(reference)
    train(config(corpus, tmp_path / "b", architecture=plain, training=sizes))
    expected = metrics(tmp_path / "a")
    assert metrics(tmp_path / "b") == pytest.approx(expected, rel=1e-5)


def test_the_run_folder_is_complete(straight):
    _, _, folder = straight
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "memory.json",
        "checkpoints",
        "final",
    }
    assert [path.name for path in checkpoints(folder)] == ["step-00000012"]
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    assert set(line) >= {
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens",
        "supervised_tokens",
        "tokens_per_second",
        "step_seconds",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
    }
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["predicted"] is None
    assert memory["measured"]["allocated_bytes"] > 50 * 2**20
    environment = json.loads((folder / "environment.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"])


def test_the_written_config_trains_again_unchanged(straight, tmp_path):
    losses, weights, folder = straight
    document = yaml.safe_load((folder / "config.yaml").read_text())
    document["training"]["output_dir"] = str(tmp_path / "again")
    train(TrainingConfig.model_validate(document))
    assert metrics(tmp_path / "again") == losses
    assert same(final_weights(tmp_path / "again"), weights)


def test_the_export_loads_with_plain_transformers(straight):
    """Model, tokenizer and dtype, without a word of ours."""
    _, weights, folder = straight
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    stated = json.loads((folder / "final" / "config.json").read_text())["dtype"]
    assert {str(tensor.dtype) for tensor in weights.values() if tensor.is_floating_point()} == {f"torch.{stated}"}


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_in_the_checkpoints_dtype_and_keeps_the_tie(corpus, tmp_path, tied):
    """Trained in float32, written in the bfloat16 that the architecture states."""
    architecture = {**LLAMA, "dtype": "bfloat16", "tie_word_embeddings": tied}
    train(config(corpus, tmp_path / "run", architecture=architecture, training={"max_steps": 1}))
    document = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert document["dtype"] == "bfloat16"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) is tied


def test_an_adapter_is_exported_as_an_adapter(corpus, tmp_path):
    peft = {"lora_target_modules": ["all-linear"]}
    run = config(corpus, tmp_path / "run", architecture=LLAMA, training={"use_peft": True, "max_steps": 2}, peft=peft)
    train(run)
    files = {path.name for path in (tmp_path / "run" / "final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files


def test_a_dry_run_writes_nothing(corpus, tmp_path):
    train(config(corpus, tmp_path / "run"), dry_run=True)
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_not_touched_without_overwrite(corpus, straight, tmp_path):
    _, _, folder = straight
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(RequestError, match="already holds a run"):
        train(config(corpus, folder))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_overwriting_removes_only_what_a_run_writes(corpus, tmp_path):
    folder = tmp_path / "run"
    train(config(corpus, folder, training={"max_steps": 1}))
    (folder / "notes.txt").write_text("mine")
    train(config(corpus, folder, training={"max_steps": 2}), overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in checkpoints(folder)] == ["step-00000002"]


def test_resuming_with_other_settings_is_classed(corpus, straight):
    """Harmless changes are accepted, risky ones need --allow, others are refused; all in one report."""
    _, _, folder = straight
    changed = config(
        corpus,
        folder,
        training={"logging_steps": 5, "learning_rate": 5e-3, "max_steps": 12},
        architecture={**GPT2, "n_layer": 3},
    )
    with pytest.raises(RequestError) as caught:
        train(changed, resume=True)
    problems = {problem.key: problem for problem in caught.value.problems}
    assert problems["training.learning_rate"].expected == "--allow training.learning_rate"
    assert "another run" in problems["model.architecture.n_layer"].message
    assert "training.logging_steps" not in problems


def test_rows_from_python_train_and_are_asked_for_again(corpus, tmp_path):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    given = config(corpus, tmp_path / "given", data={"train": []}, training={"max_steps": 4})
    whole = train(config(corpus, tmp_path / "file", training={"max_steps": 4}))
    train(given, train_rows=lambda: iter(rows))
    assert metrics(tmp_path / "given") == metrics(whole.folder)
    recorded = yaml.safe_load((tmp_path / "given" / "config.yaml").read_text())
    assert recorded["data"]["train"][0]["path"] == "python_rows"
    again = given.model_copy(update={"training": given.training.model_copy(update={"max_steps": 5})})
    with pytest.raises(RequestError, match=r"data\.train"):
        train(again, resume=True, allow=["training.max_steps"])
    with pytest.raises(RequestError, match=r"data\.train\[0\]\.digest: was"):
        train(again, resume=True, allow=["training.max_steps"], train_rows=rows[1:])
    train(again, resume=True, allow=["training.max_steps"], train_rows=rows)
    assert max(metrics(tmp_path / "given")) == 5


def test_the_config_of_a_run_that_resumes_is_what_it_trains_and_earlier_ones_stay(corpus, tmp_path):
    def run(steps, **training):
        return config(corpus, tmp_path / "run", training={"max_steps": steps, **training})

    def steps(name):
        return yaml.safe_load((tmp_path / "run" / name).read_text())["training"]["max_steps"]

    def configs():
        return sorted(path.name for path in (tmp_path / "run").glob("config*"))

    train(run(3))
    train(run(3), resume=True)
    assert configs() == ["config.yaml"]
    train(run(5), resume=True, allow=["training.max_steps"])
    assert configs() == ["config-until-step-00000003.yaml", "config.yaml"]
    assert (steps("config-until-step-00000003.yaml"), steps("config.yaml")) == (3, 5)
    train(run(5, logging_steps=2), resume=True)
    train(run(6, logging_steps=2), resume=True, allow=["training.max_steps"])
    assert [steps(name) for name in configs()] == [3, 5, 5, 6]
    again = TrainingConfig.model_validate(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    assert train(again, overwrite=True).steps == 6
    assert configs() == ["config.yaml"]


STREAM = {"streaming": True, "shuffle_buffer": 16, "eval_fraction": 0.0}


@pytest.mark.parametrize("workers", [0, slow(1)])
def test_a_stream_resumes_where_it_stopped(corpus, tmp_path, workers):
    def run(name, steps):
        training = {"max_steps": steps, "lr_scheduler_type": "constant"}
        return config(corpus, tmp_path / name, data={**STREAM, "workers": workers}, training=training)

    whole = train(run("whole", 18))
    train(run("parts", 7))
    train(run("parts", 18), resume=True, allow=["training.max_steps"])
    assert metrics(tmp_path / "parts") == metrics(whole.folder)
    assert same(final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole"))


def test_a_broken_row_of_a_stream_ends_the_run_and_saves_the_trained_weights(corpus, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a few words"}\n' * 300 + '{"text": 5}\n')
    some = config(broken, tmp_path / "run", data={**STREAM, "packing": True}, training={"max_steps": 200})
    with pytest.raises(BrokenRows, match=r"broken\.jsonl:301") as caught:
        train(some)
    step = max(metrics(tmp_path / "run"))
    assert f"the state after step {step} is saved" in str(caught.value)
    assert [int(folder.name[5:]) for folder in checkpoints(tmp_path / "run")] == [step]


def test_nothing_to_resume_is_reported(corpus, tmp_path):
    with pytest.raises(RequestError, match="there is no checkpoint"):
        train(config(corpus, tmp_path / "run"), resume=True)


def test_a_non_finite_loss_writes_no_checkpoint_over_a_good_one(corpus, tmp_path, monkeypatch):
    """The last good checkpoint stays the last."""
    original = session_module.Session._log

    def poison(self, *arguments):
        original(self, *arguments)
        if self.step == 3:
            self.assembly.trained[0].data.fill_(float("nan"))

    monkeypatch.setattr(session_module.Session, "_log", poison)
    run = config(corpus, tmp_path / "run", training={"save_steps": 2})
    with pytest.raises(NonFinite, match=r"step 4.*Training rows of this step: \[\d+, "):
        train(run)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert not (tmp_path / "run" / "final").exists()
    explanation = explain(tmp_path / "run")
    assert (explanation.message.kind, explanation.circumstances.step) == ("nan", 4)
    assert "Training rows of this step" in explanation.message.excerpt


def test_skipped_steps_of_float16_are_counted_and_resumed(corpus, tmp_path, monkeypatch):
    """The overflow of step 2 is in metrics.jsonl as JSON knows numbers, and the count outlives an interruption."""

    def run(folder):
        return config(corpus, folder, training={"mixed_precision_dtype": "fp16", "max_steps": 5}, architecture=LLAMA)

    original = session_module.Session.observe

    def overflow(self, phase):
        original(self, phase)
        if phase == "optimizer_step" and self.step == 1:
            self.assembly.trained[0].grad[0, 0] = float("inf")

    monkeypatch.setattr(session_module.Session, "observe", overflow)
    train(run(tmp_path / "straight"))
    with monkeypatch.context() as patched:
        interrupt_after(3, patched)
        with pytest.raises(Interrupted):
            train(run(tmp_path / "run"))
    train(run(tmp_path / "run"), resume=True)
    assert metrics(tmp_path / "run", "skipped_steps") == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    assert metrics(tmp_path / "run", "loss_scale") == {1: 2**16} | dict.fromkeys(range(2, 6), 2**15)
    assert metrics(tmp_path / "run", "grad_norm")[2] is None
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


@pytest.mark.parametrize(("save", "evaluate", "keep"), first(1, [(5, 4, 2), (3, 5, 1), (1, 7, 3)]))
def test_retention_holds_with_any_pair_of_intervals(corpus, tmp_path, save, evaluate, keep):
    """Save and evaluation intervals that are not multiples of one another."""
    intervals = {"save_steps": save, "eval_steps": evaluate, "save_total_limit": keep}
    train(config(corpus, tmp_path / "run", training=intervals))
    saved = [int(path.name[-8:]) for path in checkpoints(tmp_path / "run")]
    due = sorted({*range(save, 13, save), 12})
    assert saved == due[-keep:]
    assert set(metrics(tmp_path / "run", "eval_loss")) == {0, *range(evaluate, 12, evaluate), 12}


def test_few_frames_stand_between_the_trainer_and_the_optimizer(corpus, tmp_path, monkeypatch):
    """From `train` to Optimizer.step: the loop and the step, nothing else of ours."""
    seen = []
    original = torch.optim.AdamW.step

    def step(self, closure=None):
        seen.append([frame.name for frame in traceback.extract_stack() if "/framework/" in frame.filename])
        return original(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(config(corpus, tmp_path / "run", training={"max_steps": 1}))
    assert seen == [["train", "launch_step"]]


def test_tensorboard_gets_the_metrics(corpus, tmp_path):
    pytest.importorskip("tensorboard")
    train(config(corpus, tmp_path / "run", training={"trackers": ["tensorboard"], "max_steps": 1}))
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def test_a_tracker_that_is_not_installed_is_an_error(corpus, tmp_path):
    if "wandb" in sys.modules:
        pytest.skip("wandb is installed")
    with pytest.raises(RequestError, match="the package wandb is not installed"):
        train(config(corpus, tmp_path / "run", training={"trackers": ["wandb"]}))


def test_an_option_that_cannot_be_is_refused_from_python_too(corpus, tmp_path):
    made = config(corpus, tmp_path / "run")
    split = made.model_copy(update={"fsdp": made.fsdp.model_copy(update={"tensor_parallel_size": 2})})
    with pytest.raises(RequestError, match=r"fsdp\.tensor_parallel_size: 1 device is no group of 2"):
        train(split)
    assert not (tmp_path / "run").exists()


def test_what_was_predicted_stands_next_to_what_was_measured(corpus, tmp_path):
    """The real planner, for the CPU: what came into resident memory with the model."""
    result = train(config(corpus, tmp_path / "run", training={"max_steps": 2}), planner=trainer.plan_in_subprocess)
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    predicted, measured = memory["predicted"]["peak"]["allocated_bytes"], memory["measured"]
    own = measured["allocated_bytes"] - measured["baseline_bytes"]
    assert memory["error"] == compare_bytes(predicted, own, memory["error"]["phases"])
    assert f"peak memory {size(measured['allocated_bytes'])} of the whole process" in result.memory
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["peak"]["allocated_bytes"] == predicted


def compare_bytes(predicted, own, phases):
    """The error that memory.json has to state: none where the model fitted into memory the process had already."""
    return {"allocated": pytest.approx(predicted / own - 1, abs=1e-5) if own > 0 else None, "phases": phases}


def test_a_run_over_the_card_is_refused_before_anything_is_loaded(corpus, tmp_path, monkeypatch):
    plan = plan_in_subprocess(config(corpus, tmp_path / "run"))
    small = dataclasses.replace(plan, device=dataclasses.replace(plan.device, name="toaster", usable_bytes=1000))
    monkeypatch.setattr(opening, "assemble", lambda *_: pytest.fail("weights were made"))
    with pytest.raises(DoesNotFit, match=r"toaster has 0\.00 GiB usable; most is"):
        train(config(corpus, tmp_path / "run"), planner=lambda _: small)
    assert not (tmp_path / "run").exists()


def test_a_run_that_would_fill_the_disk_is_refused_before_anything_is_loaded(corpus, tmp_path, monkeypatch):
    """Through `train`."""
    plan = plan_in_subprocess(config(corpus, tmp_path / "run"))
    large = dataclasses.replace(plan, disk_bytes=1 << 60)
    monkeypatch.setattr(opening, "assemble", lambda *_: pytest.fail("weights were made"))
    with pytest.raises(DoesNotFit, match=r"writes up to 1,073,741,824\.00 GiB"):
        train(config(corpus, tmp_path / "run"), planner=lambda _: large)
    assert not (tmp_path / "run").exists()


def test_a_failing_evaluation_does_not_lose_the_export(corpus, tmp_path, monkeypatch):
    """The final save never depends on evaluation succeeding."""
    original = session_module.Session.evaluate

    def evaluate(self):
        if self.step == 2:
            raise RuntimeError("no evaluation today")
        original(self)

    monkeypatch.setattr(session_module.Session, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="no evaluation today"):
        train(config(corpus, tmp_path / "run", training={"max_steps": 2}))
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]


@pytest.mark.slow
def test_a_compiled_run_resumes_as_a_plain_one_and_its_export_is_plain(corpus, tmp_path, monkeypatch):
    """No saved name shows the compiler; graphs run operator by operator here, which needs no C++ compiler."""
    monkeypatch.setattr(compiled, "lower", aot_eager)
    torch._dynamo.reset()
    plain = {**GPT2, "resid_pdrop": 0.0}
    two, four = ({"max_steps": steps, "lr_scheduler_type": "constant"} for steps in (2, 4))
    train(config(corpus, tmp_path / "run", architecture=plain, training={**two, "compile": True}))
    assert not [name for name in final_weights(tmp_path / "run") if "_orig_mod" in name]
    train(config(corpus, tmp_path / "run", architecture=plain, training=four), resume=True, allow=ALLOWED)
    train(config(corpus, tmp_path / "straight", architecture=plain, training=four))
    assert metrics(tmp_path / "run") == pytest.approx(metrics(tmp_path / "straight"), rel=1e-5)


ALLOWED = ("training.compile", "training.max_steps")


def test_rows_padded_to_a_multiple_learn_the_same_and_are_read_back(corpus, tmp_path, capfd):
    plain = {**GPT2, "resid_pdrop": 0.0}
    train(config(corpus, tmp_path / "a", architecture=plain, training={"max_steps": 3}))
    padded = config(
        corpus, tmp_path / "b", architecture=plain, training={"max_steps": 3}, data={"pad_to_multiple_of": 16}
    )
    train(padded, quiet=False)
    assert metrics(tmp_path / "b") == pytest.approx(metrics(tmp_path / "a"), rel=1e-5)
    assert "data.pad_to_multiple_of = 16" in "".join(capfd.readouterr())
    assert all(tokens % 32 == 0 for step, tokens in metrics(tmp_path / "b", "tokens").items() if step)


def test_a_width_that_is_no_multiple_stops_the_run(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "training_batches", _unpadded(opening.training_batches))
    with pytest.raises(VerificationFailed, match=r"data.pad_to_multiple_of: asked 32, in effect"):
        train(config(corpus, tmp_path / "run", data={"pad_to_multiple_of": 32}, model={"model_max_length": 31}))


def _unpadded(original):
    return lambda *arguments: dataclasses.replace(original(*arguments), multiple=1)


def test_auto_is_decided_before_the_run_and_written_resolved(corpus, tmp_path):
    """On the CPU, which has no limit: the plain values, with unchanged rows per step."""
    open_keys = {"per_device_train_batch_size": "auto", "max_steps": 1}
    train(config(corpus, tmp_path / "run", training=open_keys, model={"chunked_loss": "auto"}))
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["training"]["per_device_train_batch_size"] == 4
    assert written["model"]["chunked_loss"] is None
