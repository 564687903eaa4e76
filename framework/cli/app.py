"""The typer application with all commands."""

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Annotated, Any

import typer

from framework.activity import now
from framework.cli import look, work
from framework.cli.doctor import doctor
from framework.cli.look import data, levers
from framework.cli.plan import diff, fit, plan
from framework.cli.printing import print_text
from framework.cli.recipes import convert, init
from framework.cli.saved import evaluate, explain, export, merge, predict, push, report
from framework.errors import Interrupted
from framework.installation import require_versions

app = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,  # `suggestion` knows more names
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models from YAML, within the memory of your GPU.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_text(version("tunesmith"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    config_dir: Annotated[
        str | None,
        typer.Option("--config-dir", metavar="DIR", help="Folder of presets of your own: gpu/mycard.yaml."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of every command. `main` reads `--debug` and `--config-dir`; here they are for the help text."""


def _with_interrupt(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A command that raises Interrupted for Ctrl-C, which typer would turn into an exit without a message."""

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return verb(*arguments, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    return run


def _with_versions(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A command that first checks the installed versions of torch and its dependents."""

    @wraps(verb)
    def run(*arguments: Any, **options: Any) -> Any:
        if options.get("quick"):
            return verb(*arguments, **options)
        require_versions()
        if verb not in (plan, fit):  # these load no torch themselves
            now("loading torch and transformers")
        return verb(*arguments, **options)

    return run


app.command()(work.train)  # reports by itself what was saved; fewer frames between command and step
_OF_RUNS: tuple[Callable[..., Any], ...] = (merge, predict, evaluate, push, export)
_LOADING: tuple[Callable[..., Any], ...] = (plan, fit, look.check, data, init, *_OF_RUNS, doctor)
_LIGHT: tuple[Callable[..., Any], ...] = (explain, report, look.show, diff, levers, convert)
for _verb in (*map(_with_versions, _LOADING), *_LIGHT):
    app.command()(_with_interrupt(_verb))
app.command("list")(_with_interrupt(look.list_choices))
app.command()(_with_interrupt(look.schema))
