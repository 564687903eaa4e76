"""`import tunesmith`: `import framework` under the name of the distribution, with the same public names, loaded lazily.

Modules inside the package are available only as `framework.<module>`, so that none is loaded under two names. A wheel
has this folder at its top level; an editable install has its parent on the path.
"""

from typing import TYPE_CHECKING, Any

import framework

if TYPE_CHECKING:
    from framework import *  # noqa: F403
    from framework import __version__ as __version__

__all__ = framework.__all__


def __getattr__(name: str) -> Any:
    if name not in (*framework.__all__, "__version__"):
        raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
    return getattr(framework, name)


def __dir__() -> list[str]:
    return [*globals(), *framework.__all__]
