"""Rows of any format and content are trained on, or refused with their place in the file."""

import json

import pytest
import yaml

from framework.build.data.prepare import prepare_data
from framework.build.text.named_templates import read_template
from framework.build.text.tokenizer import train_tokenizer
from framework.errors import RequestError
from framework.schema.config import TrainingConfig
from tests.faults.commands import changes, in_time, run
from tests.faults.mutations import changed, damaged, dumped
from tests.faults.profile import drawn
from tests.tiny import LLAMA

VOCABULARY = 400
ASKED, ANSWERED = {"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "Four."}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ROWS = {
    "sft": [
        {"text": "The fox"},
        {"messages": [ASKED, ANSWERED, {**ASKED, "weight": 0}, {**ANSWERED, "weight": 1}]},
        {"messages": [ASKED, CALLED, {"role": "tool", "content": "4"}, ANSWERED], "tools": [TOOL]},
        {"system": "Be short.", "messages": [ASKED, {**ANSWERED, "reasoning_content": "Hm."}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "two and two?", "completion": " It is four."},
        {"instruction": "a", "input": "b", "output": "c", "history": [["q", "a"]]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ],
    "preference": [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "Five."}]},
        {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"},
         "rejected": {"from": "gpt", "value": "c"}},
    ],
    "classification": [{"text": "The fox", "label": 1}, {"text": "The fox", "label": "a"}],
    "regression": [{"text": "The fox", "label": 0.5}],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["The quick brown fox jumps over the lazy dog.\n"], vocab_size=320)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = read_template("chatml")
    return made


def spoiled(rows, dice):
    """A file of a few rows, some with another value in some place, some with other bytes."""
    lines = [json.dumps(row).encode() for row in rows]
    for _ in range(dice.randrange(1, 3)):
        at = dice.randrange(len(lines))
        lines[at] = dumped(changed(rows[at], dice)) if dice.random() < 0.8 else damaged(lines[at], dice)
    return b"\n".join(lines)


def request(file, task, dice):
    data = {"train": [{"path": str(file)}], "cache": False}
    if task == "sft" and dice.random() < 0.3:
        data[dice.choice(["packing", "streaming"])] = True
    return {
        "training": {"task": task, "per_device_train_batch_size": 1, "max_steps": 2},
        "model": {
            "architecture": {**LLAMA, "vocab_size": VOCABULARY},
            "load_pretrained_weights": False,
            "model_max_length": 64,
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "chat_template": "chatml",
        },
        "data": data,
        "gpu": {"name": "cpu"},
    }


def drawn_file(folder, dice):
    task = dice.choice([*ROWS, "sft"])
    row = dice.choice(ROWS[task])
    file = folder / "rows.jsonl"
    file.write_bytes(spoiled([row, row, dice.choice([row, *ROWS[task]]), row], dice))
    return file, task


@drawn(100, 9500)
def test_rows_are_taken_or_refused(folder, tokenizer, dice):
    file, task = drawn_file(folder, dice)
    config = TrainingConfig.model_validate(request(file, task, dice))
    problems, data = (), None
    with in_time(), changes() as touched:
        try:
            data = prepare_data(config, tokenizer, VOCABULARY)
        except RequestError as error:
            problems = error.problems
    assert not touched
    assert (data is None) == any(problem.message for problem in problems)
    rows = [data.train[at] for at in range(len(data.train))] if data is not None else []
    assert all(len(row["input_ids"]) == len(row["labels"]) for row in rows if "labels" in row)


@drawn(5, 500)
def test_rows_through_the_command(folder, dice):
    file, task = drawn_file(folder, dice)
    (folder / "r.yaml").write_text(yaml.safe_dump(request(file, task, dice)))
    run("data", str(folder / "r.yaml"), *dice.choice([(), ("--json",)]))
