"""Search for the fastest settings that fit a card: free levers, candidates, and the gain of each change. No torch."""

from framework.memory.search.fastest import Measure
from framework.memory.search.find import find
from framework.memory.search.found import Change, Found, Point
from framework.memory.search.free_keys import freedom, opened

__all__ = ["Change", "Found", "Measure", "Point", "find", "freedom", "opened"]
