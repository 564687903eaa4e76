"""What was meant by an option that no verb has: most often a key or a group, which take no dashes."""

from collections.abc import Sequence
from itertools import pairwise

_TAKE_KEYS = ("train", "plan", "fit", "check", "data", "show", "diff")
"""Verbs that compose a recipe."""
_RECIPE = ("-c", "--config", "--recipe", "--config-file", "--config_file")


def meant(message: str, words: Sequence[str]) -> str | None:
    """The words to type instead of the unknown option that `message` names; None where nothing is alike."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if "No such option" not in message or verb not in _TAKE_KEYS:
        return None
    option = next((word for word in words if word.startswith("-") and word.partition("=")[0] in message.split()), "")
    name, _, value = option.partition("=")
    after = dict(pairwise(words)).get(option, "")
    value = value or ("" if after.startswith("-") else after)
    if name in _RECIPE:
        return f"{value or 'RECIPE'}, which stands first and takes no option"
    key = _key(name.lstrip("-").replace("-", "_"))
    return f"{key}={value or 'VALUE'}" if key else None


def _key(name: str) -> str | None:
    from framework.compose.shipped import GROUPS
    from framework.schema.keys import unknown

    if name in GROUPS or not name:
        return name or None
    return unknown(tuple(name.split(".")))[1]
