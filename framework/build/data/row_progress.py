"""A bar on a terminal while rows are tokenised, with the rows that are done in a second."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from framework.activity import drawn_by


class RowsPerSecond(ProgressColumn):
    """`12,345 rows/s`, over the last half minute."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "")


@contextlib.contextmanager
def row_progress(name: str, total: int, console: Console | None) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the number of rows that were just done. Shows nothing without a terminal."""
    bar = Progress(
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RowsPerSecond(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None or not console.is_terminal,
        transient=True,
    )
    with contextlib.nullcontext() if bar.disable else drawn_by(lambda _: None), bar:
        task = bar.add_task(name, total=total)
        yield lambda rows: bar.advance(task, rows)
