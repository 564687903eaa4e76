"""Numbers in sentences."""


def counted(count: int, one: str, more: str | None = None) -> str:
    """A number with what it counts: `1 row`, `2,048 rows`. `more` stands next to all but one, else `one` with an s."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"
