"""The layers of a request, low to high: the detected card, suggestions of presets, the recipe's presets, its body,
presets and keys of the command line.

Each holds only known keys; values that a higher layer replaces are removed from lower ones.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path as File

from framework.compose import shipped
from framework.compose.origins import Node, Origin, leaves, node_of
from framework.compose.overrides import Choice, ParsedOverrides
from framework.compose.paths import exists
from framework.compose.reading import MAX_PROBLEMS, read
from framework.compose.recipe_files import YAML_SUFFIXES, RecipeFile, chosen_presets, file_like
from framework.compose.validation import shown
from framework.errors import Problem, RequestError
from framework.memory.cards import card_of_size, size_meant, smallest
from framework.schema.keys import Key, Path, dotted, key_at, keys_next_to, root, unknown
from framework.schema.plural import counted

ALTERNATIVES: tuple[tuple[Path, Path], ...] = (
    (("training", "gradient_accumulation_steps"), ("training", "global_batch_size")),
    (("training", "global_batch_size"), ("training", "gradient_accumulation_steps")),
)
"""Writing the first in a higher layer drops the second from lower ones, since both set the same."""
ARCHITECTURE: Path = ("model", "architecture")
NAME: Path = ("gpu", "name")
SUGGESTED: Path = ("unless_written",)
"""Section of a preset with values for keys that nothing else writes."""


@dataclass(frozen=True)
class Layer:
    """One source of written values. Layers of equal rank do not drop values from each other."""

    rank: int
    tree: Node


def gather(
    recipe: RecipeFile,
    overrides: ParsedOverrides,
    detect: Callable[[], str | None],
    problems: list[Problem],
    warnings: list[Problem],
) -> list[Layer]:
    """All layers of a request. Unknown keys become problems and are left out.

    Raises RequestError with the problems so far if the recipe itself cannot be read.
    """
    body = read(recipe.file, recipe.label, "recipe", problems)
    if body is None:
        raise RequestError(problems)
    choices = chosen_presets(recipe, body, problems)
    body = body.without(("defaults",))
    preset = partial(_preset, folders=(*recipe.folders, *overrides.folders), problems=problems, warnings=warnings)
    above = {group: overrides.choices[group] for group in shipped.GROUPS if group in overrides.choices}
    below = {group: choice for group, choice in choices.items() if group not in above}
    trees = [*starmap(preset, below.items()), body, *starmap(preset, above.items())]
    ranked = [*_suggested(trees, body, problems), *enumerate(trees, 1)]
    layers = [Layer(rank, _known(tree, root(), (), problems)) for rank, tree in ranked if tree is not None]
    written = [write.node for write in overrides.writes if write.path == NAME and write.node is not None]
    name = written[-1] if written else highest(layers, NAME)
    chosen = (choices | above).get("gpu")
    if name is not None and (chosen is None or written):
        layers = [*_named_card(name, layers, chosen, preset, problems), *layers]
    elif name is None and chosen is None:
        detected = preset("gpu", Choice((detect() or "cpu",), Origin("default")))
        layers.insert(0, Layer(0, detected or node_of({}, Origin("default"))))
    return settle(layers, overrides, problems)


def _suggested(trees: list[Node | None], body: Node, problems: list[Problem]) -> Iterator[tuple[int, Node]]:
    """The suggestions of presets, removed from their trees; at rank 0, which `~key` on the command line does not
    drop."""
    for index, tree in enumerate(trees):
        if tree is None or tree is body or (found := tree.at(SUGGESTED)) is None:
            continue
        trees[index] = tree.without(SUGGESTED)
        if found.mapping is not None:
            yield 0, found
        elif found.value is not None:
            problems.append(Problem(dotted(SUGGESTED), "is not a mapping of sections", found.origin.place))


def settle(layers: list[Layer], overrides: ParsedOverrides, problems: list[Problem]) -> list[Layer]:
    """Resolve appended lists, apply the command line's keys, and drop values that a higher layer replaces."""
    settled: list[Layer] = []
    for layer in layers:
        settled.append(replace(layer, tree=_appended(layer.tree, root(), (), settled, problems)))
        settled = _replaced(settled)
    for write in overrides.writes:
        if write.node is None:
            settled = [
                replace(layer, tree=layer.tree.without(write.path)) if layer.rank else layer for layer in settled
            ]
            continue
        tree = _placed(write.path, write.node, settled, problems)
        tree = _known(tree, root(), (), problems)
        settled.append(Layer(len(layers) + 1, _appended(tree, root(), (), settled, problems)))
        settled = _replaced(settled)
    return settled


def highest(layers: Sequence[Layer], path: Path) -> Node | None:
    """The value of `path` in the topmost layer that writes it."""
    return next((node for layer in reversed(layers) if (node := layer.tree.at(path)) is not None), None)


def list_warnings(layers: Sequence[Layer]) -> Iterator[Problem]:
    """A warning for each preset's list that replaces a non-empty list."""
    for index, layer in enumerate(layers):
        for path, node in leaves(layer.tree):
            lower = highest(layers[:index], path)
            is_list = (
                node.origin.kind == "group" and node.sequence is not None and getattr(key_at(path), "is_list", False)
            )
            if is_list and lower and lower.sequence and node.plain()[: len(lower.sequence)] != lower.plain():
                message = f"replaces the list {lower.plain()} written at {lower.origin.place}"
                yield Problem(dotted(path), message, node.origin.place, "`{append: [..]}` to keep both")


def _preset(
    group: str,
    choice: Choice | None,
    folders: Sequence[File],
    problems: list[Problem],
    warnings: list[Problem],
) -> Node | None:
    """The tree of a chosen preset. Several names are different cards: the smallest one's facts, and their number."""
    if choice is None:
        return None
    known = shipped.presets(group, folders)
    if choice.is_optional and not set(choice.names) <= set(known):
        message = f"there is no preset {', '.join(choice.names)}; it is optional, so none is used"
        warnings.append(Problem(group, message, choice.origin.place))
        return None
    trees = [_one_preset(group, name, choice.origin, known, problems) for name in choice.names]
    for name in choice.names:
        if name in known and known[name].hides:
            warnings.append(Problem(group, f"{known[name].label} is used instead of the shipped preset of that name"))
    if len(trees) == 1 or None in trees:
        return trees[0]
    if group != "gpu":
        problems.append(Problem(group, "takes one preset, not a list", choice.origin.place))
        return None
    try:
        facts = smallest([tree.plain().get("gpu") or {} for tree in trees if tree is not None])
    except ValueError as error:
        problems.append(Problem(group, str(error), choice.origin.place))
        return None
    return node_of({"gpu": facts}, replace(choice.origin, kind="group"))


def _one_preset(
    group: str, name: str, origin: Origin, known: Mapping[str, shipped.Preset], problems: list[Problem]
) -> Node | None:
    path = File(os.path.expanduser(name))
    is_path = path.suffix in YAML_SUFFIXES
    if name in known or (is_path and exists(name)):
        file, label = (known[name].file, known[name].label) if name in known else (path, name)
        tree = read(file, label, "group", problems)
        if tree and "defaults" in (tree.mapping or {}):
            problems.append(Problem("defaults", "only a recipe has `defaults:`, a preset does not", f"{label}:1"))
        card = tree.at(("gpu",)) if tree and group == "gpu" else None
        if tree and card and card.mapping and "name" not in card.mapping:  # else it would be the CPU
            tree = tree.replaced(NAME, Node(name if name in known else path.stem, Origin("group", label)))
        return tree.without(("defaults",)).without(("nvidia_smi",)) if tree else None
    facts = card_of_size(name) if group == "gpu" and not is_path else None
    if facts is not None:
        return node_of({"gpu": facts}, Origin("group", f"gpu={name}"))
    message = f"no such file: {name} ({path.absolute()})" if is_path else f"no preset is called {name!r}"
    sizes = ", a size such as 24gb" if group == "gpu" else ""
    shipped_ones = f"one of: {', '.join(known)}{sizes}, or " if known else ""
    expected = f"{shipped_ones}the path of a YAML file"
    near = file_like(name) if is_path else size_meant(name) if group == "gpu" else None
    nearest = near or shipped.nearest(path.stem if is_path else name, known)
    problems.append(Problem(group, message, origin.place, expected, nearest))
    return None


def _named_card(
    name: Node,
    layers: Sequence[Layer],
    chosen: Choice | None,
    preset: Callable[[str, Choice], Node | None],
    problems: list[Problem],
) -> list[Layer]:
    """Facts of the card named by `gpu.name` if no preset was chosen. A card of the user's own needs facts in addition
    to its name; a name without facts, or of another card than the chosen one, is a problem."""
    if not isinstance(name.value, str):
        return []  # refused by the schema
    word, place = name.value, name.origin.place
    is_known = word in shipped.presets("gpu") or card_of_size(word) is not None
    if chosen is not None and (is_known and word not in chosen.names):
        message = f"differs from gpu={','.join(chosen.names)}, whose facts the plan uses"
        problems.append(Problem(dotted(NAME), message, place, f"gpu={word}"))
        return []
    if is_known and chosen is None:
        tree = preset("gpu", Choice((word,), Origin("group", f"gpu={word}")))
        return [Layer(0, tree)] if tree is not None else []
    facts = {key for layer in layers for key in (layer.tree.at(("gpu",)) or name).mapping or {}}
    if chosen is None and not facts - {"name", "count"}:
        message = f"no card is called {word!r}, and no facts of it are given"
        nearest = size_meant(word) or shipped.nearest(word, shipped.presets("gpu"))
        expected = "a card of `tunesmith list gpus`, or its usable_bytes and capability in addition"
        problems.append(Problem(dotted(NAME), message, place, expected, nearest))
    return []


def _known(node: Node, key: Key, path: Path, problems: list[Problem]) -> Node:
    """The tree without unknown keys, each of which becomes a problem."""
    node = _sets_as_list(node) if path == ("data", "eval") else node
    if key.is_list and node.sequence is not None and key.children:
        return Node(
            [_known(item, replace(key, is_list=False), (*path, i), problems) for i, item in enumerate(node.sequence)],
            node.origin,
        )
    if key.is_list and node.mapping is not None and node.at(("append",)) is not None:
        appended = _known(node.mapping["append"], key, path, problems)
        return Node({**node.mapping, "append": appended}, node.origin)
    if not key.children or key.is_list or node.mapping is None:
        return node
    inside: dict[str, Node] = {}
    for name, child in node.mapping.items():
        here, below = (*path, name), key.children.get(name)
        if below is None:
            if len(problems) <= MAX_PROBLEMS:
                problems.append(_unknown(here, child.origin))
        elif child.value is None and not path:
            continue  # an empty section writes nothing
        elif below.children and not below.is_list and child.mapping is None and child.value is not None:
            is_preset = not path and name in shipped.GROUPS and child.value in [*shipped.presets(name)]
            nearest = f"defaults: [{{{name}: {child.value}}}]" if is_preset else None
            message = f"cannot be {shown(child.plain())}"
            problems.append(Problem(dotted(here), message, child.origin.place, below.expected, nearest))
        else:
            inside[name] = _known(child, below, here, problems)
    return Node(inside, node.origin)


def _unknown(path: Path, origin: Origin) -> Problem:
    message, nearest = unknown(path)
    if path == ("hydra",):
        message = "Hydra's own settings cannot be set"
    return Problem(dotted(path), message, origin.place, None if nearest else keys_next_to(path), nearest)


def _appended(node: Node, key: Key, path: Path, lower: Sequence[Layer], problems: list[Problem]) -> Node:
    """The tree with `{append: [..]}` resolved: the items of lower layers, then these."""
    if key.is_list and node.mapping is not None:
        extra = node.mapping.get("append")
        if extra is None or extra.sequence is None or len(node.mapping) > 1:
            expected = "a list, or `{append: [..]}` alone"
            problems.append(Problem(dotted(path), "is a mapping", node.origin.place, expected))
            return Node([], node.origin)
        base = highest(lower, path)
        return Node([*((base and base.sequence) or ()), *extra.sequence], node.origin)
    if not key.children or node.mapping is None:
        return node
    inside = {
        name: _appended(child, key.children[name], (*path, name), lower, problems)
        for name, child in node.mapping.items()
    }
    return Node(inside, node.origin)


def _replaced(layers: list[Layer]) -> list[Layer]:
    """The layers without values that the last one replaces."""
    *lower, top = layers
    whole = [ARCHITECTURE] if top.tree.at((*ARCHITECTURE, "model_type")) else []  # if complete
    twice = [other for key, other in ALTERNATIVES if (node := top.tree.at(key)) and node.value is not None]
    changed = []
    for layer in lower:
        gone = whole + (twice if layer.rank < top.rank else []) + list(_unlike(layer.tree, top.tree, ()))
        tree = layer.tree
        for path in gone:
            tree = tree.without(path)
        changed.append(replace(layer, tree=tree))
    return [*changed, top]


def _unlike(low: Node, high: Node, path: Path) -> Iterator[Path]:
    """Paths where only one of the trees has a mapping or list, so that the higher replaces the lower."""
    if low.mapping is not None and high.mapping is not None:
        for name in low.mapping.keys() & high.mapping.keys():
            yield from _unlike(low.mapping[name], high.mapping[name], (*path, name))
    elif (low.mapping is None, low.sequence is None) != (high.mapping is None, high.sequence is None):
        yield path


def _placed(path: Path, node: Node, layers: Sequence[Layer], problems: list[Problem]) -> Node:
    """A tree with `node` at `path`. An index changes one item of the lower layers' list."""
    index = next((position for position, part in enumerate(path) if isinstance(part, int)), None)
    empty = Node({}, node.origin)
    if index is None:
        return empty.replaced(path, node)
    found = highest(layers, path[:index])
    length = len(found.sequence) if found and found.sequence else 0
    if found is None or int(path[index]) >= length:
        message = f"the list has {counted(length, 'item')}, so none with index {path[index]}"
        problems.append(Problem(dotted(path), message, node.origin.place, f"`{dotted(path[:index])}+=[..]` to append"))
        return empty
    return empty.replaced(path[:index], found.replaced(path[index:], node))


def _sets_as_list(node: Node) -> Node:
    """`data.eval` as a list of sources with set names, if it is a mapping of names to lists; anything else
    unchanged."""
    sets = node.mapping or {}
    if not sets or any(own.sequence is None for own in sets.values()) or "append" in sets:
        return node
    sources = []
    for name, own in sets.items():
        for source in own.sequence or ():
            inside = source.mapping
            named = None if inside is None else {**inside, "eval_set": Node(name, source.origin)}
            sources.append(source if named is None else Node(named, source.origin))
    return Node(sources, node.origin)
