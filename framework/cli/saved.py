"""Commands on runs and trained models. Modules that load torch are imported when a command runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from framework.activity import shown
from framework.cli.arguments import AllowBase, Json, Trust
from framework.cli.printing import check_writable, print_json, print_prose, print_text, print_warnings, say, written
from framework.errors import Problem, RequestError
from framework.memory.units import size


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
    from framework.run.checkpoints.saved_model import code_that_runs
    from framework.run.predict import Request
    from framework.run.predict import predict as ask

    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    for answer in ask(run, file, Request(new_tokens, score, trust_remote_code, tuple(allow or ()))):
        print_text(json.dumps(answer, ensure_ascii=False))


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model or an adapter.")],
    file: Annotated[str | None, typer.Argument(help="Rows; else those that the run held out.")] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Tasks of lm-eval, with commas between.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rows of each of these tasks; else all.")] = None,
    trust_remote_code: Trust = False,
    allow: AllowBase = None,
    as_json: Json = False,
) -> None:
    """Loss and metrics on the run's held-out rows or on a file, or the figures of lm-eval's tasks."""
    from framework.errors import Problem, RequestError
    from framework.run.checkpoints.saved_model import code_that_runs
    from framework.run.evaluate_saved import evaluate_saved, evaluate_tasks

    if tasks is not None and file is not None:
        raise RequestError([Problem("FILE", "tasks of lm-eval have rows of their own", expected="one of the two")])
    if tasks is None and limit is not None:
        raise RequestError([Problem("--limit", "is for --tasks", expected="leave it out")])
    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = evaluate_tasks(run, names, limit, trust_remote_code, allow or ())
        if as_json:
            print_json({"tasks": found})
            return
        for task, figures in found.items():
            for name, value in figures.items():
                print_text(f"{task}  {name}  {value:.4f}" if isinstance(value, float) else f"{task}  {name}  {value}")
        return
    made = evaluate_saved(run, file, trust_remote_code, allow or ())
    if as_json:
        print_json({"metrics": made.metrics, "rows": made.rows, made.unit.replace(" ", "_"): made.terms})
        return
    for name, value in made.metrics.items():
        print_text(f"{name:<20}{value:.4f}")
    print_text(f"{'over':<20}{made.rows:,} rows, {made.terms:,} {made.unit}")


def merge(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with an adapter.")],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write; else RUN/merged.")] = None,
    trust_remote_code: Trust = False,
    allow: AllowBase = None,
    as_json: Json = False,
) -> None:
    """Adapter and base into a plain Hugging Face folder."""
    from framework.run.checkpoints.merge import merge_run
    from framework.run.checkpoints.saved_model import code_that_runs

    for line in code_that_runs(run) if trust_remote_code else ():
        say(line)
    merged = merge_run(run, output, trust_remote_code, allow or ())
    if as_json:
        print_json({"folder": str(merged.folder), "dtype": merged.dtype, "dequantized": merged.dequantized or None})
        return
    if merged.dequantized:
        print_text(f"base        was {merged.dequantized}; dequantised to {merged.dtype} before the adapter was added")
    print_text(f"model       {merged.folder} in {merged.dtype} ({merged.loader}.from_pretrained loads it)")


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a folder with a model.")],
    gguf: Annotated[str, typer.Option("--gguf", metavar="f16|q8_0", help="The type of its matrices.")],
    output: Annotated[Path | None, typer.Option("--output", help="The file; else RUN/gguf/RUN-TYPE.gguf.")] = None,
    as_json: Json = False,
) -> None:
    """One GGUF file for llama.cpp and Ollama, and a Modelfile next to it."""
    from framework.run.gguf import chosen_kind, export_gguf

    made = export_gguf(run, chosen_kind(gguf), output)
    if as_json:
        document = {
            "file": str(made.file),
            "modelfile": str(made.modelfile),
            "bytes": made.bytes,
            "tensors": made.kinds,
        }
        print_json(document)
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.kinds.items())
    print_text(f"gguf        {made.file} ({size(made.bytes)}: {kinds} tensors, read back)")
    print_text(f"ollama      cd {made.modelfile.parent} && ollama create NAME -f Modelfile")


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


def explain(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, a log file, or - for standard input.")],
    run: Annotated[Path | None, typer.Option("--run", help="The folder of the run that a log is of.")] = None,
    as_json: Json = False,
) -> None:
    """Say why memory ran out and where, with the arithmetic, and what to change. Exit 2: no failure of a known kind."""
    from framework.memory.explain import explain_evidence
    from framework.memory.explain.evidence import Evidence, gather, plan_of, read_standard_input
    from framework.memory.explain.text import explanation_lines

    if source == "-":
        plan = plan_of(run) if run else None
        evidence = Evidence(read_standard_input(), plan=plan)
    else:
        evidence = gather(Path(source), run)
    explanation = explain_evidence(evidence)
    if explanation.lacks_savings:
        from framework.run.planning.what_if import savings_of_run

        folder = run or (Path(source) if Path(source).is_dir() else Path(source).parent)
        with shown("rehearsing what each setting would save"):
            found = savings_of_run(folder)
        explanation = explain_evidence(replace(evidence, plan=found)) if found is not None else explanation
    print_warnings([evidence.unread] if evidence.unread else [])
    if as_json:
        print_json(explanation.to_json())
    else:
        print_prose("\n".join(explanation_lines(explanation)))


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option("--output", help="Where to write; else RUN/report.html.")] = None,
) -> None:
    """Write a run as one HTML page that needs nothing else: plan next to measured, loss, memory. Prints its path."""
    print_text(str(write_report(run, output)))


def write_report(run: Path, output: Path | None) -> Path:
    """Write the page of a run and return its path. Raises RequestError for a folder without a run, and if it cannot be
    written."""
    from framework.reports.run_files import read_run
    from framework.reports.run_page import run_page
    from framework.run.record.run_folder import PAGE

    check_writable(output, "--output")
    page, file = run_page(read_run(run)), output or run / PAGE
    if output is None and file.is_symlink():
        problem = Problem("RUN", f"{file} is a link to {file.readlink()}", expected="a file, or --output FILE")
        raise RequestError([problem])
    check_writable(file, "--output")
    if missed := written(file, "--output", lambda: page):
        raise RequestError(missed)
    return file
