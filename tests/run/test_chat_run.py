"""Training on chats, from rows to the final folder: supervised tokens, and the same rendering afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from framework.build.data.batches import GlobalBatches, MicroBatch
from framework.build.model.parts import causal_model
from framework.build.text.chat import Chat
from framework.build.text.labels import IGNORED, Encoded, encode_chats
from framework.build.text.named_templates import read_template
from framework.errors import RequestError, SaveFailed
from framework.run import trainer
from framework.run.checkpoints.export import write_tokenizer
from framework.run.checkpoints.saved_model import find_saved_model
from framework.run.checkpoints.trained_model import load_model
from framework.run.inputs import TrainingBatches, read_inputs, training_batches
from framework.schema.config import TrainingConfig
from tests.grids import first, thinned
from tests.tiny import LLAMA

CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {number} and two?"},
        {"role": "assistant", "content": f"It is {number + 2}."},
    ]
    for number in range(8)
]


def config(tmp_path: Path, rows: list[dict[str, Any]], template: str | None = None, **sections: Any) -> TrainingConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "output_dir": str(tmp_path / "run")}
    return TrainingConfig.model_validate(
        {
            "training": {**training, **sections.pop("training", {})},
            "model": {
                "architecture": {**LLAMA, "vocab_size": 400, "max_position_embeddings": 256},
                "load_pretrained_weights": False,
                "model_max_length": sections.pop("limit", 96),
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "chat_template": template,
            },
            "data": {"train": [{"path": str(path)}], **sections},
        }
    )


@pytest.mark.parametrize("written", ["chatml", "own.jinja", "{{ messages | tojson }}{{ eos_token }}"])
def test_the_final_folder_renders_the_training_rows_identically(written: str, tmp_path: Path) -> None:
    """A template by name, from a file, or as its text."""
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    template = str(tmp_path / written) if written.endswith(".jinja") else written
    some = config(tmp_path, [{"messages": chat} for chat in CHATS], template, supervise="all", limit=256)
    rows = read_inputs(some).data.train
    result = trainer.train(some, planner=None, quiet=True)
    again = AutoTokenizer.from_pretrained(result.folder / "final")
    assert again.chat_template == read_template(template)
    assert [again.apply_chat_template(chat, return_dict=False) for chat in CHATS] == [row["input_ids"] for row in rows]


def test_what_is_sampled_is_an_answer_to_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 48)  # as users have it; the tests' one token finds room anywhere
    result = trainer.train(config(tmp_path, [{"messages": CHATS[0]}] * 2, "plain"), planner=None, quiet=True)
    assert result.sample is not None
    assert result.sample[0] == "<|endoftext|>System: Be brief.\nUser: What is 0 and two?\nAssistant:"
    long = {"messages": [{"role": "user", "content": "two " * 70}, CHATS[0][2]]}
    result = trainer.train(config(tmp_path, [long] * 2, "plain"), planner=None, quiet=True, overwrite=True)
    assert result.sample is not None
    assert result.sample[0].endswith("two two\nAssistant:"), "no question is cut off"
    short = {"messages": CHATS[0]}
    result = trainer.train(config(tmp_path, [long, short], "plain"), planner=None, quiet=True, overwrite=True)
    assert result.sample is not None
    assert "Be brief" in result.sample[0], "the one with room for an answer"


def test_without_a_template_the_named_ones_are_listed(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        read_inputs(config(tmp_path, [{"messages": chat} for chat in CHATS]))
    (problem,) = caught.value.problems
    assert problem.key == "model.chat_template"
    assert "alpaca, chatml, gemma, llama3, mistral, phi3, plain, vicuna, zephyr" in str(problem.expected)


def test_a_tokenizer_that_does_not_read_back_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read_inputs(config(tmp_path, [{"messages": chat} for chat in CHATS], "plain")).tokenizer
    save = PreTrainedTokenizerBase.save_pretrained

    def without_template(self: PreTrainedTokenizerBase, folder: Path, **options: Any) -> None:
        save(self, folder, **options)
        (folder / "chat_template.jinja").unlink()

    write_tokenizer(tokenizer, tmp_path / "whole")
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", without_template)
    with pytest.raises(SaveFailed, match="chat template"):
        write_tokenizer(tokenizer, tmp_path / "broken")


def test_a_left_padding_tokenizer_makes_the_same_batches(tmp_path: Path) -> None:
    """Padding is on the right and never supervised; the end of each answer is, though it is the padding token too."""
    rows = [{"messages": [{"role": "user", "content": "two " * number}, CHATS[number][2]]} for number in range(1, 8)]
    some = config(tmp_path, rows, "plain")
    inputs = read_inputs(some)
    made = _epoch(training_batches(some, inputs, None))
    inputs.tokenizer.padding_side = "left"
    inputs.tokenizer.pad_token = inputs.tokenizer.eos_token
    again = _epoch(training_batches(some, inputs, None))
    assert any("attention_mask" in batch for batch in made)
    for one, other in zip(made, again, strict=True):
        assert torch.equal(one["labels"], other["labels"])
        mask = other.get("attention_mask", torch.ones_like(other["input_ids"]))
        assert torch.equal(one["input_ids"] * mask, other["input_ids"] * mask)
        assert (mask.diff(dim=1) <= 0).all()
        assert (other["labels"][mask == 0] == IGNORED).all()
        taken = other["labels"] != IGNORED
        assert torch.equal(other["labels"][taken], other["input_ids"][taken])
        ends = [row[row != IGNORED][-1].item() for row in other["labels"]]
        assert ends == [inputs.tokenizer.eos_token_id] * len(ends)


def _epoch(batches: TrainingBatches) -> list[MicroBatch]:
    assert isinstance(batches, GlobalBatches)
    started = batches.start(0)
    return [micro_batch for _ in range(batches.steps_per_epoch) for micro_batch in next(started)]


@pytest.mark.parametrize(
    ("options", "steps"),
    thinned(
        [{}, {"packing": True}, {"padding_free": True}, {"group_by_length": True}],
        [{"gradient_accumulation_steps": 4}, {"per_device_train_batch_size": 1}],
    ),
)
def test_no_micro_batch_has_nothing_to_learn(options: dict[str, Any], steps: dict[str, int], tmp_path: Path) -> None:
    """Rows whose answer is cut off are never in a batch, nor in one of an accumulated step."""
    long = {"role": "user", "content": "What is two and two? " * 40}
    rows = [{"messages": [*([long] if number % 3 == 0 else []), *chat]} for number, chat in enumerate(CHATS * 3)]
    some = config(tmp_path, rows, "plain", training=steps, **options)
    inputs = read_inputs(some)
    assert inputs.data.report.train.dropped == {"no supervised token within 96 tokens": 8}
    for micro_batch in _epoch(training_batches(some, inputs, None)):
        assert (micro_batch["labels"] != IGNORED).any()


def test_streamed_chats_are_those_that_are_held(tmp_path: Path) -> None:
    some = config(tmp_path, [{"messages": chat} for chat in CHATS], "plain")
    streamed = config(tmp_path, [{"messages": chat} for chat in CHATS], "plain", streaming=True, shuffle_buffer=4)
    tokenizer = read_inputs(streamed).tokenizer
    wanted = encode_chats(tokenizer, [Chat(chat) for chat in CHATS])
    inputs = read_inputs(streamed)
    started = training_batches(streamed, inputs, None).start(0)
    seen = []
    for _ in range(4):
        for batch in next(started):
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            seen += [row[kept == 1].tolist() for row, kept in zip(batch["labels"], mask, strict=True)]
    assert sorted(seen) == sorted(row.labels.tolist() for row in wanted if isinstance(row, Encoded))
    assert len(read_inputs(some).data.train) == len(seen)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose end token is not the one that its template ends turns with."""
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = read_template("chatml")
    tokenizer.save_pretrained(tmp_path / "base")
    shape = {**LLAMA, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("mode", first(2, [None, "adapter_only", "adapter_and_base_model", "merged"]))
def test_generation_stops_at_the_token_that_answers_learn_to_end_with(mode: str | None, base: Path) -> None:
    """Not only at the base's end token, which no answer has."""
    some = config(base.parent, [{"messages": chat} for chat in CHATS]).model_dump()
    some["model"] |= {"architecture": None, "model_name": str(base), "load_pretrained_weights": True, "tokenizer": None}
    if mode is not None:
        some["training"]["use_peft"] = True
        some["peft"] = {"peft_save_mode": mode}
    some = TrainingConfig.model_validate(some)
    folder = trainer.train(some, planner=None, quiet=True).folder
    ends = json.loads((folder / "final" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [1, 3]
    model = causal_model(load_model(find_saved_model(folder)))
    assert model.generation_config.eos_token_id == [1, 3]
    assert model.config.eos_token_id == 1
