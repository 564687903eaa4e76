"""`merge`: a trained adapter and its base become a plain model."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import AllowBase, Json, Trust
from framework.cli.printing import print_json, print_text, say


def merge(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with an adapter.")],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write; else RUN/merged.")] = None,
    trust_remote_code: Trust = False,
    allow: AllowBase = None,
    as_json: Json = False,
) -> None:
    """Adapter and base into a plain Hugging Face folder."""
    from framework.run.checkpoints.merge import merge_run
    from framework.run.checkpoints.trained_model import code_that_runs

    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    merged = merge_run(run, output, trust_remote_code, allow or ())
    if as_json:
        print_json({"folder": str(merged.folder), "dtype": merged.dtype, "dequantized": merged.dequantized or None})
        return
    if merged.dequantized:
        print_text(f"base        was {merged.dequantized}; dequantised to {merged.dtype} before the adapter was added")
    print_text(f"model       {merged.folder} in {merged.dtype} ({merged.loader}.from_pretrained loads it)")
