"""Arguments and options that several verbs share."""

from typing import Annotated

import typer

from framework.cli.completion import override_words, recipe_words

Recipe = Annotated[
    str,
    typer.Argument(help="A path to a YAML file, or the name of a shipped recipe.", autocompletion=recipe_words),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="group=preset, section.key=value, section.list+=[item], ~section.key",
        show_default=False,
        autocompletion=override_words,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model; a run's config cannot say so."
    ),
]
Processes = Annotated[int | None, typer.Option("--nproc", min=1, help="Number of processes; sets gpu.count.")]
AllowBase = Annotated[
    list[str] | None,
    typer.Option("--allow", help="model.base: the adapter's base may have changed since it was trained."),
]
