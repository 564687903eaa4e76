"""An export differs from its base in what was trained, and in nothing else."""

import json
import shutil

import pytest

from tests.folders import change_config, save_model
from tests.run.test_bases import ROWS, settings, train

SAVED_MERGED = {"use_peft": True}, {"peft_save_mode": "merged"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_model(folder / "base")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def read(file):
    return json.loads(file.read_text())


@pytest.mark.parametrize(("training", "peft"), [({"use_peft": False}, {}), SAVED_MERGED], ids=["full", "merged"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_every_file_but_the_weights_is_the_bases(source, tmp_path, training, peft, use_cache):
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    base, final = tmp_path / "base", tmp_path / "run" / "final"
    change_config(base, use_cache=use_cache)
    train(settings(tmp_path, training=training, peft=peft))
    assert {file.name for file in final.iterdir()} == {"README.md", *(file.name for file in base.iterdir())}
    for file in base.glob("*.json"):
        before, after = read(file), read(final / file.name)
        if file.name == "generation_config.json":  # completions end where the rows end
            assert after.pop("eos_token_id") == [before.pop("eos_token_id"), 0]
        assert after == before, file.name


def test_a_model_made_from_an_architecture_says_how_it_generates(source, tmp_path):
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    shape = {key: value for key, value in read(tmp_path / "base" / "config.json").items() if key != "dtype"}
    model = {"architecture": shape, "load_pretrained_weights": False, "tokenizer_name": str(tmp_path / "base")}
    train(settings(tmp_path, training={"use_peft": False}, model={**model, "model_name": None}))
    assert (tmp_path / "run" / "final" / "generation_config.json").exists()
    assert read(tmp_path / "run" / "final" / "config.json")["use_cache"] is True
