"""Damaged files of a model's folder are a mistake of the request: they are named, and never an internal fault."""

import contextlib
import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from framework.build.loading.model import build_model
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.errors import RequestError
from framework.run.checkpoints.merge import merge_run
from framework.run.inputs import read_inputs
from framework.run.planning.model_checks import inspect
from framework.run.predict import Request, predict
from framework.schema.config import TrainingConfig
from tests.folders import change_config, save_model, split_weights
from tests.grids import first, thinned

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
MORE = ("special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja")
INDEX = "model.safetensors.index.json"


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_folder(file):
    file.unlink(missing_ok=True)
    file.mkdir()


def written(text):
    return lambda file: file.write_bytes(text)


DAMAGES = {
    "cut": cut,
    "empty": written(b""),
    "null": written(b"null"),
    "list": written(b"[]"),
    "number": written(b"3"),
    "latin": written(b'{"a": "\xff"}'),
    "deep": written(b'{"a":' * 3000),
    "folder": as_folder,
}
VALUES = {
    "dtype": ["int8", "nothing", 3, []],
    "model_type": ["nothing", None, 3, []],
    "hidden_size": ["32", None, 0, -1, 33, []],
    "num_attention_heads": [0, None, "4", 3],
    "num_hidden_layers": [None, "2", -1, 1, 3],
    "vocab_size": [0, None, "300", 301],
    "hidden_act": ["nothing", None, 3],
    "rope_parameters": [None, [], {"rope_type": "nothing"}, {"rope_theta": "x"}, 3],
    "max_position_embeddings": [0, None, "128"],
    "architectures": [None, 3, ["Nothing"], {}],
    "quantization_config": [3, {}, {"quant_method": "nothing"}, []],
    "eos_token_id": ["x", [[]], -5, {}],
    "auto_map": [3, {"AutoConfig": "x"}],
    "id2label": [3, [], {"x": 1}],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("saved") / "base")


@pytest.fixture
def base(saved, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "completion": "world"}\n' * 4)
    return shutil.copytree(saved, tmp_path / "base")


def config_of(base):
    return TrainingConfig(
        training={"per_device_train_batch_size": 2, "max_steps": 1},
        model={"model_name": str(base), "model_max_length": 16},
        data={"train": [{"path": str(base.parent / "rows.jsonl")}]},
        gpu={"name": "cpu"},
    )


def problems_of(base):
    """Messages of check, of train's reading and loading, and of predict. Any exception but RequestError is a fault."""
    found = [str(problem) for problem in inspect(config_of(base)).problems]
    place = real_place(torch.device("cpu"))
    for action in (
        lambda: read_inputs(config_of(base)),
        lambda: build_model(*settle(config_of(base)), place),
        lambda: list(predict(base, str(base.parent / "rows.jsonl"), Request(score=True))),
    ):
        try:
            action()
        except RequestError as error:
            found += map(str, error.problems)
    return found


@pytest.mark.parametrize(("damage", "name"), thinned(list(DAMAGES), FILES))
def test_a_damaged_file_is_named(base, name, damage):
    DAMAGES[damage](base / name)
    found = problems_of(base)
    assert any(name in message or (name.startswith("tokenizer") and "tokenizer" in message) for message in found), found


@pytest.mark.parametrize(("damage", "name"), thinned(list(DAMAGES), MORE))
def test_a_damaged_file_that_a_folder_may_have(base, name, damage):
    (base / name).write_text("{}")
    DAMAGES[damage](base / name)
    problems_of(base)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_named(base, damage):
    split_weights(base)
    DAMAGES[damage](base / INDEX)
    assert any(INDEX in message for message in problems_of(base))


@pytest.mark.parametrize(
    ("key", "value"),
    [case for key, values in VALUES.items() for case in first(2, [(key, value) for value in values])],
)
def test_a_value_that_the_config_cannot_have_is_no_fault_of_ours(base, key, value):
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, key: value}))
    problems_of(base)


FAILS_LATE = [
    *(("config.json", "architectures", value) for value in ("x", 3, [3])),
    *(("generation_config.json", "eos_token_id", value) for value in ("x", [[1]])),
    *(("generation_config.json", name, value) for name, value in (("top_k", "x"), ("num_beams", 0), ("top_p", "1"))),
]


@pytest.mark.parametrize(("name", "key", "value"), FAILS_LATE)
def test_a_setting_that_would_fail_where_it_is_first_used_is_named(base, name, key, value):
    settings = json.loads((base / name).read_text())
    (base / name).write_text(json.dumps({**settings, key: value}))
    [problem] = inspect(config_of(base)).problems
    assert f"{name} has {key} {value!r}" in problem.message


def test_what_transformers_says_of_a_config_is_a_warning_of_ours_once(base, capfd):
    change_config(base, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "foo": 3})
    settings = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.5}))
    warnings = [warning for warning in inspect(config_of(base)).warnings if "transformers says" in warning.message]
    assert [warning.key for warning in warnings] == ["model.model_name"]
    assert "Unrecognized keys in `rope_parameters`" in warnings[0].message
    assert "[transformers]" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "base"
    return save_model(folder, of_rows=True)


@pytest.mark.parametrize("value", [3, [], {"x": 1}, {"0": 1}, {"0": "a"}, None])
def test_damaged_names_of_classes(classifier, tmp_path, value):
    base = shutil.copytree(classifier, tmp_path / "base")
    change_config(base, id2label=value)
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n')
    with contextlib.suppress(RequestError):
        assert list(predict(base, str(tmp_path / "rows.jsonl")))


@pytest.fixture(scope="module")
def adapted(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted") / "adapter"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(saved), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(folder)
    shutil.copy(saved / "tokenizer.json", folder)
    shutil.copy(saved / "tokenizer_config.json", folder)
    return folder


ADAPTER = [
    *(("peft_type", value) for value in ("nothing", None, 3, [])),
    *(("r", value) for value in (0, "8", None, -1)),
    *(("target_modules", value) for value in (None, 3, ["nothing"], {})),
    *(("base_model_name_or_path", value) for value in (None, 3, "./nowhere", "")),
    *(("task_type", value) for value in ("nothing", 3)),
]


@pytest.mark.parametrize(("key", "value"), ADAPTER)
def test_a_value_that_an_adapter_cannot_have(adapted, tmp_path, key, value):
    folder = shutil.copytree(adapted, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, key: value}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "completion": "world"}\n')
    for action in (
        lambda: list(predict(folder, str(tmp_path / "rows.jsonl"), Request(score=True))),
        lambda: merge_run(folder, tmp_path / "merged"),
    ):
        with contextlib.suppress(RequestError):
            action()


@pytest.mark.parametrize(
    ("damage", "name"), thinned(list(DAMAGES), ["adapter_config.json", "adapter_model.safetensors"])
)
def test_a_damaged_file_of_an_adapter_is_named(adapted, tmp_path, name, damage):
    folder = shutil.copytree(adapted, tmp_path / "adapter")
    DAMAGES[damage](folder / name)
    with pytest.raises(RequestError) as error:
        merge_run(folder, tmp_path / "merged")
    assert str(folder) in error.value.problems[0].message
