import bz2
import contextlib
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework.build.sources.files import Fault
from framework.build.sources.python_library import standard_library
from framework.build.sources.sources import join_sources, open_source, read_source, read_sources
from framework.errors import Problem, RequestError
from framework.schema.data import DatasetParams
from framework.schema.tasks import Task
from tests.grids import slow

WriteRows = Callable[..., str]

TURNS = "[{role: user, content: ..}, {role: assistant, content: ..}, ..]"
CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]


def _all_rows(*asked):
    return join_sources(read_sources(*asked))


def read(path: str, **options: object) -> list[dict[str, object]]:
    """The rows as they are kept, with their chats read back."""
    source = DatasetParams.model_validate({"path": path, **options})
    rows = [{**row, "messages": json.loads(row["messages"])} if row.get("messages") else row for row in _kept(source)]
    return [{name: value for name, value in row.items() if name not in ("form", "tools")} for row in rows]


def _kept(source: DatasetParams) -> list[dict[str, Any]]:
    return list(_all_rows([source], "data.train"))


def texts(path: str, **options: object) -> list[object]:
    return [row["text"] for row in read(path, **options)]


def problems(path: str, **options: object) -> tuple[Problem, ...]:
    with pytest.raises(RequestError) as caught:
        read(path, **options)
    return caught.value.problems


class TestKinds:
    def test_jsonl_keeps_line_numbers_over_blank_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  \n{"text": "two", "other": 3}')
        assert read(str(path)) == [
            {"text": "one", "path": str(path), "row": 1},
            {"text": "two", "path": str(path), "row": 4},
        ]

    @pytest.mark.parametrize(
        "content",
        [
            '[{"text": "one"}, {"text": "two"}]',
            '{"text": "one"}\n{"text": "two"}\n',
            '[\n {"text": "one"},{"text":"two"}\n]',
        ],
    )
    def test_json_as_array_or_lines(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(content)
        assert texts(str(tmp_path / "a.json")) == ["one", "two"]

    def test_csv_with_quotes_line_breaks_and_long_fields(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        path.write_text('id,text\n1,"one, ""quoted""\nsecond line"\n2,007\n3,' + "x" * 200_000 + "\n")
        rows = read(str(path))
        assert [row["text"] for row in rows] == ['one, "quoted"\nsecond line', "007", "x" * 200_000]
        assert [row["row"] for row in rows] == [3, 4, 5]

    def test_tsv(self, tmp_path: Path) -> None:
        (tmp_path / "a.tsv").write_text("text\tn\none, two\t1\n")
        assert texts(str(tmp_path / "a.tsv")) == ["one, two"]

    def test_parquet_of_chats(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"messages": [CHAT, CHAT], "n": [1, 2]}), path)
        assert read(str(path)) == [{"messages": CHAT, "path": str(path), "row": row} for row in (1, 2)]

    def test_text_is_one_row_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one\n\n  two\n")
        assert texts(str(tmp_path / "a.txt")) == ["one", "  two"]

    def test_folder_and_glob_are_read_in_sorted_order(self, tmp_path: Path) -> None:
        for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden/d.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps({"text": name}))
        (tmp_path / "README.md").write_text("not data")
        assert texts(str(tmp_path)) == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
        assert texts(str(tmp_path / "?.jsonl")) == ["a.jsonl", "b.jsonl"]

    def test_folder_with_files_named_for_splits_gives_only_the_split_asked_for(self, tmp_path: Path) -> None:
        for name in ("train.jsonl", "test.jsonl", "validation-00000-of-00001.jsonl"):
            (tmp_path / name).write_text(json.dumps({"text": name}))
        assert texts(str(tmp_path)) == ["train.jsonl"]
        assert texts(str(tmp_path), split="val") == ["validation-00000-of-00001.jsonl"]
        (problem,) = problems(str(tmp_path), split="dress")
        assert problem.key == "data.train[0].split"
        assert "test.jsonl, train.jsonl, validation" in problem.message

    def test_null_and_missing_values_are_left_for_later(self, write_rows: WriteRows) -> None:
        assert texts(write_rows("a.jsonl", [{"text": "one"}, {"text": None}, {"n": 3}])) == ["one", None, None]

    def test_fields_that_no_template_reads_are_dropped(self, write_rows: WriteRows) -> None:
        chat = [{**CHAT[0], "weight": 1}, {**CHAT[1], "tool_calls": None}]
        assert read(write_rows("a.jsonl", [{"messages": chat}]))[0]["messages"] == CHAT


class TestStandardLibrary:
    def test_is_large_real_and_has_no_tests(self) -> None:
        rows = read("python_stdlib")
        paths = [str(row["path"]) for row in rows]
        assert sum(len(str(row["text"])) for row in rows) > 5_000_000
        assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(paths)
        assert paths == sorted(paths, key=lambda path: path.split("/"))
        assert not any({"test", "tests", "site-packages", "__pycache__"} & set(path.split("/")) for path in paths)
        source = Path(os.__file__).parent / "json" / "decoder.py"
        assert rows[paths.index("json/decoder.py")]["text"] == source.read_text(encoding="utf-8")

    @pytest.mark.slow
    def test_is_the_same_in_another_process(self) -> None:
        program = (
            "import hashlib; from framework.build.sources.python_library import standard_library\n"
            "for path, rows in standard_library(): print(path, hashlib.md5(str(next(rows)).encode()).hexdigest())"
        )
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
        here = [f"{path} {hashlib.md5(str(next(rows)).encode()).hexdigest()}" for path, rows in standard_library()]
        assert other.stdout.splitlines() == here


class TestForms:
    def test_detection_is_reported(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x", "messages": CHAT}])
        source = read_source(DatasetParams(path=path), "data.train[0]")
        assert source.description == f"{path}: 1 row of `messages` (found by its columns)"
        source = read_source(DatasetParams.model_validate({"path": path, "format": "text"}), "data.train[0]")
        assert source.description == f"{path}: 1 row of `text` (as set)"

    def test_columns_are_mapped(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"body": "x", "dialog": CHAT}])
        assert texts(path, columns={"text": "body"}) == ["x"]
        assert read(path, columns={"messages": "dialog"})[0]["messages"] == CHAT

    def test_sources_of_both_forms_are_joined(self, write_rows: WriteRows) -> None:
        params = [
            DatasetParams(path=write_rows("a.jsonl", [{"text": "x"}])),
            DatasetParams(path=write_rows("b.jsonl", [{"messages": CHAT}])),
        ]
        rows = list(_all_rows(params, "data.train"))
        assert [(row["form"], row["text"]) for row in rows] == [("text", "x"), ("messages", None)]
        assert rows[0]["messages"] is None
        assert json.loads(rows[1]["messages"]) == CHAT

    @pytest.mark.parametrize(
        ("row", "message", "nearest"),
        [
            (
                {"texts": "x", "n": 1},
                "the columns are: texts, n; no row format of the task sft matches",
                "columns: {text: texts}",
            ),
            ({"body": "x"}, "the columns are: body", "columns: {text: body}"),
            ({"promt": "x", "completion": "y"}, "the columns are: promt, completion", "columns: {prompt: promt}"),
            ({"question": "x", "n": 1}, "the columns are: question, n", None),
            ({"dialog": CHAT}, "the columns are: dialog", "columns: {messages: dialog}"),
            ({"dialog": [{"from": "human", "value": "x"}]}, "", "columns: {conversations: dialog}"),
            ({"dialog": ["x", "y"]}, "", f"messages: {TURNS} in place of `dialog`"),
            ({"question": "x", "answer": "y"}, "", "columns: {prompt: question, completion: answer}"),
            ({"Prompt": "x", "response": "y"}, "", "columns: {prompt: Prompt, completion: response}"),
            ({"prompt": "x", "response": "y"}, "", "columns: {completion: response}"),
            ({"instruction": "x", "response": "y"}, "", "columns: {output: response}"),
            (
                {"question": "x", "context": "y", "answer": "z"},
                "the columns are: question, context, answer",
                "columns: {instruction: question, input: context, output: answer}",
            ),
            ({"question": "x", "answers": {"text": ["y"]}}, "", None),
        ],
    )
    def test_unknown_forms(self, row: object, message: str, nearest: str | None, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [row]))
        assert message in problem.message
        assert problem.nearest == nearest

    @pytest.mark.parametrize(
        ("row", "columns"),
        [
            ({"dialog": CHAT}, {"messages": "dialog"}),
            ({"question": "x", "answer": "y"}, {"prompt": "question", "completion": "answer"}),
            (
                {"question": "x", "context": "y", "answer": "z"},
                {"instruction": "question", "input": "context", "output": "answer"},
            ),
        ],
    )
    def test_what_is_proposed_is_read(self, row: object, columns: dict[str, str], write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [row])
        (problem,) = problems(path)
        assert problem.nearest == f"columns: {{{', '.join(f'{ours}: {theirs}' for ours, theirs in columns.items())}}}"
        assert len(read(path, columns=columns)) == 1

    def test_set_form_whose_column_is_absent(self, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [{"message": CHAT}]), format="messages")
        assert problem.message == "there is no column `messages`; the columns are: message"
        assert problem.nearest == "message"


class TestRefusals:
    def test_missing_file_shows_both_paths_and_the_nearest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "train.jsonl").touch()
        monkeypatch.chdir(tmp_path)
        (problem,) = problems("trian.jsonl")
        assert problem.key == "data.train[0]"
        assert "trian.jsonl" in problem.message
        assert str(tmp_path / "trian.jsonl") in problem.message
        assert problem.nearest == "train.jsonl"

    def test_every_source_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError) as caught:
            _all_rows([DatasetParams(path="./a.jsonl"), DatasetParams(path="./b/*.csv")], "data.eval")
        assert [problem.key for problem in caught.value.problems] == ["data.eval[0]", "data.eval[1]"]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
    @pytest.mark.parametrize("content", ["", "\n \n"])
    def test_empty_file(self, name: str, content: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(content)
        (problem,) = problems(str(tmp_path / name))
        assert problem.message == "the file has no rows"
        assert problem.where == str(tmp_path / name)

    def test_one_empty_file_among_others_is_not_passed_over(self, tmp_path: Path, write_rows: WriteRows) -> None:
        write_rows("a.jsonl", [{"text": "x"}])
        (tmp_path / "b.jsonl").touch()
        (problem,) = problems(str(tmp_path))
        assert problem.where == str(tmp_path / "b.jsonl")

    def test_folder_without_data(self, tmp_path: Path) -> None:
        (tmp_path / "notes.md").touch()
        (problem,) = problems(str(tmp_path))
        assert "has no data files; it has notes.md" in problem.message

    def test_kind_that_is_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.xlsx").touch()
        (problem,) = problems(str(tmp_path / "a.xlsx"))
        assert ".xlsx" in problem.message
        assert ".jsonl" in str(problem.expected)

    def test_what_is_no_regular_file_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.jsonl")
        (problem,) = problems(str(tmp_path / "a.jsonl"))
        assert problem.message == f"{tmp_path / 'a.jsonl'} is not a regular file, and rows are read more than once"
        (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
        assert texts(str(tmp_path)) == texts(str(tmp_path / "*.jsonl")) == ["x"]

    @pytest.mark.parametrize("stride", [11, slow(1)])
    @pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
    def test_damaged_offsets_are_reported_and_not_followed(self, name: str, stride: int, tmp_path: Path) -> None:
        table, path = pa.table({"text": ["a" * 40, "b" * 40, "c" * 40]}), tmp_path / name
        if name == "a.parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        whole = path.read_bytes()
        for at in range(0, len(whole), stride):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
            with contextlib.suppress(RequestError):
                texts(str(path))

    def test_broken_lines_are_named_all_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "fine"}\n{"text": broken}\n[1]\n{"text": "\xff"}\n{"text": 5}\n{"text": "fine"}\n')
        found = problems(str(path))
        assert [problem.where for problem in found] == [f"{path}:{line}" for line in (2, 3, 4, 5)]
        assert "not JSON: Expecting value at column 10" in found[0].message
        assert "expected an object {..}, not list" in found[1].message
        assert "not UTF-8: byte 0xff at position 10" in found[2].message
        assert found[3].message == "column `text`: expected text, not int 5"

    def test_many_broken_lines_stop_the_reading(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + "broken\n" * 1000)
        found = problems(str(tmp_path / "a.jsonl"))
        assert len(found) == 11
        assert "stopped after 10" in found[-1].message

    @pytest.mark.parametrize(
        ("messages", "fault"),
        [
            ("hello", "expected a list of messages, not str 'hello'"),
            (["hello"], "message 1: expected {role: .., content: ..}, not str 'hello'"),
            ([{"role": "usr", "content": "hi"}], "message 1: the role is 'usr'; did you mean user?"),
            ([{"role": "Assistant", "content": "hi"}], "message 1: the role is 'Assistant'; did you mean assistant?"),
            ([CHAT[0], {"role": "assistant"}], "message 2: there is no `content`"),
            ([{"role": 3, "content": "x"}], "message 1: `role`: expected text, not int 3"),
            (
                [{"role": "user", "content": [{"type": "image"}]}],
                "`content`: expected text or parts",
            ),
            ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "`tool_calls`: call 1: expected"),
        ],
    )
    def test_wrong_messages(self, messages: object, fault: str, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [{"messages": CHAT}, {"messages": messages}]))
        assert "column `messages`: " in problem.message
        assert fault in problem.message
        assert str(problem.where).endswith("a.jsonl:2")

    @pytest.mark.parametrize(
        ("content", "line", "fault"),
        [
            (b"text,n\nfine,1\nx\n", 3, "1 field, but the header has 2"),
            (b"text,n,text\nx,1,y\n", 1, "names a column twice: text"),
            (b'text\n"never closed\n', 2, "not CSV"),
            (b"text\nfine\n\xe9t\xe9\n", 3, "not UTF-8: byte 0xe9 at position 0"),
        ],
    )
    def test_broken_csv(self, content: bytes, line: int, fault: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_bytes(content)
        (problem,) = problems(str(tmp_path / "a.csv"))
        assert fault in problem.message
        assert problem.where == f"{tmp_path / 'a.csv'}:{line}"

    @pytest.mark.parametrize("content", [b"", b"PAR1 not really", b"\x00" * 100])
    def test_broken_parquet(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(content)
        (problem,) = problems(str(tmp_path / "a.parquet"))
        assert "not Parquet" in problem.message

    def test_parquet_column_of_another_type(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
        found = problems(str(tmp_path / "a.parquet"))
        assert [problem.where for problem in found] == [f"{tmp_path / 'a.parquet'}:{row}" for row in (1, 2)]

    @pytest.mark.parametrize("content", [b"{", b'[{"text": "x"}', b"\xff\xfe{\x00", b"[" * 100_000, b"[1, 2]", b"nul"])
    def test_broken_json(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_bytes(content)
        assert str(problems(str(tmp_path / "a.json"))[0].where).startswith(str(tmp_path / "a.json:"))

    def test_half_a_character(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "\\ud83e\\udd8a"}\n{"text": "x\\ud83e"}\n')
        (problem,) = problems(str(tmp_path / "a.jsonl"))
        assert problem.where == f"{tmp_path / 'a.jsonl'}:2"
        assert r"'\ud83e' at character 2" in problem.message

    def test_deep_nesting_in_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
        (problem,) = problems(str(tmp_path / "a.jsonl"))
        assert "not JSON" in problem.message

    def test_options_that_would_do_nothing(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x"}])
        found = problems(path, name="x", split="dev[:10%]", columns={"txt": "text"})
        assert [problem.key.removeprefix("data.train[0].") for problem in found] == [
            "name",
            "split",
            "columns",
        ]
        assert found[2].nearest == "text"


class TestArrow:
    def write(self, path: Path, new: Callable[..., object], rows: int = 2500) -> str:
        table = pa.table({"text": [str(row) for row in range(rows)]})
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
        return str(path)

    @pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
    def test_files_and_streams(self, new: Callable[..., object], tmp_path: Path) -> None:
        rows = read(self.write(tmp_path / "a.arrow", new))
        assert [row["text"] for row in rows] == [str(row) for row in range(2500)]
        assert [row["row"] for row in rows] == list(range(1, 2501))

    def test_a_folder_that_save_to_disk_wrote(self, tmp_path: Path) -> None:
        import datasets

        saved = datasets.Dataset.from_dict({"text": [str(row) for row in range(5)]})
        saved.save_to_disk(str(tmp_path / "one"), num_shards=2)
        self.write(tmp_path / "one" / "cache-0123.arrow", pa.ipc.new_stream)  # as `map` leaves one there
        assert texts(str(tmp_path / "one")) == ["0", "1", "2", "3", "4"]
        assert problems(str(tmp_path / "one"), split="test")[0].key == "data.train[0].split"

    def test_the_splits_of_such_a_folder(self, tmp_path: Path) -> None:
        import datasets

        parts = {name: datasets.Dataset.from_dict({"text": [name] * 2}) for name in ("train_sft", "test")}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "all"))
        assert texts(str(tmp_path / "all"), split="train_sft[1:]") == ["train_sft"]
        (problem,) = problems(str(tmp_path / "all"), split="train_stf")
        assert (problem.key, problem.nearest) == ("data.train[0].split", "train_sft")

    @pytest.mark.parametrize("content", [b"", b"ARROW1 not really", b"\x00" * 100])
    def test_broken(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "a.arrow").write_bytes(content)
        (problem,) = problems(str(tmp_path / "a.arrow"))
        assert "not Arrow" in problem.message
        assert problem.where == f"{tmp_path / 'a.arrow'}:1"

    def test_cut_short(self, tmp_path: Path) -> None:
        path = Path(self.write(tmp_path / "a.arrow", pa.ipc.new_stream))
        path.write_bytes(path.read_bytes()[:-9000])
        assert "not Arrow" in problems(str(path))[0].message

    @pytest.mark.parametrize("kind", ["arrow", "parquet"])
    def test_a_column_twice(self, kind: str, tmp_path: Path) -> None:
        table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
        path = tmp_path / f"a.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        (problem,) = problems(str(path))
        assert (problem.where, problem.message) == (str(path), "the schema names a column twice: text")


def compressed(content: bytes, kind: str) -> bytes:
    if kind == "zst":
        return bytes(pa.compress(content, codec="zstd"))  # a frame as `zstd` writes it
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[kind](content)


class TestCompressed:
    @pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n'),
            ("a.json", b'[{"text": "one"}, {"text": "two"}]'),
            ("a.csv", b"n,text\n1,one\n2,two\n"),
            ("a.tsv", b"n\ttext\n1\tone\n2\ttwo\n"),
            ("a.TXT", b"one\ntwo\n"),
        ],
    )
    def test_every_kind_of_text(self, kind: str, name: str, content: bytes, tmp_path: Path) -> None:
        (tmp_path / f"{name}.{kind}").write_bytes(compressed(content, kind))
        assert texts(str(tmp_path / f"{name}.{kind}")) == ["one", "two"]
        assert texts(str(tmp_path)) == texts(str(tmp_path / f"*.{kind}")) == ["one", "two"]

    @pytest.mark.parametrize("kind", ["gz", "zst", slow("bz2"), slow("xz")])
    def test_cut_short_is_reported_with_the_row(self, kind: str, tmp_path: Path) -> None:
        content = "".join(json.dumps({"text": hashlib.md5(b"%d" % row).hexdigest()}) + "\n" for row in range(10_000))
        path = tmp_path / f"a.jsonl.{kind}"
        whole = compressed(content.encode(), kind)
        path.write_bytes(whole[: len(whole) * 9 // 10])
        (problem,) = problems(str(path))
        assert str(problem.where).startswith(f"{path}:")
        assert int(str(problem.where).rpartition(":")[2]) > (3_000 if kind != "bz2" else 0)
        assert any(word in problem.message for word in ("truncated", "Truncated"))

    @pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
    @pytest.mark.parametrize("content", [b"", b"not compressed at all, whatever its name says"])
    def test_broken_from_the_start(self, kind: str, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / f"a.jsonl.{kind}"
        path.write_bytes(content)
        (problem,) = problems(str(path))
        assert str(problem.where).startswith(str(path))

    def test_parquet_is_compressed_inside(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet.gz").touch()
        (problem,) = problems(str(tmp_path / "a.parquet.gz"))
        assert "'.parquet.gz'" in problem.message


class TestSlices:
    @pytest.mark.parametrize(
        "spec",
        ["[:3]", "[3:]", "[2:5]", "[-3:]", "[:-3]", "[10%:]", "[:33%]", "[-25%:]", "[50%:80%]", "[:99]", "[1:-1]"],
    )
    def test_are_those_of_hugging_face(self, spec: str, write_rows: WriteRows) -> None:
        import datasets

        path = write_rows("a.jsonl", [{"text": str(row)} for row in range(11)])
        instruction = datasets.ReadInstruction.from_spec(f"train{spec}")
        (absolute,) = instruction.to_absolute({"train": 11})
        assert texts(path, split=f"train{spec}") == [str(row) for row in range(absolute.from_, absolute.to)]

    def test_resume_over_files(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / f"{name}.txt").write_text("".join(f"{name}{row}\n" for row in range(3)))
        rows = read(str(tmp_path), split="train[2:4]")
        assert [(row["text"], row["row"]) for row in rows] == [("a2", 3), ("b0", 1)]

    def test_nothing_behind_the_slice_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\nbroken\n')
        assert texts(str(tmp_path / "a.jsonl"), split="train[:2]") == ["one", "two"]

    def test_an_empty_slice(self, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [{"text": "x"}]), split="train[5:]")
        assert problem.key == "data.train[0].split"
        assert problem.message == "`train[5:]` has no rows: the source has 1 row"

    def test_joined_splits_of_files(self, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [{"text": "x"}]), split="train[:1]+train[1:]")
        assert problem.expected == "each of them as a separate source"

    @pytest.mark.parametrize("spec", ["train[", "train[5]", "train[%:]", "[:5]", "train[1:2:3]", "", "train[a:]"])
    def test_misspelt(self, spec: str) -> None:
        with pytest.raises(ValueError, match="is not a split"):
            DatasetParams(path="a.jsonl", split=spec)


class TestLargeFiles:
    def test_rows_are_read_as_they_are_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl.gz"
        with gzip.open(path, "wt") as file:
            file.writelines('{"text": "%s"}\n' % ("x" * 1000) for _ in range(5_000))
        source = open_source(DatasetParams(path=str(path)), "data.train[0]")
        tracemalloc.start()
        assert sum(len(values["text"]) for _, values in source.rows() if not isinstance(values, Fault)) == 5_000_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()

    def test_a_wrong_type_late_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        with path.open("w") as file:
            file.writelines('{"text": "x"}\n' if row != 24_999 else '{"text": ["x"]}\n' for row in range(30_000))
        (problem,) = problems(str(path))
        assert problem.where == f"{path}:25000"
        assert problem.message == "column `text`: expected text, not list ['x']"

    def test_a_row_of_ten_megabytes(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x"}, {"text": "y" * 10_000_000}, {"text": "z"}])
        assert [len(str(text)) for text in texts(path)] == [1, 10_000_000, 1]


class TestHub:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def test_unreachable_is_reported_briefly(self) -> None:
        (problem,) = problems("acme/chats")
        assert "no file or folder" in problem.message
        assert "huggingface.co cannot be reached from here" in problem.message

    def test_misspelt_embedded_source(self) -> None:
        (problem,) = problems("python-stdlib")
        assert problem.nearest == "python_stdlib"

    def test_rows_of_a_hub_dataset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def load_dataset(path: str, name: str | None, split: str) -> datasets.Dataset:
            assert (path, name, split) == ("acme/chats", "small", "test")
            return datasets.Dataset.from_dict({"id": [1, 2], "messages": [CHAT, CHAT]})

        monkeypatch.setattr("framework.build.sources.sources.hub_is_reachable", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        rows = read("acme/chats", name="small", split="test")
        assert rows == [{"messages": CHAT, "path": "acme/chats", "row": row} for row in (1, 2)]

    def test_classes_of_a_hub_dataset_have_their_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sad", "glad"])}
        )
        rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features)
        monkeypatch.setattr("framework.build.sources.sources.hub_is_reachable", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        found = list(_all_rows([DatasetParams(path="acme/moods")], "data.train", Task.CLASSIFICATION))
        assert [row["label"] for row in found] == ['"glad"', '"sad"', None]

    def test_what_the_hub_answers_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def load_dataset(*_: object, **__: object) -> None:
            raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']\n" * 40)

        monkeypatch.setattr("framework.build.sources.sources.hub_is_reachable", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        (problem,) = problems("acme/chats")
        assert "Please pick one among: ['a', 'b']" in problem.message
        assert len(problem.message) < 500
        assert "\n" not in problem.message


def test_random_bytes_are_rows_or_located_problems(tmp_path: Path) -> None:
    import random

    rng = random.Random(5)
    good = {
        "jsonl": b'{"text": "one"}\n{"text": "two"}\n',
        "json": b'[{"text": "one"}, {"text": "two"}]',
        "csv": b'text,n\none,1\n"two",2\n',
        "txt": b"one\ntwo\n",
    }
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "good.parquet")
    good["parquet"] = (tmp_path / "good.parquet").read_bytes()
    found: list[tuple[str, tuple[Problem, ...]]] = []
    for attempt in range(200):
        ending = rng.choice(sorted(good))
        content = bytearray(good[ending])
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path = tmp_path / f"{attempt}.{ending}"
        path.write_bytes(content[: rng.randint(0, 2 * len(content))])
        try:
            assert read(str(path))
        except RequestError as error:
            found.append((str(path), error.problems))
    assert len(found) > 50
    for name, list_of_problems in found:
        assert all(f"{problem.where}".startswith(name) for problem in list_of_problems)
