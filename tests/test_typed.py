"""The package ships its types: a type checker sees each public name."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import framework

ROOT = Path(__file__).parents[1]
USER = """
from framework import ModelParams, Optimizer, Problem, TrainingConfig, TrainingParams, check, fit, load, plan, train

config: TrainingConfig = load("recipe.yaml", ["gpu=rtx4090_24gb"])
problems: tuple[Problem, ...] = check(config)
fits: bool = plan(config).fits and fit(config).fits
folder = train(config).folder / "final"
params = TrainingParams(optimizer=Optimizer.LION)
wrong: int = load("recipe.yaml")
config.training.learning_rat
"""


def exported() -> set[str]:
    """Exports of the package for type checkers: names imported as themselves, with a star, or assigned."""
    tree = ast.parse((ROOT / "framework" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    found: set[str] = set()
    for node in block.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names if alias.name == alias.asname}
            is_star = node.names[0].name == "*"
            found |= set(dir(importlib.import_module(str(node.module)))) if is_star else names
    return found


def test_every_public_name_is_exported_with_its_type():
    assert (ROOT / "framework" / "py.typed").read_text() == ""
    assert set(framework.__all__) <= exported()


@pytest.mark.slow
def test_a_users_file_is_checked_strictly(tmp_path):
    """A minute of one core: torch's types are read for those of `train`."""
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 2, done.stdout
    assert 'expression has type "TrainingConfig", variable has type "int"' in errors[0]
    assert '"TrainingParams" has no attribute "learning_rat"' in errors[1]
