"""`predict`: what a trained model says of the rows of a file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import AllowBase, Trust
from framework.cli.printing import print_text, say


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model or an adapter.")],
    file: Annotated[str, typer.Argument(help="Rows: a file, a folder or a glob, read as the run read its own.")],
    new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Longest completion: 128, or half of fewer positions."),
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="How likely the answers of the rows are, instead of new ones.")
    ] = False,
    trust_remote_code: Trust = False,
    allow: AllowBase = None,
) -> None:
    """One JSON object a row, in the order of the rows: a class, numbers, a completion, or a score."""
    from framework.run.checkpoints.trained_model import code_that_runs
    from framework.run.predict import Request
    from framework.run.predict import predict as ask

    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    for answer in ask(run, file, Request(new_tokens, score, trust_remote_code, tuple(allow or ()))):
        print_text(json.dumps(answer, ensure_ascii=False))
