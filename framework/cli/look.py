"""The verbs that look at requests, choices and the machine, and change nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import Json, Overrides, Processes, Recipe
from framework.cli.printing import print_columns, print_json, print_text, print_warnings
from framework.errors import Problem, RequestError

KINDS = {"recipes": "", "models": "model", "datasets": "data", "optimizers": "optimizer", "gpus": "gpu"}
"""What `list` calls a group by another name than its own; the recipes are no group."""


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
    print_text(f"{recipe}: no problems ({looked_at})")
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
    kind: Annotated[str, typer.Argument(help="recipes, gpus, models, optimizers, datasets, peft, fsdp or training.")],
    as_json: Json = False,
) -> None:
    """List shipped recipes, or the presets of a group, with what each is for."""
    from framework.compose import shipped

    kinds = KINDS | {group: group for group in shipped.GROUPS}
    if kind not in kinds:
        nearest = shipped.nearest(kind, kinds)
        raise RequestError([Problem("", f"there is nothing of kind {kind!r}", None, ", ".join(kinds), nearest)])
    folders = (Path(shipped.PRESETS),)
    presets = shipped.presets(kinds[kind], folders) if kinds[kind] else {}
    files = {name: preset.file for name, preset in presets.items()} or shipped.recipes()
    found = {name: shipped.purpose(path) or _fact(path) for name, path in files.items()}
    if as_json:
        print_json({"kind": kind, "choices": [{"name": name, "purpose": text} for name, text in found.items()]})
    else:
        print_columns(list(found.items()))


def _fact(path: Path) -> str:
    """What tells a preset of facts from its siblings."""
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
