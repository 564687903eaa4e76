import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from framework.build.sources import read_rows, read_source, standard_library
from framework.errors import Problem, RequestError
from framework.schema.data import DatasetParams

WriteRows = Callable[..., str]

CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Four."}]


def read(path: str, **options: object) -> list[dict[str, object]]:
    source = DatasetParams.model_validate({"path": path, **options})
    return list(read_rows([source], "data.train"))


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

    def test_is_the_same_in_another_process(self) -> None:
        program = (
            "import hashlib; from framework.build.sources import standard_library\n"
            "for path, rows in standard_library(): print(path, hashlib.md5(str(next(rows)).encode()).hexdigest())"
        )
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
        here = [f"{path} {hashlib.md5(str(next(rows)).encode()).hexdigest()}" for path, rows in standard_library()]
        assert other.stdout.splitlines() == here


class TestForms:
    def test_detection_is_told(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"text": "x", "messages": CHAT}])
        source = read_source(DatasetParams(path=path), "data.train[0]")
        assert source.description == f"{path}: 1 rows of `messages` (found by its column)"
        source = read_source(DatasetParams.model_validate({"path": path, "format": "text"}), "data.train[0]")
        assert source.description == f"{path}: 1 rows of `text` (as set)"

    def test_columns_are_mapped(self, write_rows: WriteRows) -> None:
        path = write_rows("a.jsonl", [{"body": "x", "dialog": CHAT}])
        assert texts(path, columns={"text": "body"}) == ["x"]
        assert read(path, columns={"messages": "dialog"})[0]["messages"] == CHAT

    def test_sources_of_both_forms_are_joined(self, write_rows: WriteRows) -> None:
        params = [
            DatasetParams(path=write_rows("a.jsonl", [{"text": "x"}])),
            DatasetParams(path=write_rows("b.jsonl", [{"messages": CHAT}])),
        ]
        rows = read_rows(params, "data.train").to_list()
        assert [(row["text"], row["messages"]) for row in rows] == [("x", None), (None, CHAT)]

    @pytest.mark.parametrize(
        ("row", "message", "nearest"),
        [
            (
                {"texts": "x", "n": 1},
                "no column `text` or `messages`; the columns are: texts, n",
                "columns: {text: texts}",
            ),
            ({"body": "x"}, "the columns are: body", "columns: {text: body}"),
            ({"prompt": "x", "completion": "y"}, "prompt and completion", None),
            ({"input_ids": [1], "labels": [1]}, "`input_ids` (pre-tokenised rows) are not yet available", None),
            ({"text": "x", "input_ids": [1]}, "`input_ids` (pre-tokenised rows) are not yet available", None),
            ({"conversations": []}, "ShareGPT", None),
        ],
    )
    def test_unknown_forms(self, row: object, message: str, nearest: str | None, write_rows: WriteRows) -> None:
        (problem,) = problems(write_rows("a.jsonl", [row]))
        assert message in problem.message
        assert problem.nearest == nearest

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
            read_rows([DatasetParams(path="./a.jsonl"), DatasetParams(path="./b/*.csv")], "data.eval")
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
            ([CHAT[0], {"role": "assistant"}], "message 2: there is no `content`"),
            ([{"role": 3, "content": "x"}], "message 1: `role`: expected text, not int 3"),
            ([{"role": "user", "content": [{"type": "image"}]}], "`content`: expected text, not list"),
            ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "`tool_calls` are not yet available"),
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
            (b"text,n\nfine,1\nx\n", 3, "1 fields, but the header has 2"),
            (b"text,text\nx,y\n", 1, "names a column twice"),
            (b'text\n"never closed\n', 2, "not CSV"),
            (b"text\nfine\n\xe9t\xe9\n", None, "not UTF-8"),
        ],
    )
    def test_broken_csv(self, content: bytes, line: int | None, fault: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_bytes(content)
        (problem,) = problems(str(tmp_path / "a.csv"))
        assert fault in problem.message
        assert line is None or problem.where == f"{tmp_path / 'a.csv'}:{line}"

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
        found = problems(path, name="x", split="train[:10%]", weight=2.0, columns={"txt": "text"})
        assert [problem.key.removeprefix("data.train[0].") for problem in found] == [
            "weight",
            "name",
            "split",
            "columns",
        ]
        assert found[3].nearest == "text"


class TestHub:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def test_unreachable_is_told_briefly(self) -> None:
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

        monkeypatch.setattr("framework.build.sources.hub_is_reachable", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        rows = read("acme/chats", name="small", split="test")
        assert rows == [{"messages": CHAT, "path": "acme/chats", "row": row} for row in (1, 2)]

    def test_what_the_hub_answers_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def load_dataset(*_: object, **__: object) -> None:
            raise ValueError("Config name is missing.\nPlease pick one among: ['a', 'b']\n" * 40)

        monkeypatch.setattr("framework.build.sources.hub_is_reachable", lambda: True)
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
