"""`tunesmith data`: the rows that training takes, in words; from files to the terminal, JSON and HTML."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from framework.build.text.labels import IGNORED
from framework.cli import main
from framework.errors import RequestError
from framework.reports.rows import BRACKETS, COLOUR, PLAIN, data_lines, data_page, marks_for, shortened
from framework.run.inputs import read_inputs, training_batches
from framework.run.preview import Piece, Preview, count_padding, preview
from framework.schema.config import TrainingConfig
from framework.terminal import visible
from tests.tiny import LLAMA

ASKED = {"role": "user", "content": "What is two and two? <b>\x1b[31m"}
FOUR = {"role": "assistant", "content": "It is four \U0001f98a."}
FIVE = {"role": "assistant", "content": "It is five."}
END = "<|endoftext|>"


def written(tmp_path: Path, rows: Sequence[Any], task: str = "sft", limit: int = 128, **data: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training: dict[str, Any] = {"task": task, "max_steps": 2, "per_device_train_batch_size": 2}
    if task == "preference" and "label" in rows[0]:
        training["preference"] = {"loss_type": "kto"}
    return {
        "training": training,
        "model": {
            "architecture": {**LLAMA, "vocab_size": 400, "max_position_embeddings": 512},
            "load_pretrained_weights": False,
            "model_max_length": limit,
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "chat_template": "plain",
        },
        "data": {"train": [{"path": str(path)}], **data},
    }


def seen(tmp_path: Path, rows: Sequence[Any], split: str = "train", count: int = 2, **options: Any) -> Preview:
    return preview(TrainingConfig.model_validate(written(tmp_path, rows, **options)), split, count)


def supervised(row: Any) -> list[str]:
    return ["".join(piece.text for piece in passage.pieces if piece.supervised) for passage in row.passages]


def test_pieces_are_the_tokens_of_training(tmp_path: Path) -> None:
    config = TrainingConfig.model_validate(written(tmp_path, [{"messages": [ASKED, FOUR]}] * 3))
    found, inputs = preview(config, "train", 3), read_inputs(config)
    assert len(found.rows) == 3
    for shown, row in zip(found.rows, inputs.data.train, strict=True):
        (passage,) = shown.passages
        assert "".join(piece.text for piece in passage.pieces) == inputs.tokenizer.decode(row["input_ids"])
        assert (passage.tokens, passage.supervised) == (
            len(row["input_ids"]), sum(label != IGNORED for label in row["labels"]),
        )  # fmt: skip
        assert supervised(shown) == [f" It is four \U0001f98a.{END}"]


def test_padding_is_that_of_the_batches_of_training(tmp_path: Path) -> None:
    rows = [{"text": "two and " * (1 + index % 5)} for index in range(9)]
    for options in ({}, {"group_by_length": True}, {"pad_to_multiple_of": 16}):
        config = TrainingConfig.model_validate(written(tmp_path, rows, **options))
        inputs = read_inputs(config)
        batches = training_batches(config, inputs, None).start(0)
        made = [batch for _ in range(5) for batch in next(batches)]
        padding = preview(config, "train", 0).padding
        assert padding == count_padding(iter(made))
        assert padding.tokens == int(inputs.data.train.lengths.sum())
        assert padding.positions == sum(batch["input_ids"].numel() for batch in made) > padding.tokens
    packed = TrainingConfig.model_validate(written(tmp_path, rows, packing=True))
    assert preview(packed, "train", 0).split.packs is not None


def test_pairs_have_both_answers(tmp_path: Path) -> None:
    rows = [{"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]}] * 3
    found = seen(tmp_path, rows, task="preference")
    assert [passage.name for passage in found.rows[0].passages] == ["chosen", "rejected"]
    assert supervised(found.rows[0]) == [f" It is four \U0001f98a.{END}", f" It is five.{END}"]
    assert found.padding.rows == 4
    assert seen(tmp_path, rows, task="reward").rows[0].target is None  # it would say the same of every pair
    wide = [line.plain for line in data_lines("r", found, 120, BRACKETS)]
    assert any("four" in line and "five" in line for line in wide)
    narrow = [line.plain for line in data_lines("r", found, 80, BRACKETS)]
    assert not any("four" in line and "five" in line for line in narrow)


def test_classes_values_and_judgements_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "two", "label": "ab"[index % 2]} for index in range(5)]
    found = seen(tmp_path, rows, task="classification")
    assert found.classes == {"a": 3, "b": 2}
    assert [row.target for row in found.rows] == ["a", "b"]
    several = [{"text": "two", "label": ["a", "b"]}, {"text": "two", "label": []}, {"text": "two", "label": ["b"]}]
    found = seen(tmp_path, several, task="classification")
    assert (found.classes, [row.target for row in found.rows]) == ({"a": 1, "b": 2}, ["a, b", "none"])
    found = seen(tmp_path, [{"text": "two", "label": value} for value in (0.5, 2.5, 1.0)], task="regression")
    assert found.values is not None
    assert (found.values["0.0"], found.values["1.0"], found.rows[1].target) == (0.5, 2.5, "2.5")
    judged = [{"prompt": "two ", "completion": "four", "label": good} for good in (True, False, False)]
    found = seen(tmp_path, judged, task="preference")
    assert (found.classes, found.rows[0].target) == ({"good": 1, "bad": 2}, "good")


def test_packs_are_shown_document_by_document(tmp_path: Path) -> None:
    found = seen(tmp_path, [{"messages": [ASKED, FIVE]}] * 4, packing=True, limit=200)
    row = found.rows[0]
    assert len(row.passages) > 1
    assert row.passages[1].name == "document 2"
    assert supervised(row) == [f" It is five.{END}"] * len(row.passages)


def test_labels_of_other_tokens_are_reported(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 9, 7]}, {"text": "two and two"}]
    written_rows = written(tmp_path, rows[:1])
    (tmp_path / "text.jsonl").write_text(json.dumps(rows[1]) + "\n")
    written_rows["data"]["train"].append({"path": str(tmp_path / "text.jsonl")})
    found = preview(TrainingConfig.model_validate(written_rows), "train", 1)
    assert (found.rows[0].passages[0].supervised, found.rows[0].passages[0].relabelled) == (2, 1)


def test_eval_rows_and_their_absence(tmp_path: Path) -> None:
    rows = [{"text": f"two and {index}"} for index in range(10)]
    found = seen(tmp_path, rows, split="eval", eval_fraction=0.3)
    assert (found.split.name, found.split.kept, len(found.rows)) == ("eval", 3, 2)
    with pytest.raises(Exception, match="no rows to evaluate on"):
        seen(tmp_path, rows, split="eval")


def test_nothing_in_a_row_steers_the_terminal_or_the_page(tmp_path: Path) -> None:
    found = seen(tmp_path, [{"messages": [{**ASKED, "content": "</pre><script>x</script>\x1b[31m\r\x00"}, FOUR]}] * 2)
    text = "\n".join(line.plain for line in data_lines("<i>r</i>", found, 80, BRACKETS))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert "\\u001b[31m\\u000d\\u0000" in text

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            found_tags.add(tag)

    found_tags: set[str] = set()
    tags = Tags()
    page = data_page("<i>r</i>", found)
    tags.feed(page)
    assert "script" not in found_tags
    assert "i" not in found_tags
    assert "mark" in found_tags
    assert "http" not in page.replace("http-equiv", "")


def test_marks_and_the_middle_of_long_rows() -> None:
    assert marks_for("utf-8", True) is COLOUR
    assert marks_for("utf-8", False) is BRACKETS
    assert marks_for("ascii", False) is PLAIN
    pieces = (Piece("a" * 30, False), Piece("b" * 30, True))
    assert list(shortened(pieces, "..", 60)) == [("a" * 30, False), ("b" * 30, True)]
    cut = list(shortened(pieces, "..", 20))
    assert cut == [("a" * 10 + " .. 40 characters .. ", False), ("b" * 10, True)]
    assert visible("a\tb\n\x7f") == "a\tb\n\\u007f"


class TestVerb:
    def recipe(self, tmp_path: Path) -> str:
        rows = [{"messages": [ASKED, FOUR]}] * 4 + [{"messages": [ASKED, {**FIVE, "content": "five " * 99}]}]
        text = json.dumps({"schema_version": 1, **written(tmp_path, rows, limit=100, eval_fraction=0.2)})
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    def test_lines(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data", self.recipe(tmp_path), "--rows", "1"]) == 0
        output = capsys.readouterr().out
        for part in ("mine: sft", "rows of `messages` (found by its columns)", "are padding", "row 0, ", "It is four"):
            assert part in output
        assert output.count("row 0, ") == 1
        assert "row 1, " not in output

    def test_document_and_page(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "rows.html"
        assert main(["data", self.recipe(tmp_path), "--split", "eval", "--json", "--html", str(page)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) == {
            *("schema_version", "recipe", "task", "sources", "split", "kept_lengths", "batches", "classes", "values"),
            *("notes", "warnings", "rows"),
        }
        assert found["split"]["name"] == "eval"
        assert set(found["rows"][0]) == {"number", "tokens", "target", "passages"}
        assert set(found["rows"][0]["passages"][0]) == {"name", "tokens", "supervised", "relabelled", "pieces"}
        assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    def test_a_page_that_cannot_be_written_is_reported_after_the_rows(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = ["--html", "/dev/full"]
        assert main(["data", self.recipe(tmp_path), *page]) == 2
        captured = capsys.readouterr()
        assert "It is four" in captured.out
        assert captured.err.splitlines()[-1].startswith("error --html: /dev/full cannot be written: No s")
        assert main(["data", self.recipe(tmp_path), *page, "--json"]) == 2
        document = json.loads(capsys.readouterr().out)
        assert document["rows"]
        assert document["errors"][0]["key"] == "--html"

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["--split", "test"], "there is no split 'test'"),
            (["--html", "/nowhere/at/all.html"], "cannot be written"),
            (["data.supervise=completion"], "needs rows that say where the prompt ends"),
        ],
    )
    def test_refusals(
        self, arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["data", self.recipe(tmp_path), *arguments]) == 2
        captured = capsys.readouterr()
        assert part in captured.err + captured.out
        assert "Traceback" not in captured.err


def test_a_whole_epoch_of_a_stream_is_counted_when_asked(tmp_path: Path) -> None:
    rows = [{"text": f"two and {index}"} for index in range(300)]
    config = TrainingConfig.model_validate(written(tmp_path, rows, streaming=True, shuffle_buffer=16))
    assert preview(config, "train", 1, whole=True).split.read == 300
    assert preview(config, "train", 1).split.read == 16
    held = TrainingConfig.model_validate(written(tmp_path, rows))
    with pytest.raises(RequestError, match="these rows are read completely"):
        preview(held, "train", 1, whole=True)
    config = TrainingConfig.model_validate(written(tmp_path, [*rows, {"text": 7}], streaming=True, shuffle_buffer=16))
    assert preview(config, "train", 1).split.read == 16
    with pytest.raises(RequestError, match="expected text, not int 7"):
        preview(config, "train", 1, whole=True)


def test_what_later_blocks_of_a_stream_lose_is_a_warning(tmp_path: Path) -> None:
    short, long = {"prompt": "a ", "completion": "b"}, {"prompt": "two and " * 200, "completion": "b"}
    rows = [short] * 50 + [long] * 100
    config = TrainingConfig.model_validate(written(tmp_path, rows, streaming=True, shuffle_buffer=20))
    assert preview(config, "train", 1).report.warnings == ()
    found = preview(config, "train", 1, whole=True)
    assert (found.split.read, found.split.kept) == (150, 50)
    (warning,) = found.report.warnings
    assert warning.startswith("data.train: 66.7% of the supervised tokens of train are lost")
    assert warning in found.to_json()["warnings"]


def test_a_stream_shows_its_first_block(tmp_path: Path) -> None:
    found = seen(tmp_path, [{"text": f"two and {index}"} for index in range(40)], streaming=True, shuffle_buffer=16)
    assert len(found.rows) == 2
    assert found.split.stream is not None
    assert found.padding.micro_batches > 0
