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


@pytest.fixture(scope="module")
def trees():
    """The syntax of each file; not kept longer, since it is half a million objects."""
    return {file: ast.parse(file.read_text()) for file in FILES}


def code_lines(source: str, nodes: list[ast.AST]) -> list[int]:
    """Numbers of lines that hold code: no blank lines, comments, docstrings or tables (literals assigned to a
    constant)."""
    passed_over = {
        line
        for inner in nodes
        for part in _texts_and_tables(inner)
        for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)
    }
    lines = [line.strip() for line in source.splitlines()]
    return [
        number
        for number, line in enumerate(lines, 1)
        if line and not line.startswith("#") and number not in passed_over
    ]


def _texts_and_tables(node: ast.AST):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        yield node
    is_literal = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Tuple | ast.List | ast.Set)
    if is_literal and all(isinstance(target, ast.Name) and target.id.lstrip("_").isupper() for target in node.targets):
        yield node


def test_files_and_functions_stay_small(trees):
    assert {"trainer.py", "step.py"} <= {file.name for file in FILES}
    large = []
    for file, tree in trees.items():
        nodes = list(ast.walk(tree))
        lines = code_lines(file.read_text(), nodes)
        if len(lines) > MOST_LINES:
            large.append(f"{file.relative_to(ROOT)}: {len(lines)} lines")
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                held = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
                if held >= MOST_FUNCTION_LINES:
                    large.append(f"{file.relative_to(ROOT)}: {node.name} has {held} lines")
    assert not large


def test_every_public_thing_says_what_it_is(trees):
    silent = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file, tree in trees.items()
        for node in tree.body
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


@pytest.mark.slow
def test_the_import_ladder_holds():
    """`make check` asks for it too, which the quick suite follows."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_compose_knows_hydra(trees):
    hydra = {"hydra", "omegaconf"}
    users = {file.relative_to(ROOT / "framework").parts[0] for file, tree in trees.items() if _imports(tree, hydra)}
    assert users == {"compose"}


def _imports(tree: ast.Module, packages: set[str]) -> bool:
    names = []
    for node in ast.walk(tree):
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


NAMED = re.compile(r"(?<![\w/.-])(?:framework|tests|benchmarks)/[a-z0-9_/]+\.(?:py|json|yaml|md)\b")


def test_files_that_are_named_are_there():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml")]
    texts = [*pages, *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.py"), *FILES]
    named = [(file, match[0]) for file in texts for match in NAMED.finditer(file.read_text())]
    assert len(named) > 100
    assert not [f"{file.relative_to(ROOT)}: {name}" for file, name in named if not (ROOT / name).exists()]


def test_the_page_of_where_things_are_names_what_is_there():
    """In a row a name without a folder is next to the path before it."""
    rows = [line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if line.startswith("| ")]
    found, folder = [], ROOT
    for name in (
        name for row in rows for name in re.findall(r"`([\w./]+(?:/|\.py|\.yaml))`", row.rpartition(" | ")[2])
    ):
        file = ROOT / name if "/" in name else folder / name
        folder = file if file.is_dir() else file.parent
        found.append((name, file.exists()))
    assert len(found) > 60
    assert not [name for name, is_there in found if not is_there]
