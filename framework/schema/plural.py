"""Plural forms in messages."""


def counted(count: int, one: str, more: str | None = None) -> str:
    """A number with its noun: `1 row`, `2,048 rows`. `more` is the plural, by default `one` with an s."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
