"""Tier A checks: everything that can be found from the text of a request alone, all problems at once, each with its key
and place."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from framework.compose import Composition, Origin, draft
from framework.compose.paths import leads_somewhere, looks_local
from framework.errors import Problem, RequestError
from framework.memory.cards import detect
from framework.memory.requirements import missing_trackers, unmet_requirements, workers_over_cores
from framework.paths import path_like
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.every import Needs, find_conflicts

TRAIN = Needs(model=True, data="required")
CHECK = Needs(model=True, data="advised")
PLAN = Needs(model=True, devices="any")


@dataclass(frozen=True)
class Report:
    """Findings of tier A. `composition` is None if there are problems."""

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    composition: Composition | None = None


def check(config: TrainingConfig, needs: Needs = TRAIN) -> tuple[Problem, ...]:
    """Return the warnings about a config. Raises RequestError with all its problems at once."""
    problems, warnings = _findings(config, needs, (), {}, {})
    if problems:
        raise RequestError(problems)
    return tuple(warnings)


def check_request(
    recipe: str | Path, overrides: Sequence[str] = (), world: int | None = None, needs: Needs = CHECK
) -> Report:
    """Compose a request and check it: problems of its text and of its meaning in one report."""
    try:
        request = draft(recipe, overrides, world)
    except RequestError as error:
        return Report(error.problems, ())
    origins = request.origins
    suspect = {*request.invalid, *(problem.key for problem in request.problems)}
    suspect |= {problem.nearest for problem in request.problems if problem.nearest}

    problems, warnings = _findings(request.config, needs, suspect, origins, request.as_written)
    problems, warnings = [*request.problems, *problems], [*request.warnings, *warnings]
    if problems:
        return Report(tuple(problems), tuple(warnings))
    composition = Composition(request.recipe, request.config, origins, tuple(map(str, warnings)))
    return Report((), tuple(warnings), composition)


def located(problems: Iterable[Problem], origins: Mapping[str, Origin]) -> tuple[Problem, ...]:
    """Add to each problem the place where its key was written."""
    return tuple(replace(problem, where=problem.where or place(problem.key, origins)) for problem in problems)


@contextmanager
def placing(origins: Mapping[str, Origin]) -> Iterator[None]:
    """Add to each problem raised within the block the place where its key was written."""
    try:
        yield
    except RequestError as error:
        raise RequestError(located(error.problems, origins)) from None


def place(key: str, origins: Mapping[str, Origin]) -> str | None:
    """Where a key, or something inside it, was written; None if all of it is default."""
    inside = (name for name in origins if name == key or name.startswith((f"{key}.", f"{key}[")))
    return next((origins[name].place for name in inside if origins[name].kind != "default"), None)


def _findings(
    config: TrainingConfig,
    needs: Needs,
    suspect: Iterable[str],
    origins: Mapping[str, Origin],
    as_written: Mapping[str, str],
) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings. Rules that name a suspect key are skipped: its value here is not the intended one."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    for conflict in (*find_conflicts(config, needs), *_unmet_requirements(config, needs)):
        if any(_covers(bad, key) for bad in suspect for key in conflict.keys):
            continue
        places = {key: where for key in conflict.keys if (where := place(key, origins))}
        key = next(iter(places), conflict.keys[0])
        others = [f"{other} at {where}" for other, where in places.items() if other != key]
        message = conflict.message + (f" ({', '.join(others)})" if others else "")
        found = Problem(key, message, places.get(key), conflict.expected)
        (warnings if conflict.is_warning else problems).append(found)
    problems += _missing_files(config, origins, as_written) if needs.data == "required" else []
    return problems, warnings


def _unmet_requirements(config: TrainingConfig, needs: Needs) -> Iterator[Conflict]:
    """Requirements that card or machine do not meet. Packages are needed on the machine that trains; when a request is
    only inspected for another machine's card, a missing package is a warning."""
    of_card = set(unmet_requirements(config, runs_here=False))
    found = list(of_card)
    if needs.devices == "one":
        found = [*unmet_requirements(config, runs_here=True), *missing_trackers(config)]
    is_elsewhere = needs.data != "required" and set(found) != of_card and config.gpu.name not in ("cpu", detect())
    for conflict in found:
        yield replace(conflict, is_warning=True) if is_elsewhere and conflict not in of_card else conflict
    if needs.devices == "one" and (needs.data == "required" or config.gpu.name in ("cpu", detect())):
        yield from workers_over_cores(config)


def _covers(bad: str, key: str) -> bool:
    """Whether a problem with `bad` makes `key` doubtful: the key itself, or a section or item around it."""
    return not bad or key == bad or key.startswith((f"{bad}.", f"{bad}["))


def _missing_files(
    config: TrainingConfig, origins: Mapping[str, Origin], as_written: Mapping[str, str]
) -> list[Problem]:
    """Paths on this machine that do not exist."""
    model = config.model
    paths = {"model.model_name": model.model_name, "model.tokenizer_name": model.tokenizer_name}
    for name, sources in (("train", config.data.train), ("eval", config.data.eval)):
        paths |= {f"data.{name}[{index}].path": source.path for index, source in enumerate(sources)}
    return [
        Problem(
            key,
            f"no such file or folder: {as_written.get(key, path)} ({Path(path).expanduser().absolute()})",
            place(key, origins),
            nearest=path_like(as_written.get(key, path)),
        )
        for key, path in paths.items()
        if path and looks_local(path) and not leads_somewhere(path)
    ]
