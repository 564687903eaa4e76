"""`export`: a trained model in a format of others."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import Json
from framework.cli.printing import print_json, print_text
from framework.memory.units import size


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model.")],
    gguf: Annotated[str, typer.Option("--gguf", metavar="f16|q8_0", help="The type of its matrices.")],
    output: Annotated[Path | None, typer.Option("--output", help="The file; else RUN/gguf/RUN-TYPE.gguf.")] = None,
    as_json: Json = False,
) -> None:
    """One GGUF file for llama.cpp and Ollama, and a Modelfile next to it."""
    from framework.run.gguf_files.export import chosen_kind, export_gguf

    made = export_gguf(run, chosen_kind(gguf), output)
    if as_json:
        told = {"file": str(made.file), "modelfile": str(made.modelfile), "bytes": made.bytes, "tensors": made.kinds}
        print_json(told)
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.kinds.items())
    print_text(f"gguf        {made.file} ({size(made.bytes)}: {kinds} tensors, read back)")
    print_text(f"ollama      cd {made.modelfile.parent} && ollama create NAME -f Modelfile")
