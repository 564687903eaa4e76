"""The table of tasks: complete, and consistent with the row formats."""

import pytest

from framework.build.text.format_table import FORMATS
from framework.schema.choices import RowFormat
from framework.schema.tasks import TASKS, Task, tasks_with


def test_each_task_has_a_row():
    assert TASKS.keys() == set(Task)


@pytest.mark.parametrize("task", Task)
def test_each_task_reads_one_kind_of_rows(task):
    formats = {name for name, row_format in FORMATS.items() if task in row_format.tasks}
    facts = task.facts
    assert [facts.trains_on_text, facts.compares_answers, facts.label is not None].count(True) == 1
    assert (RowFormat.MESSAGES in formats) == facts.trains_on_text
    assert (RowFormat.PREFERENCE in formats) == facts.compares_answers
    assert (RowFormat.LABELLED in formats) == (facts.label is not None)


def test_tasks_by_fact():
    assert tasks_with(lambda facts: facts.is_of_rows) == (Task.REWARD, Task.CLASSIFICATION, Task.REGRESSION)
    assert tasks_with(lambda facts: facts.compares_models) == (Task.PREFERENCE, Task.DISTILLATION)
