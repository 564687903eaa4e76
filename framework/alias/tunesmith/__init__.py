"""`import tunesmith` is `import framework` by the name of the distribution: the same public names, loaded on first use.

What is inside the package is reached as `framework.<module>` alone, so that no module is loaded twice under two names.
A wheel has this folder at its top, and an editable install has the folder around it on the path.
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
