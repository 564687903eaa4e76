"""Checks of a config made in Python, with the same rules as on the command line."""

from typing import Literal

from framework.errors import Problem, RequestError
from framework.memory.requirements import unmet_requirements
from framework.schema.config import TrainingConfig
from framework.schema.keys import left_open
from framework.schema.rules.every import Needs, find_conflicts


def refuse_impossible(config: TrainingConfig, devices: Literal["one", "any"]) -> None:
    """Raise RequestError with all contradictions between keys.

    `devices` is "one" for a run and "any" for an inspection of one device's share.
    """
    problems = [
        Problem(conflict.keys[0], conflict.message, expected=conflict.expected)
        for conflict in (*find_conflicts(config, Needs()), *unmet_requirements(config, runs_here=devices == "one"))
        if not conflict.is_warning
    ]
    message = "is `auto`, which nothing has decided yet"
    problems += [Problem(key, message, expected="a value, or framework.fit()") for key in left_open(config)]
    if problems:
        raise RequestError(problems)
