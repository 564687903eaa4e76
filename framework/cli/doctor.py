"""The verb that describes and measures the machine at hand."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import Json
from framework.cli.printing import print_columns, print_json, print_text
from framework.cli.writing import as_document, check_writable, told, written
from framework.errors import Problem, RequestError


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine's card; the result is a preset for `gpu=FILE`.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", help="File for the preset, a .yaml.")] = None,
    as_json: Json = False,
) -> int:
    """Describe this machine: Python, torch, CUDA, cards and packages."""
    if calibrate:
        return _calibrate(output, as_json)
    if output is not None:
        raise RequestError([Problem("--output", "has no effect without --calibrate")])
    from framework.cli.machine import describe

    facts = describe()
    if as_json:
        print_json(facts)
    else:
        print_columns([(key, str(value)) for key, value in facts.items() if not isinstance(value, dict)])
        print_columns([(f"  {name}", str(version or "not installed")) for name, version in facts["packages"].items()])
    return 0


def _calibrate(output: Path | None, as_json: bool) -> int:
    if output is not None:
        if output.suffix not in (".yaml", ".yml"):
            raise RequestError([Problem("--output", f"{output} is no YAML file", expected="a name that ends in .yaml")])
        check_writable(output, "--output")
    from framework.run.planning.calibrate import calibrate, to_card, to_yaml

    found = calibrate()
    missed = written(output, "--output", lambda: to_yaml(found))
    if as_json:
        print_json({"gpu": to_card(found), **as_document(missed)})
    elif output is not None and not missed:
        print_text(f"wrote {output}; use it as gpu=./{output}" if not output.is_absolute() else f"wrote {output}")
    else:
        print_text(to_yaml(found), end="")
    return told(missed, 0)
