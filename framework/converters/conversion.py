"""From a file to our YAML: which tool wrote it, what its tables make of it, and what of that holds here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from framework.compose.reading import read
from framework.converters import axolotl, litgpt, llamafactory, oumi, torchtune
from framework.converters.settle import settle
from framework.converters.source import Source
from framework.converters.translation import Left, Translation
from framework.converters.writing import to_recipe
from framework.errors import Problem, RequestError
from framework.schema.keys import root


@dataclass(frozen=True)
class Conversion:
    """Our YAML, and what of the file is not in it."""

    tool: str
    recipe: str
    left: tuple[Left, ...]
    carried: Mapping[str, tuple[str, ...]]
    """Key of theirs -> the keys of ours that were made of it."""
    total: int
    """Values of the file, lists of scalars as one."""
    cautions: tuple[str, ...] = ()
    """What `tunesmith check` would still say of the recipe."""


@dataclass(frozen=True)
class Tool:
    """A tool, by what its files have."""

    name: str
    is_of: Callable[[Source], bool]
    translate: Callable[[Translation], None]
    sign: str
    """The keys that were looked for, in words."""


TOOLS = (
    Tool(
        "torchtune",
        lambda source: any(key.endswith("_component_") for key in source.leaves),
        torchtune.translate,
        "`_component_` in its parts",
    ),
    Tool("Axolotl", lambda source: source.has("base_model"), axolotl.translate, "`base_model`"),
    Tool(
        "LLaMA-Factory", lambda source: source.has("model_name_or_path"), llamafactory.translate, "`model_name_or_path`"
    ),
    Tool(
        "litgpt",
        lambda source: source.has("train.micro_batch_size") or source.has("train.global_batch_size"),
        litgpt.translate,
        "`train.micro_batch_size` or `train.global_batch_size`",
    ),
    Tool(
        "Oumi",
        lambda source: (
            source.has("model.model_name") and any(map(source.has, ("data.train.datasets", "training.trainer_type")))
        ),
        oumi.translate,
        "`model.model_name` next to `data.train.datasets` or `training.trainer_type`",
    ),
)  # fmt: skip
"""Those whose sign is the plainest come first."""
_OTHER_WORK = {
    "tasks": "an evaluation",
    "generation": "inference",
    "engine": "inference",
    "inference_engine": "inference",
}
"""Sections of Oumi's files that train nothing -> what they are for."""


def convert(path: Path) -> Conversion:
    """The recipe of another tool as one of ours.

    Raises:
        RequestError: for a file that cannot be read or is no mapping, one of no known tool, and one of what is not ours
            (evaluation, rollouts, images and sound).
    """
    problems: list[Problem] = []
    node = read(path, str(path), "recipe", problems)
    if node is None or problems:
        raise RequestError(problems)
    source = Source(node, str(path))
    tool = _tool_of(source)
    translation = Translation(source)
    tool.translate(translation)
    cautions = settle(translation)
    carried: dict[str, tuple[str, ...]] = {}
    for ours, entry in translation.entries.items():
        for key in entry.of:
            carried[key] = (*carried.get(key, ()), ours)
    recipe = to_recipe(translation, tool.name)
    return Conversion(tool.name, recipe, tuple(translation.left), carried, len(source.leaves), cautions)


def _tool_of(source: Source) -> Tool:
    found = next((tool for tool in TOOLS if tool.is_of(source)), None)
    if found is not None:
        return found
    other = next((name for name in _OTHER_WORK if source.has(name)), None)
    if other and source.has("model"):
        raise source.refuse(other, f"this is a file of Oumi for {_OTHER_WORK[other]}, and trains nothing")
    sections = {key.partition(".")[0].partition("[")[0] for key in source.leaves}
    if sections and sections <= {*root().children, "defaults"}:
        message = "this is a recipe of tunesmith already"
        raise RequestError([Problem("", message, source.label, "nothing to convert: `tunesmith check` reads it")])
    looked = "; ".join(f"{tool.name}: {tool.sign}" for tool in TOOLS)
    message = "this is no training file of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt"
    raise RequestError([Problem("", message, source.label, looked)])
