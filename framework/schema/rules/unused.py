"""Keys that do nothing because of another key, by what their definitions say."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from framework.schema.config import TrainingConfig
from framework.schema.keys import Path, dotted, uses_of, value_of, values, written_keys
from framework.schema.rules.conflict import Conflict


def idle_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Keys that were written and do nothing: other than by default, or in so many words while their cause is nowhere
    written, so that whoever wrote them thinks they are in effect."""
    defaults = _defaults()
    changed = {dotted(path) for path, value in values(config) if path not in defaults or value != defaults[path]}
    written = dict.fromkeys(written_keys(config))
    for key in dict.fromkeys((*written, *sorted(changed))):
        unmet = (use for use in uses_of(key) if use.key != key and not use.fits(value_of(config, use.key)))
        use = next(unmet, None)
        if use is None or "[" in key:
            continue
        if key in changed or (use.key not in written and not use.refused):
            message = f"has no effect: {use.reason(value_of(config, use.key))}"
            yield Conflict((key, use.key), message, "unset" if use.refused else None, is_warning=not use.refused)


@cache
def _defaults() -> Mapping[Path, Any]:
    return dict(values(TrainingConfig()))
