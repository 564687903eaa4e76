"""What is left of a failed run: its report, its logs and its plan; or a log alone. No torch."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.errors import Problem, RequestError
from framework.memory.explain.causes import Circumstances, Repair
from framework.memory.explain.messages import read_message

REPORT = "oom.txt"
_LOGS = ("*.log", "*.out", "*.err", "*.txt")
_MOST_CHARACTERS = 64 * 2**20
"""Of a log that is read; the first message is what counts."""


@dataclass(frozen=True)
class Evidence:
    """A text, what the run knew, and the document of its `plan.json` (None without a run)."""

    text: str
    circumstances: Circumstances = field(default_factory=Circumstances)
    plan: Mapping[str, Any] | None = None


def gather(source: Path, run: Path | None = None) -> Evidence:
    """The evidence in a run folder, or in a log file with the plan of `run` or of the folder that it is in.

    Raises RequestError where there is nothing to read.
    """
    if not source.exists():
        raise RequestError([Problem("", f"there is no file or folder {source}")])
    folder = run or (source if source.is_dir() else source.parent)
    text = _text_of(source) if source.is_dir() else read_text(source)
    return Evidence(text, read_circumstances(text), read_plan(folder))


def _text_of(folder: Path) -> str:
    """The run's own report, else the first of its logs that tells of a failure."""
    if (folder / REPORT).exists():
        return read_text(folder / REPORT)
    logs = [file for pattern in _LOGS for file in sorted(folder.glob(pattern))]
    texts = [read_text(file) for file in logs]
    telling = next((text for text in texts if read_message(text) is not None), None)
    if telling is None:
        looked = f"; looked at {', '.join(file.name for file in logs)}" if logs else ""
        message = f"{folder} holds no report of a failure ({REPORT}){looked}"
        raise RequestError([Problem("", message, expected="a log file, or `-` for standard input")])
    return telling


def read_text(file: Path) -> str:
    """The beginning of a text file, whatever bytes are in it. Raises RequestError when it cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace", newline="") as opened:
            return opened.read(_MOST_CHARACTERS)
    except OSError as error:
        raise RequestError([Problem("", f"{file} cannot be read: {error.strerror}")]) from None


def read_standard_input() -> str:
    """The beginning of what comes in, whatever bytes are in it."""
    return sys.stdin.buffer.read(_MOST_CHARACTERS).decode("utf-8", "replace")


def read_plan(folder: Path) -> Mapping[str, Any] | None:
    """The document of a run's `plan.json`; None where there is none that can be read."""
    try:
        document = json.loads((folder / "plan.json").read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(document, dict) and {"phases", "step_peak", "host_bytes"} <= document.keys()
    return document if whole else None


def write_circumstances(circumstances: Circumstances) -> str:
    """The head of `oom.txt`, which `read_circumstances` reads again."""
    facts = {
        "phase": circumstances.phase,
        "step": circumstances.step,
        "micro batch": circumstances.batch and f"{circumstances.batch} tokens",
        "largest before": circumstances.largest_batch and f"{circumstances.largest_batch} tokens",
        "repaired": "; ".join(map(str, circumstances.repairs)) or None,
        "allocated after each step": " ".join(map(str, circumstances.floors)) or None,
    }
    return "".join(f"{name}: {value}\n" for name, value in facts.items() if value is not None)


def read_circumstances(text: str) -> Circumstances:
    """What the head of an `oom.txt` tells; nothing for any other text."""
    head = text[:20_000].partition("\n\n")[0]
    facts = dict(re.findall(r"^([a-z ]+): (.*)$", head, re.MULTILINE))
    if "phase" not in facts and "step" not in facts:
        return Circumstances()

    def number(name: str) -> int | None:
        match = re.match(r"\d+", facts.get(name, ""))
        return int(match.group()) if match else None

    floors = tuple(int(word) for word in facts.get("allocated after each step", "").split() if word.isdecimal())
    repairs = tuple(_read_repairs(facts.get("repaired", "")))
    sizes = number("micro batch"), number("largest before")
    return Circumstances(facts.get("phase"), number("step"), floors, *sizes, repairs)


def _read_repairs(text: str) -> Iterator[Repair]:
    pattern = r"(\S+) (\d+) -> (\d+) \((\w+) of (?:step (\d+)|the longest rows)\)"
    for key, before, after, phase, step in re.findall(pattern, text):
        yield Repair(key, int(before), int(after), int(step or 0), phase)
