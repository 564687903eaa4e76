"""The rich console that everything of ours is printed on: styles are obeyed, and no text is."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from framework.terminal import BEFORE_OUTPUT, OBEYED, visible


class TerminalConsole(Console):
    """A console that shows the characters in texts which a terminal would obey."""

    def print(self, *arguments: Any, **options: Any) -> None:
        """Print below nothing that is written over."""
        for give_way in BEFORE_OUTPUT:
            give_way()
        super().print(*arguments, **options)

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        """Markup as text; rich would drop some of the characters."""
        return super().render_str(visible(text), *arguments, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of what is printed, their texts visible."""
        for segment in super().render(renderable, options):
            is_safe = segment.control or not OBEYED.search(segment.text)
            yield segment if is_safe else Segment(visible(segment.text), segment.style)
