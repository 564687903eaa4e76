"""All verbs, put together."""

from typing import Annotated

import typer

from framework.cli import look, work
from framework.cli.data import data
from framework.cli.diff import diff
from framework.cli.doctor import doctor
from framework.cli.explain import explain
from framework.cli.fit import fit
from framework.cli.levers import levers
from framework.cli.merge import merge
from framework.cli.plan import plan
from framework.cli.predict import predict

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models from YAML, within the memory of your GPU.",
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every verb. `main` reads them; here they are for the help text."""


app.command()(work.train)
app.command()(plan)
app.command()(fit)
app.command()(explain)
app.command()(look.check)
app.command()(data)
app.command()(look.show)
app.command()(diff)
app.command()(levers)
app.command()(merge)
app.command()(predict)
app.command("list")(look.list_choices)
app.command()(look.schema)
app.command()(doctor)
