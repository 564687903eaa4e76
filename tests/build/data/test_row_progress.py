import io

from rich.console import Console

from framework.build.data.rows import row_progress


def shown(**options: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, **options)
    with row_progress("train", 1000, console) as done:
        for _ in range(10):
            done(100)
    return out.getvalue()


def test_a_terminal_gets_a_bar_with_a_rate() -> None:
    text = shown(force_terminal=True)
    assert "tokenizing train" in text
    assert "1000/1000" in text
    assert "rows/s" in text


def test_nothing_else_gets_one() -> None:
    assert shown(force_terminal=False).strip() == ""
    assert shown(force_terminal=True, quiet=True).strip() == ""
    with row_progress("train", 10, None) as done:
        done(10)
