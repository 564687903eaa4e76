"""What narrows an adapter's targets or gives some of them a size of their own: names and regular expressions."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from framework.errors import Problem, RequestError
from framework.schema.peft import PeftParams

_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Targets:
    """Full names of the adapted modules and of the adapted stacked weights, and what of it the user should know."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names of the modules that get a layer of the adapter: of a stacked weight the one that holds it."""
        return (*self.modules, *(name.rpartition(".")[0] for name in self.parameters))


def fits(pattern: str, name: str) -> bool:
    """Whether a name, or a regular expression for its end, means a module, as peft reads its patterns."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def of_pattern(patterns: dict[str, float], name: str, default: float) -> float:
    """The value of the first pattern that fits a target, as peft chooses (`get_pattern_key`)."""
    return next((value for pattern, value in patterns.items() if fits(pattern, name)), default)


def without_excluded(params: PeftParams, targets: Targets) -> Targets:
    """The targets that are in the blocks asked for and not excluded. Raises RequestError where none is left, or a name
    excludes nothing."""
    problems = list(_invalid(params))
    if problems:
        raise RequestError(problems)
    names = [*targets.modules, *targets.parameters]
    for index, pattern in enumerate(params.lora_exclude_modules):
        if not any(fits(pattern, name) for name in names):
            problems.append(_unmatched(f"peft.lora_exclude_modules[{index}]", pattern, names))
    blocks = {_block(name) for name in names}
    for block in params.layers_to_transform or ():
        if block not in blocks:
            last = max((each for each in blocks if each is not None), default=0)
            message = f"no target is in block {block}"
            problems.append(Problem("peft.layers_to_transform", message, expected=f"numbers from 0 to {last}"))
    kept = {name for name in names if _is_kept(params, name)}
    if not kept and not problems:
        keys = "peft.lora_exclude_modules" if params.lora_exclude_modules else "peft.layers_to_transform"
        problems.append(Problem(keys, "no target is left to adapt", expected="fewer exclusions"))
    if problems:
        raise RequestError(problems)
    return replace(
        targets,
        modules=tuple(name for name in targets.modules if name in kept),
        parameters=tuple(name for name in targets.parameters if name in kept),
    )


def check_patterns(params: PeftParams, targets: Targets) -> None:
    """Raises RequestError for a pattern that fits no target, or whose value is none."""
    problems, names = list[Problem](), targets.modules  # peft has no patterns for stacked weights
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, value in getattr(params, key).items():
            where = f"peft.{key}.{pattern}"
            whole = isinstance(value, int) and not isinstance(value, bool)
            number = whole if key == "rank_pattern" else whole or isinstance(value, float)
            if not number or not value > 0:
                expected = "a whole number above 0" if key == "rank_pattern" else "a number above 0"
                problems.append(Problem(where, f"{value!r} is none", expected=expected))
            elif not any(fits(pattern, name) for name in names):
                problems.append(_unmatched(where, pattern, names))
    if problems:
        raise RequestError(problems)


def _is_kept(params: PeftParams, name: str) -> bool:
    if params.layers_to_transform is not None and _block(name) not in params.layers_to_transform:
        return False
    return not any(fits(pattern, name) for pattern in params.lora_exclude_modules)


def _block(name: str) -> int | None:
    """Number of the transformer block that a module is in."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def _invalid(params: PeftParams) -> Iterator[Problem]:
    """Patterns that are no regular expressions."""
    keys = [(f"peft.lora_exclude_modules[{index}]", text) for index, text in enumerate(params.lora_exclude_modules)]
    for name in ("rank_pattern", "alpha_pattern"):
        keys += [(f"peft.{name}.{pattern}", pattern) for pattern in getattr(params, name)]
    for key, pattern in keys:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(key, f"{pattern!r} is no regular expression: {error}")


def _unmatched(key: str, pattern: str, names: Sequence[str]) -> Problem:
    ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
    return Problem(key, f"{pattern!r} fits none of the adapted modules", expected=f"one of {ends}, or an expression")
