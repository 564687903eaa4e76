"""Columns that a source's template makes: from any column, in a sandbox, each fault with its row."""

import json
from pathlib import Path
from typing import Any

import pytest

from framework.build.sources.sources import read_source
from framework.errors import RequestError
from framework.schema.data import DatasetParams
from framework.schema.tasks import Task

KEY = "data.train[0]"


def rows(tmp_path: Path, template: Any, *records: dict[str, Any], task: Task = Task.SFT, **source: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_source(DatasetParams(path=str(file), template=template, **source), KEY, task)


def test_columns_are_made_of_any_of_the_rows(tmp_path):
    template = {"prompt": "Translate {{ pair.en | upper }}:\n", "completion": "{% if de %}{{ de }}{% endif %}"}
    found = rows(tmp_path, template, {"pair": {"en": "yes"}, "de": "ja"}, {"pair": {"en": "no"}, "de": None})
    assert [tuple(json.loads(row[name]) for name in ("prompt", "completion")) for row in found.dataset] == [
        ("Translate YES:\n", "ja"),
        ("Translate NO:\n", ""),
    ]
    assert found.row_format == "prompt_completion"


def test_one_text_is_the_column_text(tmp_path):
    found = rows(tmp_path, "{{ title }}: {{ body }}", {"title": "a", "body": "b"})
    assert [row["text"] for row in found.dataset] == ["a: b"]


def test_a_template_that_is_one_column_takes_its_value(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = rows(tmp_path, {"messages": "{{ log }}"}, {"log": turns, "text": "not read"})
    assert found.row_format == "messages"
    labelled = {"text": "{{ title }}", "label": "{{ score }}"}
    found = rows(tmp_path, labelled, {"title": "a", "score": 0.5}, task=Task.REGRESSION)
    assert len(found.dataset) == 1


def test_a_column_that_is_not_there_is_reported_with_its_row_and_the_nearest(tmp_path):
    with pytest.raises(RequestError) as raised:
        rows(tmp_path, {"text": "{{ titel }}!"}, {"title": "a"})
    [problem] = raised.value.problems
    assert "'titel' is undefined" in problem.message
    assert "did you mean `title`?" in problem.message
    assert str(problem.where).endswith("rows.jsonl:1")
    with pytest.raises(RequestError, match="'titel' is undefined"):
        rows(tmp_path, {"text": "{{ titel }}"}, {"title": "a"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"text": "{% if a %}"}, "is not a Jinja template: line 1"),
        ({"text": 3}, "is 3"),
        ({}, "makes no column"),
        ({"text": "{{ a.__class__.__mro__ }}"}, "unsafe|undefined"),
        ({"text": "{{ 'x' * 100000000000 }}"}, "more than"),
    ],
)
def test_what_is_no_template_or_would_do_harm_is_refused(tmp_path, template, message):
    with pytest.raises(RequestError, match=message):
        rows(tmp_path, template, {"a": "b"})


def test_one_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("framework.build.sources.row_template.RENDER_SECONDS", 0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match=r"takes more than 0\.05 s for one row"):
        rows(tmp_path, {"text": endless}, {"a": "b"})
