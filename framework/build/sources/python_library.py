"""Built-in sources of rows: the source files of Python's standard library, and docstrings labelled with their
package."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""Packages of every Python version with at least 130 docstrings."""
LEAST_CHARACTERS = 20
"""Minimum length of a docstring that identifies its package."""
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
"""Folders of the standard library without library source."""

Record = tuple[int, dict[str, Any]]


def standard_library() -> Iterator[tuple[str, Iterator[Record]]]:
    """Source files of the running Python's library, one row each, by relative path, sorted.

    Tests, caches and installed packages are left out, and files that are not UTF-8.
    """
    root = Path(os.__file__).parent
    for path in library_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield path.relative_to(root).as_posix(), iter([(1, {"text": text})])


def library_files() -> list[Path]:
    """Source files of the library, sorted."""
    root = Path(os.__file__).parent
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT  # never enters site-packages, which may be enormous
        found.extend(Path(folder, file) for file in files if file.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root))


def standard_docstrings() -> Iterator[tuple[str, Iterator[Record]]]:
    """Docstrings of functions and classes, by file, as `text` and `label` with their line numbers.

    The package's name is removed from the text, since it is the label; duplicate texts are left out.
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
    """The files of PACKAGES, sorted."""
    root = Path(os.__file__).parent
    return [file for file in library_files() if file.relative_to(root).parts[0] in PACKAGES]


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
