"""Read-only commands on requests, rows, choices and levers."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.plan import decided
from framework.cli.printing import (
    as_document,
    check_writable,
    exit_code,
    print_columns,
    print_json,
    print_prose,
    print_text,
    print_warnings,
    say,
    stdout,
    written,
)
from framework.errors import Problem, RequestError

if TYPE_CHECKING:
    from framework.memory.levers import Lever
    from framework.run.preview import Preview

KINDS = {"recipes": "", "models": "model", "datasets": "data", "optimizers": "optimizer", "gpus": "gpu"}
"""Kinds of `list` whose name differs from the group's; recipes are not a group."""


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only what needs no torch: types, keys, clashes, card.")
    ] = False,
    as_json: Json = False,
    nproc: Processes = None,
) -> int:
    """Say everything that can be known before weights are loaded, all problems at once.

    All rows are read and tokenised as for training; of a stream the first block.
    """
    from framework.checks import check_request, located

    report = check_request(recipe, overrides or (), nproc)
    problems, warnings, looked_at = report.problems, report.warnings, "keys, values and combinations"
    if report.composition is not None and not quick:
        from framework.run.planning.model_checks import inspect

        found, origins = inspect(report.composition.config), report.composition.origins
        problems, warnings = located(found.problems, origins), (*warnings, *located(found.warnings, origins))
        looked_at += f"; tokenizer, model and {found.rows}"
    if as_json:
        document = {"errors": problems, "warnings": warnings}
        print_json({name: [problem.to_json() for problem in found] for name, found in document.items()})
        return 2 if problems else 0
    print_warnings(warnings)
    if problems:
        raise RequestError(problems)
    print_prose(f"{recipe}: no problems ({looked_at})")
    return 0


def show(
    recipe: Recipe,
    overrides: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="`auto` as the search finds it, precision as it will be.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the composed config as YAML."""
    from framework.compose import compose
    from framework.compose.writing import to_annotated_yaml
    from framework.memory.resolve import with_length, with_precision
    from framework.text import to_yaml

    composition = compose(recipe, overrides or ())
    print_warnings(composition.warnings)
    if resolve:
        from framework.cli.plan import decided

        composition, _ = decided(composition)
    config = with_length(with_precision(composition.config) if resolve else composition.config)
    if as_json:
        origins = {key: asdict(value) for key, value in composition.origins.items()}
        print_json({"recipe": composition.recipe, "config": config.model_dump(mode="json"), "origins": origins})
    elif origin:
        print_text(to_annotated_yaml(config, composition.origins), end="")
    else:
        print_text(to_yaml(config), end="")


def list_choices(
    kind: Annotated[str, typer.Argument(help="recipes, gpus, models, optimizers, datasets, peft or training.")],
    as_json: Json = False,
) -> None:
    """List shipped recipes, or the presets of a group, with what each is for."""
    from framework.compose import shipped

    kinds = KINDS | {group: group for group in shipped.GROUPS}
    if kind not in kinds:
        nearest = shipped.nearest(kind, kinds)
        raise RequestError([Problem("", f"there is nothing of kind {kind!r}", None, ", ".join(kinds), nearest)])
    group = kinds[kind]
    presets = shipped.presets(group, (Path(shipped.PRESETS),)) if group else {}
    files = {name: preset.file for name, preset in presets.items()} if group else shipped.recipes()
    found = {name: shipped.purpose(path) or _fact(path) for name, path in files.items()}
    if as_json:
        print_json({"kind": kind, "choices": [{"name": name, "purpose": text} for name, text in found.items()]})
    elif found:
        print_columns(list(found.items()))
    else:
        say(f"no preset of {kind} is shipped: its keys are written in the recipe")


def _fact(path: Path) -> str:
    """A fact that distinguishes a preset from its siblings."""
    from framework.compose.reading import read

    tree = read(path, path.name, "group", [])
    name = tree.at(("model", "model_name")) if tree else None
    usable = tree.at(("gpu", "usable_bytes")) if tree else None
    is_number = usable is not None and isinstance(usable.value, int | float)
    return str(name.value) if name else f"{usable.value / 2**30:.1f} GiB usable" if usable and is_number else ""


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    import json

    from framework.compose import shipped
    from framework.schema.json_schema import recipe_schema

    print_text(json.dumps(recipe_schema({group: list(shipped.presets(group)) for group in shipped.GROUPS}), indent=1))


def data(
    recipe: Recipe,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows that are shown.")] = 3,
    split: Annotated[str, typer.Option("--split", help="train or eval.")] = "train",
    whole: Annotated[bool, typer.Option("--all", help="Of a stream: read and count a whole epoch.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page that needs nothing else.")] = None,
    as_json: Json = False,
) -> int:
    """Show the rows as the model will see them: supervised tokens, lengths, what is cut, padding. Loads no weights."""
    from framework.checks import TRAIN, check_request, placing

    if split not in ("train", "eval"):
        raise RequestError([Problem("--split", f"there is no split {split!r}", None, "train or eval")])
    report = check_request(recipe, overrides or (), None, TRAIN)
    print_warnings(report.warnings)
    if report.composition is None:
        raise RequestError(report.problems)
    check_writable(html, "--html")
    composition, _ = decided(report.composition)
    from framework.reports.rows import data_page
    from framework.run.preview import preview

    with placing(composition.origins):
        found = preview(composition.config, split, rows, whole)
    missed = written(html, "--html", lambda: data_page(composition.recipe, found))
    if as_json:
        print_json({"recipe": composition.recipe, **found.to_json(), **as_document(missed)})
    else:
        _print_rows(composition.recipe, found)
    return exit_code(missed, 0)


def _print_rows(title: str, found: "Preview") -> None:
    from framework.reports.rows import data_lines, marks_for

    console = stdout()
    is_coloured = console.is_terminal and console.color_system is not None and not console.no_color
    for line in data_lines(title, found, console.width, marks_for(console.encoding, is_coloured)):
        console.print(line)


def levers(
    key: Annotated[str | None, typer.Argument(help="A key such as training.optimizer; all of them without it.")] = None,
    as_json: Json = False,
) -> None:
    """Show what trades memory: each lever's values from free to dear, what it shrinks and what it costs."""
    from framework.memory.levers import LEVERS, format_value

    rows = LEVERS if key is None else (_find_lever(key),)
    if as_json:
        print_json({"levers": [row.to_json() for row in rows]})
    elif key is not None:
        _print_lever(rows[0])
    else:
        head = ("key", "values, from free to dear", "shrinks", "training")
        cells = [head]
        for row in rows:
            changed = ", ".join(format_value(setting.value) for setting in row.settings if setting.changes)
            exactness = f"changed by {changed}" if changed else "exact"
            cells.append((row.key, ", ".join(map(format_value, row.values)), ", ".join(row.shrinks) or "-", exactness))
        print_columns(cells)


def _find_lever(key: str) -> "Lever":
    from framework.compose.shipped import nearest
    from framework.memory.levers import LEVERS, lever
    from framework.schema.keys import every_key, unknown

    try:
        return lever(key)
    except KeyError:
        names = [row.key for row in LEVERS]
        is_key = key in every_key()
        message = f"{key} is not a memory lever" if is_key else unknown(tuple(key.split(".")))[0]
        likely = nearest(key, names) or nearest(key.rpartition(".")[2], names)
        raise RequestError([Problem(key, message, None, "a key of `tunesmith levers`", likely)]) from None


def _print_lever(row: "Lever") -> None:
    from framework.memory.levers import format_value

    print_prose(f"{row.key}\n  {row.line}")
    print_prose(f"  shrinks    {', '.join(row.shrinks) or 'nothing by itself'}\n  read back  {row.reader}")
    print_prose("  settings, from free to dear:")
    for setting in row.settings:
        print_prose(f"    {row.key}={format_value(setting.value)}")
        facts = {
            "time": setting.time,
            "changes": setting.changes or ("" if setting is row.settings[0] else "nothing but rounding"),
            "hardware": setting.hardware,
            "package": setting.package,
            "needs": " ".join(f"{name}={format_value(value)}" for name, value in setting.requires.items()),
        }
        for name, text in facts.items():
            if text:
                print_prose(f"      {name:9s}{text}")
