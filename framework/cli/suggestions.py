"""What was intended by a verb or an option that does not exist; an option is most often a key or a group, which take no
dashes."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise

_TAKE_KEYS = ("train", "plan", "fit", "check", "data", "show", "diff")
"""Verbs that compose a recipe."""
_OTHER_VERBS = {
    "version": "--version",
    "help": "--help",
    "generate": "predict",
    "infer": "predict",
    "upload": "push",
    "publish": "push",
}
"""What other tools call it -> what it is here."""
_RECIPE = ("-c", "--config", "--recipe", "--config-file", "--config_file", "--config-name")
_PRESETS = ("--config-path", "--config_dir", "--configdir")


def meant(message: str, words: Sequence[str], verbs: Iterable[str]) -> str | None:
    """The words to type instead of the unknown verb or option that `message` names; None where nothing is alike."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if "No such command" in message:
        return _OTHER_VERBS.get(verb) or next(iter(get_close_matches(verb, verbs, 1)), None)
    if "No such option" not in message or verb not in _TAKE_KEYS:
        return None
    option = next((word for word in words if word.startswith("-") and word.partition("=")[0] in message.split()), "")
    name, _, value = option.partition("=")
    after = dict(pairwise(words)).get(option, "")
    value = value or ("" if after.startswith("-") else after)
    if name in _RECIPE:
        return f"{value or 'RECIPE'}, which stands first and takes no option"
    if name in _PRESETS:
        return f"--config-dir {value or 'DIR'}, a folder of presets"
    key = _key(name.lstrip("-").replace("-", "_"))
    return f"{key}={value or 'VALUE'}" if key else None


def _key(name: str) -> str | None:
    from framework.compose.shipped import GROUPS
    from framework.schema.keys import unknown

    if name in GROUPS or not name:
        return name or None
    return unknown(tuple(name.split(".")))[1]
