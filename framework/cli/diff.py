"""The verb that puts two requests side by side."""

from typing import TYPE_CHECKING, Annotated

import typer

from framework.activity import shown
from framework.cli.arguments import Json, Overrides, Recipe
from framework.cli.plan import checked, planned
from framework.cli.printing import print_columns, print_json, print_text, stdout

if TYPE_CHECKING:
    from framework.compose import Composition
    from framework.compose.differences import Difference
    from framework.run.planning.memory_diff import Comparison


def diff(
    recipe: Recipe,
    other: Recipe,
    overrides: Overrides = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Plan both, and say what each difference costs in device memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the keys in which two recipes differ, with both values and where each came from. Overrides go to both."""
    from framework.compose import compose
    from framework.compose.differences import differences

    take = checked if memory else compose
    a, b = (take(name, overrides or ()) for name in (recipe, other))
    found = differences(a, b)
    compared = _compare(a, b, found) if memory else None
    if as_json:
        print_json({"differences": [difference.to_json() for difference in found], **_document(compared)})
        return
    _print_differences(found)
    if compared is not None:
        from framework.reports.comparison import comparison_lines

        console = stdout()
        for line in comparison_lines(compared, console.width):
            console.print(line)


def _compare(a: "Composition", b: "Composition", found: "list[Difference]") -> "Comparison":
    from framework.run.planning.memory_diff import find_causes
    from framework.run.planning.plan_pool import Rehearsals

    keys = [difference.key for difference in found]
    with shown("planning both"), Rehearsals() as rehearsals:
        plans = planned(a, rehearsals), planned(b, rehearsals)
        return find_causes(a.config, b.config, plans, keys, rehearsals.tried)


def _document(compared: "Comparison | None") -> dict[str, object]:
    if compared is None:
        return {}
    from framework.reports.comparison import comparison_document

    return {"memory": comparison_document(compared)}


def _print_differences(found: "list[Difference]") -> None:
    rows = [
        row
        for difference in found
        for row in (
            (difference.key, "a", str(difference.a), str(difference.origin_a)),
            ("", "b", str(difference.b), str(difference.origin_b)),
        )
    ]
    print_columns(rows)
    if not rows:
        print_text("no key differs")
