"""Files of runs and models with any bytes changed: refused and named, or harmless; never believed, never a fault."""

import random
import shutil

import pytest

from framework.errors import RequestError
from tests.faults.commands import in_time
from tests.faults.mutations import damaged
from tests.faults.profile import throws
from tests.faults.tiny_runs import request
from tests.folders import save_model, split_weights
from tests.run.test_damaged_folders import problems_of
from tests.run.test_trainer import final_weights, same, train


def spoil(folder, dice):
    """Change bytes of some file below a folder. Returns which."""
    file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    before = file.read_bytes()
    after = damaged(before, dice)
    if file.suffix == ".safetensors" and dice.random() < 0.6:  # one bit, anywhere
        after = bytearray(before)
        after[dice.randrange(len(after))] ^= 1 << dice.randrange(8)
    file.write_bytes(after)
    return file


@pytest.mark.parametrize("number", throws(2, 600, "damaged runs"))
def test_a_run_with_a_damaged_file_resumes_as_it_was_or_not_at_all(whole, tmp_path, number):
    """Damage that a resume survives, such as a space more in its config, leaves the weights bit for bit."""
    dice = random.Random(number)
    run = shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(run / "final")
    spoiled = spoil(run / "checkpoints" if dice.random() < 0.7 else run, dice)
    with in_time():
        try:
            train(request(whole.corpus, run), resume=True)
        except RequestError as error:
            refused = str(error)
            assert str(spoiled.parent) in refused or spoiled.name in refused, refused
            return
    assert same(final_weights(run), whole.weights)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder with its weights in one file, and one with several."""
    folder = tmp_path_factory.mktemp("saved")
    split_weights(save_model(folder / "several"))
    return save_model(folder / "one"), folder / "several"


@pytest.mark.parametrize("number", throws(1, 600, "damaged models"))
def test_a_model_with_a_damaged_file_is_read_or_refused(saved, tmp_path, number):
    dice = random.Random(number)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "completion": "world"}\n' * 4)
    base = shutil.copytree(dice.choice(saved), tmp_path / "base")
    spoil(base, dice)
    with in_time():
        assert all(problems_of(base))
