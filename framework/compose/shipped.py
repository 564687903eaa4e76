"""The presets and recipes that come with the package, and what each is for."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from framework.shipped import shipped

GROUPS = ("model", "data", "peft", "optimizer", "fsdp", "training", "gpu")
"""The groups of presets, in the order in which those named on the command line apply."""


def presets(group: str) -> dict[str, Path]:
    """Choice -> file, sorted by name."""
    return _yaml_files(shipped("conf") / group)


def recipes() -> dict[str, Path]:
    """Name -> file, sorted by name."""
    return _yaml_files(shipped("recipes"))


def purpose(path: Path) -> str:
    """The comment line that says what a shipped file is for."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    return next((line[2:] for line in lines if not line.startswith(("# yaml-language-server", "# @package"))), "")


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choices most like `word`: those that hold it, else those spelled alike; at most three."""
    choices = list(choices)
    alike = [choice for choice in choices if word and word.lower() in choice.lower()]
    return ", ".join((alike or get_close_matches(word.lower(), choices, 3, 0.5))[:3]) or None


def _yaml_files(path: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(path.glob("*.yaml"))}
