"""The verbs that write a recipe: a first one, or that of another tool as ours."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from framework.cli.arguments import override_values
from framework.cli.printing import check_writable, print_problems, print_text, print_warnings, say, written
from framework.errors import Problem, RequestError

ROWS = 3
"""Number of rows to show."""
_TASKS = {
    "text": "pretrain",
    "preference": "preference",
    "unpaired": "preference",
    "labelled": "classification",
}
"""Row format -> task that trains on it; `sft` for all others."""


def init(
    output: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("recipe.yaml"),
    model: Annotated[
        str | None,
        typer.Option("--model", help="A preset, a folder or a hub id.", autocompletion=override_values("model")),
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="A file, a folder or a hub id with the rows.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="The card to plan for; else this machine's.", autocompletion=override_values("gpu")),
    ] = None,
    peft: Annotated[
        str, typer.Option("--peft", help="none, lora, qlora, ..", autocompletion=override_values("peft"))
    ] = "lora",
) -> int:
    """Write a short recipe for your model and data, check it, show rows and plan it. Asks for what is missing."""
    if output.suffix not in (".yaml", ".yml"):
        option, equals, value = output.name.partition("=")
        nearest = f"--{option} {value}" if equals else f"{output}.yaml"
        message = f"{output} is not a YAML file"
        raise RequestError([Problem("OUTPUT", message, None, "a name that ends in .yaml", nearest)])
    if output.exists():
        raise RequestError([Problem("OUTPUT", f"{output} exists", expected="a new file, which is written")])
    check_writable(output, "OUTPUT")
    missing = [option for option, given in (("--model", model), ("--data", data)) if given is None]
    if missing and not sys.stdin.isatty():
        message = "is not given, and there is no terminal to ask at"
        raise RequestError([Problem(option, message) for option in missing])
    chosen = model or str(typer.prompt("Model (a preset, a folder or a hub id)"))
    rows = data or str(typer.prompt("Rows (a file, a folder or a hub id)"))
    if missed := written(output, "OUTPUT", lambda: recipe_text(chosen, rows, peft, _row_format(rows))):
        raise RequestError(missed)
    overrides = [f"gpu={gpu}"] if gpu else []
    try:
        return _shown(output, overrides)
    except RequestError as error:
        print_problems(error.problems)
        say(f"{output} is written; mend this there, then: {_command('check', output, overrides)}")
        return error.exit_code


def recipe_text(model: str, data: str, peft: str, row_format: str) -> str:
    """A recipe for rows of this format, independent of the machine."""
    from framework.compose.shipped import editors_line, presets

    task, loss = _TASKS.get(row_format, "sft"), "kto" if row_format == "unpaired" else "dpo"
    is_preset = model in presets("model")
    groups = [*([f"model: {model}"] if is_preset else []), f"peft: {peft}", "optimizer: adamw_torch_fused"]
    lines = [
        editors_line(),
        "schema_version: 1\n",
        f"defaults: [{', '.join([*groups, 'training: fastest'])}]\n",
        f"training:\n  task: {task}\n",
        f"  preference: {{loss_type: {loss}}}\n  learning_rate: 5e-6\n" if task == "preference" else "",
        "  num_train_epochs: 2\n  global_batch_size: 16\n  lr_scheduler_type: cosine\n  warmup_ratio: 0.03\n",
        "" if is_preset else f"model:\n  model_name: {json.dumps(model)}\n",
        f"data:\n  train: [{{path: {json.dumps(data)}}}]\n  eval_fraction: 0.05\n",
    ]
    return "".join(lines)


def _row_format(data: str) -> str:
    """Row format of a JSON Lines file, from its first row; `messages` for other files, which `check` examines."""
    from framework.build.text.row_formats import KINDS, detect_format
    from framework.schema.tasks import Task

    try:
        with Path(data).expanduser().open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return "messages"
    for task in (Task.PREFERENCE, Task.CLASSIFICATION, Task.SFT):
        found = detect_format(tuple(row), {}, task) if isinstance(row, dict) else None
        if found is not None and found.name in KINDS[task]:
            return str(found.name)
    return "messages"


def _shown(recipe: Path, overrides: list[str]) -> int:
    """Print check, rows, plan and the next command. Returns the exit code."""
    from framework.cli.look import check, data
    from framework.cli.plan import plan

    check(str(recipe), overrides)
    data(str(recipe), overrides, rows=ROWS)
    code = plan(str(recipe), overrides)
    print_text(f"\n{recipe} is written. Next: {_command('train' if code == 0 else 'fit', recipe, overrides)}")
    return code


def _command(verb: str, recipe: Path, overrides: list[str]) -> str:
    return shlex.join(["tunesmith", verb, str(recipe), *overrides])


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A YAML of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt.")
    ],
) -> None:
    """Print another tool's recipe converted to ours; each value that has no equivalent is reported on stderr."""
    from framework.converters import convert as converted

    found = converted(file)
    print_text(found.recipe, end="")
    for row in found.left:
        say(str(row))
    print_warnings(found.warnings)
    say(f"{len(found.carried)} of {found.total} values of {found.tool} are carried")
