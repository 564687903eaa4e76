"""The frozen base of an adapter, and a teacher, are what they were: at a resume, a merge and a prediction."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from framework.build.loading import bases
from framework.cli import main
from framework.errors import RequestError
from framework.run import trainer
from framework.run.checkpoints.merge import merge_run
from framework.run.predict import Request, predict
from framework.run.state import seed_all
from framework.schema.config import TrainingConfig
from tests.folders import change_config, change_weights, save_model, split_weights
from tests.tiny import LLAMA

ROWS = [{"prompt": f"hello {number}", "completion": "world"} for number in range(8)]


def settings(folder, **changes):
    training = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1, "output_dir": str(folder / "run")}
    peft = {"lora_target_modules": ["q_proj", "v_proj"]}
    return TrainingConfig(
        training={**training, "use_peft": True, **changes.pop("training", {})},
        model={"model_name": str(folder / "base"), "model_max_length": 16, **changes.pop("model", {})},
        peft={**peft, **changes.pop("peft", {})},
        data={"train": [{"path": str(folder / "rows.jsonl")}]},
        gpu={"name": "cpu"},
    )


def train(config, **options):
    return trainer.train(config, planner=None, quiet=True, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    save_model(folder / "base")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    train(settings(folder))
    return folder


def resized(base):
    shutil.rmtree(base)
    save_model(base, vocab_size=312)


CHANGES = {
    "weights": (lambda base: change_weights(base, "q_proj", 0.5), "its weights have other values"),
    "vocabulary": (resized, "its vocab_size was 300 and is 312"),
    "config": (lambda base: change_config(base, rms_norm_eps=1e-3), "its rms_norm_eps was 1e-06 and is 0.001"),
}


@pytest.fixture(params=CHANGES)
def changed(request, trained):
    """The trained run with a base that has changed since; restored afterwards."""
    change, message = CHANGES[request.param]
    kept = shutil.copytree(trained / "base", trained / "kept")
    change(trained / "base")
    yield message
    shutil.rmtree(trained / "base")
    kept.rename(trained / "base")


def test_a_changed_base_is_refused_by_resume_merge_and_predict(changed, trained, tmp_path, capsys):
    rows = str(trained / "rows.jsonl")
    for action in (
        lambda: train(settings(trained, training={"max_steps": 3}), resume=True, allow=["training.max_steps"]),
        lambda: merge_run(trained / "run", tmp_path / "merged"),
        lambda: list(predict(trained / "run", rows)),
        lambda: list(predict(trained / "run" / "final", rows, Request(score=True))),
    ):
        with pytest.raises(RequestError) as error:
            action()
        [problem] = error.value.problems
        assert problem.key == "model.base"
        assert changed in problem.message
        assert "--allow model.base" in problem.expected
    assert not (tmp_path / "merged").exists()
    assert main(["predict", str(trained / "run"), rows]) == 2
    assert "--allow model.base" in capsys.readouterr().err


def test_who_insists_gets_what_is_asked(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "own")
    own = tmp_path / "own"
    kept = shutil.copytree(trained / "base", tmp_path / "kept")
    change_weights(trained / "base", "q_proj", 0.5)
    try:
        merged = merge_run(own / "run", tmp_path / "merged", allow=["model.base"])
        again = settings(trained, training={"output_dir": str(own / "run")})
        train(again, resume=True, allow=["model.base"])
    finally:
        shutil.rmtree(trained / "base")
        kept.rename(trained / "base")
    name = "model.layers.0.mlp.up_proj.weight"
    assert load_file(merged.folder / "model.safetensors")[name].equal(
        load_file(trained / "base/model.safetensors")[name]
    )
    with pytest.raises(RequestError, match=r"model\.bse may not differ"):
        merge_run(trained / "run", tmp_path / "other", allow=["model.bse"])


def test_a_base_that_was_moved_or_split_into_files_is_the_same(trained, tmp_path):
    moved = shutil.copytree(trained / "base", tmp_path / "moved")
    split_weights(moved)
    run = shutil.copytree(trained / "run", tmp_path / "run")
    config = settings(trained, training={"output_dir": str(run)}, model={"model_name": str(moved)})
    assert train(config, resume=True).steps == 2
    record = json.loads((run / "final" / "base_model.json").read_text())
    assert record["weights"] == json.loads((trained / "run/final/base_model.json").read_text())["weights"]


def test_a_full_run_has_its_weights_in_the_checkpoint(trained, tmp_path):
    base = shutil.copytree(trained / "base", tmp_path / "base")
    shutil.copy(trained / "rows.jsonl", tmp_path)
    config = settings(tmp_path, training={"use_peft": False})
    train(config)
    assert not (tmp_path / "run" / "final" / "base_model.json").exists()
    change_weights(base, "q_proj", 0.5)
    assert train(config, resume=True).steps == 2


def test_a_base_next_to_its_adapter_is_recorded_as_it_is_written(trained, tmp_path):
    run = tmp_path / "run"
    train(settings(trained, training={"output_dir": str(run)}, peft={"peft_save_mode": "adapter_and_base_model"}))
    assert list(predict(run, str(trained / "rows.jsonl"), Request(score=True)))
    change_weights(run / "final" / "base_model", "q_proj", 0.5)
    with pytest.raises(RequestError, match="its weights have other values"):
        list(predict(run, str(trained / "rows.jsonl"), Request(score=True)))


def test_a_changed_teacher_is_refused(trained, tmp_path):
    teacher = shutil.copytree(trained / "base", tmp_path / "teacher")
    training = {"task": "distillation", "use_peft": False, "output_dir": str(tmp_path / "run")}
    config = settings(trained, training={**training, "teacher": {"model_name": str(teacher)}})
    train(config)
    change_weights(teacher, "q_proj", 0.5)
    with pytest.raises(RequestError) as error:
        train(config, resume=True)
    assert error.value.problems[0].key == "training.teacher"
    assert train(config, resume=True, allow=["training.teacher"]).steps == 2


@pytest.mark.parametrize("whole", [True, False])
def test_the_digest_finds_a_change_of_any_tensor_whatever_is_read_of_it(trained, tmp_path, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(bases, "WHOLE_BYTES", 0)
        monkeypatch.setattr(bases, "BLOCK_BYTES", 16)
        monkeypatch.setattr(bases, "BLOCKS", 4)
    base = shutil.copytree(trained / "base", tmp_path / "base")
    before = bases.weights_digest([base / "model.safetensors"])
    found = {before}
    for name in load_file(base / "model.safetensors"):
        change_weights(base, name, 1e-3)
        found.add(bases.weights_digest([base / "model.safetensors"]))
    assert len(found) == 22
    assert bases.weights_digest([trained / "base" / "model.safetensors"]) == before


def test_a_base_drawn_at_random_that_comes_out_otherwise_is_refused(tmp_path, monkeypatch):
    """As on another device, whose generator gives other numbers for the same seed."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = {"model_name": None, "architecture": {**LLAMA, "vocab_size": 300}, "load_pretrained_weights": False}
    model["tokenizer"] = {"train": "bpe", "vocab_size": 300}
    del model["architecture"]["vocab_size"]
    config = settings(tmp_path, model=model)
    train(config)
    rows, further = str(tmp_path / "rows.jsonl"), settings(tmp_path, model=model, training={"max_steps": 3})
    record = json.loads((tmp_path / "run" / "final" / "base_model.json").read_text())
    assert len(record["drawn"]) == 16
    answers = list(predict(tmp_path / "run", rows, Request(score=True)))

    def other(seed):
        seed_all(seed + 1)

    actions = (
        lambda **allow: train(further, resume=True, allow=["training.max_steps", *allow.values()]),
        lambda **allow: merge_run(tmp_path / "run", tmp_path / "merged", allow=[*allow.values()]),
        lambda **allow: list(predict(tmp_path / "run", rows, Request(score=True, allow=(*allow.values(),)))),
    )
    with monkeypatch.context() as patched:
        for module in ("framework.run.checkpoints.trained_model", "framework.run.setup.start"):
            patched.setattr(f"{module}.seed_all", other)
        for action in actions:
            with pytest.raises(RequestError, match=r"at random, (and differ|which gives)") as refused:
                action()
            assert refused.value.problems[0].key == "model.base"
        assert actions[-1](base="model.base") != answers
        actions[0](base="model.base")
