"""Logs of any content are explained, or it is said that they are of no known kind."""

from pathlib import Path

import pytest
import yaml

from tests.faults.commands import run
from tests.faults.mutations import BYTES, damaged
from tests.faults.profile import drawn

TEXTS = [case["text"].encode() for case in yaml.safe_load(Path("tests/memory/explain/messages.yaml").read_text())]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "train.log"


@drawn(1300, 40_000)
def test_a_damaged_log_is_explained_or_refused(log, dice):
    text = dice.choice(TEXTS)
    if dice.random() < 0.3:
        text += dice.choice([b"\n", b"", b"\r\n", dice.choice(BYTES)]) + dice.choice(TEXTS)
    log.write_bytes(damaged(text, dice))
    run("explain", str(log), *dice.choice([(), ("--json",)]))
