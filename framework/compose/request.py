"""Composition of a recipe, presets and overrides into one typed config with the origin of every value.

Hydra parses the command line, OmegaConf resolves references, pydantic types the result. This module adds origins,
checks of what may be written, and the collection of all problems.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path as File
from typing import Any

from framework.compose import interpolation
from framework.compose.layers import Layer, gather, highest, list_warnings
from framework.compose.origins import DEFAULT, Origin, leaves, node_of
from framework.compose.overrides import COMMAND_LINE, parse
from framework.compose.own_adapter import with_own_adapter
from framework.compose.own_config import with_own_configs
from framework.compose.paths import made_absolute
from framework.compose.recipe_files import find_recipe
from framework.compose.trained_folders import refuse_trust_of_runs, without_trust
from framework.compose.validation import shown, validate
from framework.errors import Problem, RequestError
from framework.memory.cards import detect
from framework.schema.config import TrainingConfig
from framework.schema.keys import Path, dotted, up_to_list, values
from framework.schema.plural import counted
from framework.schema.rules.data import rows_of_global_batch


@dataclass(frozen=True)
class Draft:
    """A composed request with its problems. `config` has the valid keys, `invalid` names the others."""

    recipe: str
    config: TrainingConfig
    origins: Mapping[str, Origin]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    invalid: frozenset[str]
    as_written: Mapping[str, str]
    """Dotted key -> written relative path, for absolute paths in `config`."""


@dataclass(frozen=True)
class Composition:
    """A request whose keys and values are each valid."""

    recipe: str
    """Name of the shipped recipe, or the file's name without its ending."""
    config: TrainingConfig
    origins: Mapping[str, Origin]
    """Dotted key (`data.train[0].path`) -> origin. Lists are included as a whole and item by item."""
    warnings: tuple[str, ...] = ()


def compose(recipe: str | File, overrides: Sequence[str] = (), world: int | None = None) -> Composition:
    """The typed config of a recipe under overrides.

    Args:
        recipe: a path, or the name of a shipped recipe.
        overrides: as on the command line: `group=preset`, `a.b=c`, `a.b+=[c]`, `~a.b`.
        world: number of processes, if given; must agree with a written `gpu.count`.

    Raises:
        RequestError: with every unknown key, bad value and unreadable file at once.
    """
    request = draft(recipe, overrides, world)
    if request.problems:
        raise RequestError(request.problems)
    return Composition(request.recipe, request.config, request.origins, tuple(map(str, request.warnings)))


def load(recipe: str | File, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Compose the config of a recipe (a path or a shipped name) with overrides as on the command line (`gpu=cpu`,
    `a.b=c`).

    Raises RequestError with every unknown key, bad value and unreadable file at once.
    """
    return compose(recipe, overrides).config


def load_of_run(file: File) -> TrainingConfig:
    """The config written by a run, for callers that decide themselves about remote code.

    Raises RequestError as `compose` does.
    """
    request = draft(file, trusts_runs=True)
    if request.problems:
        raise RequestError(request.problems)
    return request.config


def draft(
    recipe: str | File, overrides: Sequence[str] = (), world: int | None = None, trusts_runs: bool = False
) -> Draft:
    """`compose` with problems returned instead of raised. Raises RequestError only if the recipe cannot be read.

    Unless `trusts_runs`, permission to run a model's own code is a problem if it comes from a run's file.
    """
    problems: list[Problem] = []
    found = find_recipe(recipe)
    parsed = parse(overrides, problems)
    warnings = [*([found.renamed] if found.renamed else []), *parsed.replaced]
    layers = gather(found, parsed, detect, problems, warnings)
    layers = _with_world(layers, world)
    if not trusts_runs:  # a run's config is complete
        layers = with_own_adapter(layers, problems, warnings)
    layers = _allowed(layers, problems)
    warnings.extend(list_warnings(layers))
    layers = with_own_configs(layers, warnings)
    merged: dict[str, Any] = reduce(interpolation.over, (layer.tree.plain() for layer in layers), {})
    written = _resolved(merged, layers, problems)
    absolute = made_absolute(written)
    as_written = _changes(written, absolute)
    place = partial(_place, layers)
    config, invalid = validate(absolute, place, problems)
    if world not in (None, config.gpu.count) and "gpu.count" not in invalid:
        started = counted(int(world or 0), "process is", "processes are")
        message = f"{counted(config.gpu.count, 'card is', 'cards are')} written, but {started} started"
        problems.append(Problem("gpu.count", message, place(("gpu", "count")), str(world)))
    origins = {dotted(path): _origin(layers, path) for path, _ in values(config)}
    empty = {dotted(path): node for layer in layers for path, node in leaves(layer.tree) if node.mapping == {}}
    origins |= {key: node.origin for key, node in empty.items() if "." in key}  # such as `tokenizer: {}`
    if not _is_referred_to(layers, MICRO_BATCH):
        config, derived = with_derived(config, origins)
        origins |= derived
    if not trusts_runs and (refused := refuse_trust_of_runs(config, found.file, origins)):
        config, problems = without_trust(config), [*problems, *refused]
    problems = [_with_current_value(problem, config) for problem in problems]
    return Draft(found.name, config, origins, tuple(problems), tuple(warnings), invalid, as_written)


def _with_current_value(problem: Problem, config: TrainingConfig) -> Problem:
    """The problem of a misspelled override, with the current value of the intended key."""
    current = {dotted(path): value for path, value in values(config)} if problem.where == COMMAND_LINE else {}
    if problem.nearest not in current:
        return problem
    return replace(problem, message=f"{problem.message}; {problem.nearest} is now {shown(current[problem.nearest])}")


def _with_world(layers: list[Layer], world: int | None) -> list[Layer]:
    """The layers with the given number of processes as the number of cards, if none is written."""
    if world is None or highest(layers, ("gpu", "count")):
        return layers
    origin = Origin("command line", f"--nproc {world}")
    return [*layers, Layer(len(layers), node_of({"gpu": {"count": world}}, origin))]


def _allowed(layers: Sequence[Layer], problems: list[Problem]) -> list[Layer]:
    """The layers without invalid references and placeholders."""
    room = interpolation.MAX_TEXT
    allowed: list[Layer] = []
    for layer in layers:
        tree = layer.tree
        for path, node in leaves(layer.tree):
            if message := interpolation.fault(node.value, room):
                problems.append(Problem(dotted(path), message, node.origin.place))
                tree = tree.without(up_to_list(path))
            if isinstance(node.value, str) and "${" in node.value:
                room -= min(room, len(node.value))
        allowed.append(replace(layer, tree=tree))
    return allowed


def _resolved(merged: dict[str, Any], layers: Sequence[Layer], problems: list[Problem]) -> dict[str, Any]:
    """The merged values with references resolved; a bad reference becomes a problem and its key is left out."""
    tree = node_of(merged, DEFAULT)
    texts = [(path, node.value) for path, node in leaves(tree) if isinstance(node.value, str) and "${" in node.value]
    if not texts:
        return merged
    defaults = TrainingConfig().model_dump()
    whole = interpolation.over(defaults, merged)
    known: dict[str, int] = {}
    for path, text in texts:
        try:
            if interpolation.growth(text, whole, known) > interpolation.MAX_RESULT:
                raise ValueError(f"grows to more than {interpolation.MAX_RESULT} characters")
        except ValueError as error:
            problems.append(Problem(dotted(path), str(error), _place(layers, path)))
            tree = tree.without(up_to_list(path))
    return interpolation.resolve(interpolation.over(defaults, tree.plain()), tree.plain())


def _is_referred_to(layers: Sequence[Layer], key: str) -> bool:
    """Whether any value refers to the key, and so has used its default."""
    name = key.rpartition(".")[2]
    texts = [node.value for layer in layers for _, node in leaves(layer.tree) if isinstance(node.value, str)]
    return any("${" in text and name in text for text in texts)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> previous value, for each changed text."""
    new = dict(leaves(node_of(after, DEFAULT)))
    pairs = ((path, node.value) for path, node in leaves(node_of(before, DEFAULT)))
    return {dotted(path): value for path, value in pairs if isinstance(value, str) and new[path].value != value}


def _origin(layers: Sequence[Layer], path: Path) -> Origin:
    """Origin of the value at `path`."""
    found = highest(layers, path)
    return found.origin if found else DEFAULT


def _place(layers: Sequence[Layer], path: Path) -> str | None:
    """Location of the value at `path`, or of the innermost written value around it."""
    found = next((found for end in range(len(path), 0, -1) if (found := highest(layers, path[:end]))), None)
    return found.origin.place if found else None


MICRO_BATCH = "training.per_device_train_batch_size"


def with_derived(config: TrainingConfig, origins: Mapping[str, Origin]) -> tuple[TrainingConfig, dict[str, Origin]]:
    """The config with rows per device derived from a written global batch if they are not written, and the changed
    origins. A batch that does not divide is left unchanged, for a rule to refuse."""
    training = config.training
    accumulation, rows = training.gradient_accumulation_steps, training.per_device_train_batch_size
    if origins[MICRO_BATCH].kind != "default" or accumulation == "auto" or rows == "auto":
        return config, {}
    found = rows_of_global_batch(config, accumulation, rows)
    if found is None or found == rows:
        return config, {}
    training = training.model_copy(update={MICRO_BATCH.removeprefix("training."): found})
    return config.model_copy(update={"training": training}), {MICRO_BATCH: Origin("default", "of the global batch")}
