"""Tier B of `check`: what only the tokenizer, the model's shape and the rows can tell. Loads no weights."""

from collections.abc import Callable
from typing import TypeVar

from framework.build.assembly import assemble
from framework.build.model import settle
from framework.build.place import rehearsal_place
from framework.errors import Problem, RequestError
from framework.run.inputs import read_rows_for, read_tokenizer
from framework.schema.config import TrainingConfig

T = TypeVar("T")


def inspect(config: TrainingConfig) -> tuple[Problem, ...]:
    """Every problem that building the model without storage, its tokenizer and its rows bring to light."""
    problems = list[Problem]()

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except RequestError as error:
            problems.extend(error.problems)
            return None

    settled = attempt(lambda: settle(config))
    if settled is not None:
        config, architecture = settled
        place = rehearsal_place("cpu" if config.gpu.name == "cpu" else "cuda")
        attempt(lambda: assemble(config, architecture, place, total_steps=1))
        if config.data.train:
            tokenizer = attempt(lambda: read_tokenizer(config, architecture))
            if tokenizer is not None:
                attempt(lambda: read_rows_for(config, architecture, tokenizer))
    return tuple(dict.fromkeys(problems))
