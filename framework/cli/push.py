"""`push`: a trained model goes to a hub."""

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import Json
from framework.cli.printing import print_json, print_text
from framework.memory.units import size


def push(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model or an adapter.")],
    repository: Annotated[str, typer.Argument(help="owner/name on the hub; made when it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Make it public; else it is private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="The hub's address; else HF_ENDPOINT.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Model or adapter, tokenizer and model card to a Hugging Face hub, private by default."""
    from framework.run.publish import push as send

    pushed = send(run, repository, public=public, dry_run=dry_run, endpoint=endpoint)
    if as_json:
        files = [{"name": name, "bytes": count} for name, count in pushed.files]
        reported = {"url": pushed.url, "private": pushed.is_private, "sent": pushed.is_sent, "files": files}
        print_json({"folder": str(pushed.folder), **reported})
        return
    for name, count in pushed.files:
        print_text(f"file        {name} ({size(count)})")
    kind = "private" if pushed.is_private else "public"
    done = "sent to" if pushed.is_sent else "nothing sent; it would go to"
    print_text(f"{done} {pushed.url}, {kind}, {size(pushed.bytes)} of {pushed.folder}")
