"""Logs of any content are explained, or reported as of no known kind."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml

from framework.errors import RequestError
from framework.memory.explain import explain_evidence
from framework.memory.explain.evidence import Evidence
from framework.memory.explain.text import explanation_lines
from tests.faults.commands import in_time, run
from tests.faults.mutations import BYTES, damaged
from tests.faults.profile import drawn

TEXTS = [case["text"].encode() for case in yaml.safe_load(Path("tests/memory/explain/messages.yaml").read_text())]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "train.log"


def spoiled(dice):
    """One wording or two, with other bytes in it."""
    text = dice.choice(TEXTS)
    if dice.random() < 0.3:
        text += dice.choice([b"\n", b"", b"\r\n", dice.choice(BYTES)]) + dice.choice(TEXTS)
    return damaged(text, dice)


@drawn(250, 38_000)
def test_a_damaged_log_is_explained_or_of_no_known_kind(dice):
    with in_time(), contextlib.suppress(RequestError):
        explained = explain_evidence(Evidence(spoiled(dice).decode(errors="replace")))
        assert explanation_lines(explained)
        assert json.dumps(explained.to_json(), allow_nan=False)


@drawn(20, 2000)
def test_a_damaged_log_through_the_command(log, dice):
    log.write_bytes(spoiled(dice))
    run("explain", str(log), *dice.choice([(), ("--json",)]))
