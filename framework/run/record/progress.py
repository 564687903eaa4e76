"""Progress of a run on stderr: a bar on a terminal, one line every `logging_steps` elsewhere."""

import contextlib
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from framework.activity import drawn_by, now
from framework.console import TerminalConsole

MIB = 2**20


class ProgressLine:
    """Loss, learning rate, tokens per second and memory of the latest step."""

    def __init__(self, total: int, done: int, every: int, quiet: bool = False) -> None:
        self.console = TerminalConsole(stderr=True, quiet=quiet)
        self.total, self.every = total, every
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._task: TaskID = self._bar.add_task("", total=total, completed=done)
        self._shows = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not self._bar.disable:
            self._shows.enter_context(drawn_by(lambda text: self._bar.update(self._task, description=text)))
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError), self._shows:
            self._bar.stop()

    def step(self, step: int, loss: float, rate: float, tokens_per_second: float, memory: int) -> None:
        """Show one optimizer step."""
        now("")
        text = f"loss {loss:.4f}  lr {rate:.2e}  {tokens_per_second:,.0f} tok/s  {memory / MIB:,.0f} MiB"
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.total):
            self.say(f"step {step}/{self.total}  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar. A closed terminal or pipe does not end the run."""
        with contextlib.suppress(OSError):
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
