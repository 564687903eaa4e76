"""`model.freeze_layers`: which parameters are not trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from framework.errors import Problem, RequestError


@dataclass(frozen=True)
class Frozen:
    """What one pattern of `model.freeze_layers` matched."""

    pattern: str
    parameters: int
    bytes: int


def matches(pattern: str, name: str) -> bool:
    """Whether the dotted `pattern` stands, segment by segment, somewhere in the dotted `name`.

    `layers.1` matches `model.layers.1.mlp.weight` and not `model.layers.10.mlp.weight`; each segment may be a glob.
    """
    wanted, given = pattern.split("."), name.split(".")
    starts = range(len(given) - len(wanted) + 1)
    return any(all(map(fnmatchcase, given[start:], wanted)) for start in starts)


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[Frozen, ...]:
    """Switch off the gradients of every parameter that a pattern matches.

    Raises RequestError naming each pattern that matches nothing, or when nothing is left to train.
    """
    found, problems = [], []
    parameters = dict(model.named_parameters())
    for index, pattern in enumerate(patterns):
        hits = [parameter for name, parameter in parameters.items() if matches(pattern, name)]
        if not hits:
            problems.append(_no_match(f"model.freeze_layers[{index}]", pattern, model))
        for parameter in hits:
            parameter.requires_grad_(False)
        size = sum(hit.numel() * hit.element_size() for hit in hits)
        found.append(Frozen(pattern, sum(hit.numel() for hit in hits), size))
    if patterns and not problems and not any(parameter.requires_grad for parameter in parameters.values()):
        problems.append(Problem("model.freeze_layers", "freezes every parameter: nothing is left to train"))
    if problems:
        raise RequestError(problems)
    return tuple(found)


def _no_match(key: str, pattern: str, model: nn.Module) -> Problem:
    names = [name for name, _ in model.named_modules() if name]
    tails = {".".join(name.split(".")[-len(pattern.split(".")) :]) for name in names}
    near = get_close_matches(pattern, sorted(tails), 3, cutoff=0.4)
    return Problem(
        key, f"{pattern!r} matches no module of this model", nearest=", ".join(near) or None, expected="a module name"
    )
