"""Rows that every machine has: sources of the running Python's standard library, and its docstrings labelled with the
package that they stand in."""

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
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})
"""Folders of the standard library's folder that hold no library source."""

Record = tuple[int, dict[str, Any]]


def standard_library() -> Iterator[tuple[str, Iterator[Record]]]:
    """The running Python's library sources, a file a row, by path below its folder; sorted, so always in one order.

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
    """The library's files, sorted."""
    root = Path(os.__file__).parent
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - LEFT_OUT  # never enters site-packages, which may be enormous
        found.extend(Path(folder, file) for file in files if file.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root))


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
