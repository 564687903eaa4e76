"""Docstrings of the running Python's standard library, each labelled with the package it stands in: class labels that
every machine has."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Those that every Python has, with 130 docstrings or more."""
LEAST_CHARACTERS = 20
"""A shorter docstring says nothing of its package."""
LEFT_OUT = ("test", "tests", "__pycache__")

Record = tuple[int, dict[str, Any]]


def standard_docstrings() -> Iterator[tuple[str, Iterator[Record]]]:
    """Per file the docstrings of its functions and classes as `text` and `label`, with the line that each begins at.

    The package's own name is taken out of the text, so that it is not told; a text that occurs twice is given once.
    """
    root, seen = Path(os.__file__).parent, set[str]()
    for file in docstring_files():
        package = file.relative_to(root).parts[0]
        found = {text: line for line, text in _docstrings(file, package) if text not in seen}
        seen.update(found)
        if found:
            rows = [(line, {"text": text, "label": package}) for text, line in found.items()]
            yield file.relative_to(root).as_posix(), iter(rows)


def docstring_files() -> list[Path]:
    """The packages' files, those of each sorted."""
    root = Path(os.__file__).parent
    found = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    return [file for file in found if not set(file.relative_to(root).parts) & set(LEFT_OUT)]


def _docstrings(file: Path, package: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = re.sub(package, "...", inspect.cleandoc(ast.get_docstring(node) or ""), flags=re.IGNORECASE)
            if len(text) >= LEAST_CHARACTERS:
                yield node.lineno, text
