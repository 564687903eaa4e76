"""Texts on a page: no markup, and nothing that a reader would not see."""

import html

from framework.terminal import visible


def escape(text: str) -> str:
    """The text for HTML, attributes included, with control characters and marks of direction shown."""
    return html.escape(visible(text))
