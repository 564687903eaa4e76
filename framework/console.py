"""The rich console for all output: styles apply, control characters and markup in texts do not."""

import re
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from framework.terminal import BEFORE_OUTPUT, OBEYED, visible


def folded(text: Text, width: int) -> Text:
    """Wrap the text to `width` cells, between words, with the first line's indent. A longer word, such as a path, is
    kept whole so that it can be copied, and so is a `tunesmith` command."""
    lines = list[Text]()
    for line in text.split("\n", allow_blank=True):
        plain, ends, used = line.plain, list[int](), 0
        if plain.lstrip().startswith("tunesmith "):
            lines.append(line)
            continue
        indent = len(plain) - len(plain.lstrip(" "))
        for word in re.finditer(r"\S+ *", plain):
            cells, trailing = cell_len(word[0].rstrip()), len(word[0]) - len(word[0].rstrip())
            used = used or word.start()
            if used + cells > width and used > indent:
                ends.append(word.start())
                used = indent
            used += cells + trailing
        for number, part in enumerate(line.divide(ends)):
            part.rstrip()
            lines.append(Text(" " * indent) + part if number else part)
    return Text("\n").join(lines)


class TerminalConsole(Console):
    """A console that shows control characters in texts instead of letting the terminal act on them."""

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print after removing a line that would be overwritten."""
        for give_way in BEFORE_OUTPUT:
            give_way()
        if self.is_terminal and self.soft_wrap and all(isinstance(each, str | Text) for each in arguments):
            texts = (self.render_str(each) if isinstance(each, str) else each for each in arguments)
            arguments = (folded(Text(" ").join(texts), self.width),)
        super().print(*arguments, **options)

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        """Treat markup as text; rich would drop some of its characters."""
        return super().render_str(visible(text), *arguments, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments with control characters made visible."""
        for segment in super().render(renderable, options):
            is_safe = segment.control or not OBEYED.search(segment.text)
            yield segment if is_safe else Segment(visible(segment.text), segment.style)
