"""Keys that do nothing because of another key, by what their definitions say."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from framework.schema.config import TrainingConfig
from framework.schema.keys import Path, dotted, every_key, uses_of, value_of, values, written_keys
from framework.schema.rules.conflict import Conflict


def unused_key_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Keys that were written and do nothing: other than by default, or in so many words while their cause is nowhere
    written, so that whoever wrote them thinks they are in effect."""
    defaults = _defaults()
    changed = {_key(path) for path, value in values(config) if path not in defaults or value != defaults[path]}
    written = dict.fromkeys(written_keys(config))
    for key in dict.fromkeys((*written, *sorted(changed))):
        unmet = [use for use in uses_of(key) if use.key != key and not use.fits(value_of(config, use.key))]
        use = next((use for use in unmet if use.refused), unmet[0] if unmet else None)
        if use is None:
            continue
        if key in changed or (use.key not in written and not use.refused):
            message = f"has no effect: {use.reason(value_of(config, use.key))}"
            fitting = f"unset, or {use.key}: true" if use.values == (True,) else "unset"
            yield Conflict((key, use.key), message, fitting if use.refused else None, is_warning=not use.refused)


def _key(path: Path) -> str:
    """The key around a value: a list or a mapping with keys of the user's own stands for what it holds."""
    names = [dotted(path[: end + 1]) for end in range(len(path))]
    return next(name for name in reversed(names) if name in every_key())


@cache
def _defaults() -> Mapping[Path, Any]:
    return dict(values(TrainingConfig()))
