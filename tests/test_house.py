"""The shape of the house: what may import what, and how large a file or a function may grow."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "framework").rglob("*.py"))
MOST_LINES, MOST_FUNCTION_LINES = 400, 60


def code_lines(source: str, node: ast.AST | None = None) -> int:
    """Lines that hold code: no blank lines, comments, docstrings or tables (literals assigned to a constant)."""
    tree = node or ast.parse(source)
    passed_over = {
        line
        for inner in ast.walk(tree)
        for part in _texts_and_tables(inner)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    }
    first = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or source.count("\n") + 1
    lines = source.splitlines()[first - 1 : last]
    kept = [line for number, line in enumerate(lines, first) if number not in passed_over]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in kept)


def _texts_and_tables(node: ast.AST):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        yield node
    is_literal = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Tuple | ast.List | ast.Set)
    if is_literal and all(isinstance(target, ast.Name) and target.id.lstrip("_").isupper() for target in node.targets):
        yield node


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(file):
    source = file.read_text()
    assert code_lines(source) <= MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert code_lines(source, node) < MOST_FUNCTION_LINES, node.name


def test_every_public_thing_says_what_it_is():
    silent = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert not silent


def test_only_the_step_runs_backward_and_the_optimizer():
    """Rule 4: so that the plan and the run cannot disagree."""
    users = {
        str(file.relative_to(ROOT / "framework"))
        for file in FILES
        if any(word in file.read_text() for word in (".backward()", "optimizer.step()"))
    }
    assert users == {"run/step.py"}


def test_the_import_ladder_holds():
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_compose_knows_hydra():
    users = {file.relative_to(ROOT / "framework").parts[0] for file in FILES if _imports(file, {"hydra", "omegaconf"})}
    assert users == {"compose"}


def _imports(file: Path, packages: set[str]) -> bool:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return any(name.split(".")[0] in packages for name in names)


ELSEWHERE = re.compile(
    r"\b(?:SPEED|PLANNER|CONTRACT|DESIGN|HOUSE|CASES|FAULTS)\.md"
    r"|\((?:case )?[A-Z]\d\d(?:, [A-Z]\d\d)*\)|\"\"\"[A-Z]\d\d\b"
)
"""Documents and numbers of cases that a reader of this repository cannot find."""


def test_nothing_refers_to_what_is_not_in_this_repository():
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.py"), *FILES]
    texts += [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}" for file in texts for match in ELSEWHERE.finditer(file.read_text())
    ]
    assert not found
