"""The fastest settings that fit a card: which levers may move, where to look, and what each change buys. No torch."""

from framework.memory.search.fastest import Measure
from framework.memory.search.find import find
from framework.memory.search.found import Change, Found, Point
from framework.memory.search.free_keys import freedom, opened

__all__ = ["Change", "Found", "Measure", "Point", "find", "freedom", "opened"]
