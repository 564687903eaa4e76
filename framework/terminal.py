"""What a terminal would obey rather than show, shown: in every text that is printed, written as YAML or put on a page.

Names, rows, logs and messages of libraries come from files of others, and may hold codes that move the cursor, write
the clipboard or turn the order of characters.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# C0 but tab and line feed, DEL, C1; marks, embeddings, overrides and isolates of direction; separators of lines and
# paragraphs; halves of surrogate pairs, which names of files that are no text have.
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")
_BAR = re.compile(r"\r|(?:\n|\x1b\[A)+\Z")
"""How tqdm's bars begin a line again, and go to another."""


BEFORE_OUTPUT: list[Callable[[], None]] = []
"""Called before anything is written to stdout or stderr: what stands on the terminal's last line gives way."""


def visible(text: str) -> str:
    """The text with every character that a terminal obeys as `\\u001b`. Line ends and tabs stay.

    JSON, and YAML whose texts with such characters are in double quotes, mean the same afterwards.
    """
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def on_one_line(text: str) -> str:
    """As `visible`, with line ends as `\\n`: a name must not look like a line of ours."""
    return visible(text).replace("\n", "\\n")


class VisibleStream:
    """A stream of texts that shows what would be obeyed, colors and progress bars of libraries on a terminal excepted.

    rich writes to the stream itself: `framework.console.TerminalConsole` has made its text visible.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        """Write the text, made visible; its length."""
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
    """Within the block, what is written to stdout and stderr is visible."""
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
