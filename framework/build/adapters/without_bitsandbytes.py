"""Import of peft without bitsandbytes, which peft would import for every adapter if installed: seconds for nothing
unless the base is quantized."""

import contextlib
import sys
from collections.abc import Iterator

from transformers.utils import import_utils


@contextlib.contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Within the block peft considers bitsandbytes not installed, unless it is already imported."""
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    try:
        _forget_what_is_installed()
        yield
    finally:
        sys.modules.pop("bitsandbytes", None)
        _forget_what_is_installed()


def _forget_what_is_installed() -> None:
    """Clear the cached answers of peft and transformers."""
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available

    is_bnb_available.cache_clear()
    is_bnb_4bit_available.cache_clear()
    import_utils.is_bitsandbytes_available.cache_clear()
