"""Choices that are spelled like a word."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def alike(word: str, choices: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """At most `most` choices spelled like `word`, those most alike first, equal ones in their order.

    A choice of several parts is also compared by its first ones, so that all of `adamw_torch`, `adamw_8bit`, ... are as
    near to `adamww`.
    """
    matcher = SequenceMatcher(b=word)
    scores = dict[str, float]()
    for choice in choices:
        ends = [place for place, letter in enumerate(choice) if letter == "_" and place]
        scores[choice] = 0.0
        for end in (*ends, len(choice)):
            matcher.set_seq1(choice[:end])
            scores[choice] = max(scores[choice], matcher.ratio())
    near = [choice for choice, score in scores.items() if score >= cutoff]
    return sorted(near, key=lambda choice: -scores[choice])[:most]
