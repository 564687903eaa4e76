"""The verb that makes a recipe of another tool's. It loads no torch."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.printing import print_text, print_warnings, say


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A YAML of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt.")
    ],
) -> None:
    """Print the recipe of another tool as ours; what could not be carried is told on stderr, a line for each value."""
    from framework.converters import convert as converted

    found = converted(file)
    print_text(found.recipe, end="")
    for row in found.left:
        say(str(row))
    print_warnings(found.cautions)
    say(f"{len(found.carried)} of {found.total} values of {found.tool} are carried")
