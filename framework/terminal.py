"""Escaping of control characters in every text that is printed, written as YAML or put on a page.

Names, rows, logs and messages of libraries come from other people's files and may contain codes that move the cursor,
write to the clipboard or reverse the order of characters.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# C0 except tab and line feed, DEL, C1; marks, embeddings, overrides and isolates of direction; line and paragraph
# separators; lone surrogates, which occur in file names that are not valid text.
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")
_BAR = re.compile(r"\r|(?:\n|\x1b\[A)+\Z")
"""Codes with which tqdm's bars return to the line's start, and move to another line."""


BEFORE_OUTPUT: list[Callable[[], None]] = []
"""Called before anything is written to stdout or stderr, to remove a temporary last line of the terminal."""


def visible(text: str) -> str:
    """Write every control character of the text as `\\u001b`. Line ends and tabs are kept.

    JSON keeps its meaning, and so does YAML if texts with such characters are in double quotes.
    """
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def on_one_line(text: str) -> str:
    """As `visible`, with line ends as `\\n`, so that a name cannot pass for a line of output."""
    return visible(text).replace("\n", "\\n")


class VisibleStream:
    """A text stream that escapes control characters, except colors and progress bars of libraries on a terminal.

    rich writes to the stream directly: `framework.console.TerminalConsole` has already made its text visible.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Write the text with control characters made visible. Returns its length."""
        for give_way in BEFORE_OUTPUT:
            give_way()
        stream = self.rich_proxied_file
        if OBEYED.search(text):
            stream.write(_on_terminal(text) if stream.isatty() else visible(text))
        else:
            stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)


@contextmanager
def visible_streams() -> Iterator[None]:
    """Make everything visible that is written to stdout and stderr within the block."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = VisibleStream(sys.stdout), VisibleStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _on_terminal(text: str) -> str:
    begun = _BAR.match(text)
    head = begun[0] if begun else ""
    parts = _COLOR.split(text[len(head) :])
    return head + "".join(part if index % 2 else visible(part) for index, part in enumerate(parts))
