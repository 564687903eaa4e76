"""`tunesmith report`: the page's location, the printed lines, and requests that cannot be served."""

import json

import pytest

from framework.cli import main
from tests.cli.test_front_rooms import HEAVY, loaded
from tests.reports.runs import export, make_run, step, write_memory


@pytest.fixture
def folder(tmp_path):
    made = make_run(tmp_path / "mine", [step(1), step(2)], max_steps=2)
    write_memory(made, 2)
    export(made)
    return made


def test_the_page_is_in_the_run_folder_and_its_path_on_stdout(folder, capsys):
    for _ in range(2):  # a page of an earlier time is written anew
        assert main(["report", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    page = (folder / "report.html").read_text()
    assert "mine: done, 2 of 2 steps made" in page
    assert page.endswith("</html>\n")


def test_output_says_where_and_the_folder_stays_as_it_is(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert "done, 2 of 2" in (tmp_path / "page.html").read_text()
    assert not (folder / "report.html").exists()


def test_a_run_folder_that_is_named_by_a_dot_has_its_name(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["report", "."]) == 0
    assert "mine: done" in (folder / "report.html").read_text()


def test_what_is_no_run_or_cannot_be_written_exits_2(folder, tmp_path, capsys):
    (folder / "report.html").mkdir()
    wrong = {
        (str(tmp_path / "mime"),): f"did you mean {folder}",
        (str(tmp_path),): f"did you mean {folder}",
        (str(folder), "--output", str(tmp_path / "none" / "a.html")): "a folder that exists",
        (str(folder),): "report.html cannot be written",
    }
    for arguments, message in wrong.items():
        assert main(["report", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert "Traceback" not in err


def test_a_resumed_run_and_a_run_under_way_are_reported(folder, capsys):
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(
        json.dumps({**environment, "command": [*environment["command"], "--resume"]})
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{json.dumps(step(3))}\n{{"step": 4, "lo')
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "(resumed)" in page
    assert "mine: not finished, 3 steps made" in page
    assert "metrics.jsonl: 1 line is incomplete" in page


def test_it_loads_no_torch(folder):
    modules = loaded(f"from framework.cli import main; main(['report', {str(folder)!r}])")
    assert "framework" in modules
    assert not modules & set(HEAVY)
