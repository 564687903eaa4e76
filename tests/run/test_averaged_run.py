"""A run with `training.ema_decay` and `training.neftune_noise_alpha`: its export, evaluations and resume."""

import json

import pytest
from safetensors.torch import load_file

from framework.errors import RequestError
from framework.run.checkpoints.checkpoint import checkpoints
from tests.run.test_best import config, run

ASKED = {"ema_decay": 0.5, "neftune_noise_alpha": 5, "max_steps": 4, "save_steps": 2}
SUFFIX = "::weights_average"


def averages(checkpoint):
    stored = load_file(checkpoint / "optimizer.safetensors")
    return {name.removesuffix(SUFFIX): tensor for name, tensor in stored.items() if name.endswith(SUFFIX)}


def exported(folder):
    return load_file(folder / "final" / "model.safetensors")


@pytest.mark.parametrize("export", [True, False])
def test_the_export_is_the_average_of_the_last_checkpoint_or_its_weights(export, tmp_path):
    folder = run(config(tmp_path, export_ema=export, **ASKED)).folder
    last = checkpoints(folder)[-1]
    found, weights, average = exported(folder), load_file(last / "model.safetensors"), averages(last)
    assert average.keys() == weights.keys() != set()
    for name, tensor in found.items():
        assert tensor.equal((average if export else weights)[name]), name
        assert not tensor.equal((weights if export else average)[name]), name


def test_a_resumed_run_exports_the_same_average_and_another_decay_is_refused(tmp_path):
    (tmp_path / "straight").mkdir()
    straight = run(config(tmp_path / "straight", **ASKED)).folder
    asked = config(tmp_path, **ASKED)
    folder = run(asked).folder
    for path in (*folder.glob("final/*"), *checkpoints(folder)[-1].glob("*")):
        path.unlink()
    checkpoints(folder)[-1].rmdir()
    (folder / "final").rmdir()
    again = run(asked, resume=True).folder
    assert again == folder
    for name, tensor in exported(folder).items():
        assert tensor.equal(exported(straight)[name]), name
    last = [(each / "metrics.jsonl").read_text().splitlines()[-1] for each in (folder, straight)]
    assert json.loads(last[0])["eval_loss"] == json.loads(last[1])["eval_loss"]
    with pytest.raises(RequestError, match="ema_decay"):
        run(config(tmp_path, **{**ASKED, "ema_decay": 0.9}), resume=True)
