"""`tunesmith levers`: the table, one row, and the message for a key without a row."""

import json

import pytest

from framework.cli import main
from framework.memory.levers import LEVERS


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        code = main(["levers", *arguments])
        return code, *capsys.readouterr()

    return run_command


def test_the_table_has_a_line_for_each_lever(run):
    code, out, _ = run()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["key", *(row.key for row in LEVERS)]


def test_one_row_says_everything(run):
    _, out, _ = run("training.optimizer")
    for overrides in (
        "training.optimizer=adafactor",
        "another optimizer",
        "-19.6 %",
        "temporaries",
        "read back",
    ):
        assert overrides in out


def test_json_is_one_document_of_rows(run):
    document = json.loads(run("--json")[1])
    assert document["schema_version"] == 1
    assert [row["key"] for row in document["levers"]] == [row.key for row in LEVERS]
    [row] = json.loads(run("model.chunked_loss", "--json")[1])["levers"]
    assert [setting["value"] for setting in row["settings"]][:2] == [False, 1024]
    assert row["exact"] is True


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.optimiser", "training.optimizer"),
        ("optimizer", "training.optimizer"),
        ("peft.rank", "peft.lora_r"),
        ("checkpointing", "training.enable_gradient_checkpointing"),
    ],
)
def test_a_misspelt_key_gets_the_nearest(run, key, nearest):
    code, out, err = run(key)
    assert (code, out) == (2, "")
    assert nearest in err


def test_a_key_that_is_no_lever_is_refused(run):
    code, _, err = run("training.seed")
    assert code == 2
    assert "training.seed is not a memory lever" in err
