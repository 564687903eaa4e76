"""A model's folder: its `config.json` takes precedence, and missing, damaged and unused weights are named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.build.loading.bases import check_all_weights
from framework.build.loading.model import build_model, check_weights, read_architecture
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.errors import RequestError
from framework.schema.config import TrainingConfig
from tests.folders import change_config, save_model, split_weights

CPU = real_place(torch.device("cpu"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("saved") / "base")


@pytest.fixture
def base(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "base")


def about(folder, training=None, **model):
    training = {"per_device_train_batch_size": 1, **(training or {})}
    data = {"labels": ["a", "b"]} if training.get("task") == "classification" else {}
    return TrainingConfig(model={"model_name": str(folder), **model}, training=training, data=data)


def looked_at(folder, **sections):
    return check_weights(*settle(about(folder, **sections)))


def refused(folder, **sections):
    with pytest.raises(RequestError) as error:
        looked_at(folder, **sections)
    return error.value.problems


def test_a_whole_folder_has_nothing_left_over_and_no_values_are_read(base):
    assert looked_at(base) == ()


@pytest.mark.parametrize("loads", [looked_at, lambda folder: build_model(*settle(about(folder)), CPU)])
def test_fewer_layers_than_the_checkpoint_has_are_refused_by_name(base, loads):
    change_config(base, num_hidden_layers=1)
    with pytest.raises(RequestError) as error:
        loads(base)
    [problem] = error.value.problems
    assert problem.key == "model.model_name"
    assert "9 weights" in problem.message
    assert "model.layers.1.input_layernorm.weight" in problem.message


def test_nothing_of_a_librarys_own_report_is_printed(base, capfd):
    change_config(base, num_hidden_layers=1)
    refused(base)
    found = capfd.readouterr()
    assert "LOAD REPORT" not in found.err + found.out
    assert "not sharded" not in found.err + found.out


def test_more_layers_and_other_shapes_are_refused_by_name(base):
    change_config(base, num_hidden_layers=3)
    assert "model.layers.2." in refused(base)[0].message
    change_config(base, num_hidden_layers=2, intermediate_size=128)
    [problem] = refused(base)
    assert "6 weights" in problem.message
    assert "[32, 64] there, [32, 128] here" in problem.message
    assert "ignore_mismatched_sizes" not in problem.message


def test_a_bias_that_the_config_does_not_build_is_left_over(base):
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, name: torch.ones(32)}, base / "model.safetensors", {"format": "pt"})
    assert name in refused(base)[0].message


def test_constants_heads_and_towers_may_be_left_over_and_are_reported(base):
    tensors = load_file(base / "model.safetensors")
    more = ("model.layers.0.self_attn.masked_bias", "score.weight", "vision_tower.patch.weight")
    save_file({**tensors, **{name: torch.ones(4) for name in more}}, base / "model.safetensors", {"format": "pt"})
    assert looked_at(base) == more


def test_another_tasks_head_may_be_left_over_but_not_one_of_another_shape(base):
    assert looked_at(base, training={"task": "classification"}) == ("lm_head.weight",)
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "score.weight": torch.ones(4)}, base / "model.safetensors", {"format": "pt"})
    assert "another shape" in refused(base, training={"task": "classification"})[0].message


def test_a_tied_head_that_is_stored_as_well_is_none(base):
    change_config(base, tie_word_embeddings=True)
    assert "its files store both" in refused(base)[0].message
    tensors = load_file(base / "model.safetensors")
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tied, base / "model.safetensors", {"format": "pt"})
    assert looked_at(base) == ()


def test_a_folder_without_weights_or_with_pickled_ones(base):
    (base / "model.safetensors").unlink()
    [problem] = refused(base)
    assert "has no weights" in problem.message
    assert problem.expected == "model.safetensors"
    (base / "pytorch_model.bin").write_bytes(b"\x80")
    [problem] = refused(base)
    assert "pickle" in problem.message


def test_every_missing_or_cut_shard_is_named(base):
    first, second = split_weights(base)
    assert looked_at(base) == ()
    whole = (base / first).read_bytes()
    (base / first).write_bytes(whole[:-10])
    (base / second).unlink()
    cut, gone = refused(base)
    assert first in cut.message
    assert second in gone.message
    index = base / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first, f"model-{'9' * 300}"))
    assert any("File name too long" in problem.message for problem in refused(base))
    (base / "model.safetensors.index.json").write_text("null")
    assert "model.safetensors.index.json" in refused(base)[0].message


def test_a_folder_that_is_not_there_or_holds_an_adapter(tmp_path):
    (tmp_path / "model").mkdir()
    [problem] = refused(tmp_path / "modle")
    assert "there is no folder" in problem.message
    assert problem.nearest == str(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    [problem] = refused(tmp_path / "model")
    assert "an adapter of some/base" in problem.message
    assert "tunesmith merge" in problem.expected


@pytest.mark.parametrize("dtype", ["int8", "nothing"])
def test_a_dtype_that_is_none_to_compute_in(base, dtype):
    change_config(base, dtype=dtype)
    assert "model.model_name" in {problem.key for problem in refused(base)}


def test_the_folders_config_stays_and_written_keys_are_laid_over(base):
    own = read_architecture(about(base))
    assert own.use_cache is True
    changed = read_architecture(about(base, architecture={"rope_theta": 5e5, "rms_norm_eps": 1e-3}))
    assert changed.rope_parameters["rope_theta"] == 5e5
    assert changed.rms_norm_eps == 1e-3
    assert (changed.vocab_size, changed.num_hidden_layers) == (own.vocab_size, own.num_hidden_layers)
    with pytest.raises(RequestError, match="not a key of LlamaConfig"):
        read_architecture(about(base, architecture={"rms_norm_epz": 1e-3}))


def test_a_head_of_its_own_under_a_config_that_ties_it_is_refused(base, capfd):
    weights = load_file(base / "model.safetensors")
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert looked_at(base) == ()
    change_config(base, tie_word_embeddings=True)
    [problem] = refused(base)
    assert (problem.key, problem.expected) == ("model.model_name", "model.architecture.tie_word_embeddings=false")
    assert "ties lm_head.weight to model.embed_tokens.weight" in problem.message
    assert looked_at(base, architecture={"tie_word_embeddings": False}) == ()
    assert "Loading weights" not in capfd.readouterr().err
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    assert looked_at(base) == ()


def test_a_teachers_folder_is_looked_at_too(base, tmp_path):
    teacher = shutil.copytree(base, tmp_path / "teacher")
    config = about(base, training={"task": "distillation", "teacher": {"model_name": str(teacher)}})
    assert [*check_all_weights(*settle(config))] == []
    change_config(teacher, num_hidden_layers=1)
    with pytest.raises(RequestError) as error:
        list(check_all_weights(*settle(config)))
    assert error.value.problems[0].key == "training.teacher.model_name"
