"""Evidence of a failure: report, logs and plan of a run folder, or only a log. No torch."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from framework.errors import Problem, RequestError
from framework.memory.explain.causes import Circumstances, Repair
from framework.memory.explain.messages import read_message, weight
from framework.paths import open_regular, path_like, read_regular

PLAN = "plan.json"
Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Bytes; savings may be negative."""


class _Saved(BaseModel):
    """A mapping in a file, of which only the keys needed for an explanation are validated."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class SavedPhase(_Saved):
    """Allocated bytes at the peak of a phase, by purpose."""

    name: str
    allocated_bytes: Count
    terms: dict[str, Count] = {}


class SavedPeak(_Saved):
    """The phase of maximum use."""

    phase: str


class SavedLever(_Saved):
    """A change to paste, and its savings in bytes by phase (None: not known yet)."""

    key: str
    override: str
    costs: str
    exact: bool
    saves: dict[str, Count] | None


class SavedPlan(_Saved):
    """The plan of a run, with the savings of each lever (None: not computed)."""

    phases: list[SavedPhase]
    step_peak: SavedPeak
    host_bytes: Count
    levers: list[SavedLever] | None = None

    def phase(self, name: str | None) -> SavedPhase | None:
        """The phase of that name, if the plan has it."""
        return next((phase for phase in self.phases if phase.name == name), None)


def read_plan(folder: Path) -> tuple[SavedPlan | None, str]:
    """The plan of a run folder, or None and the reason."""
    try:
        return SavedPlan.model_validate_json(read_regular(folder / PLAN, "replace")), ""
    except OSError as error:
        return None, str(error.strerror) if (folder / PLAN).exists() else ""
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return None, f"{where}: {first['msg']}" if where else str(first["msg"])


REPORT, STOPPED = "oom.txt", "stopped.txt"
"""Reports that a run writes when memory ran out, and when a value was not finite."""
EARLIER = "-step-????????*"
"""Suffix of these reports' stems after the run was resumed."""
_LOGS = ("*.log", "*.out", "*.err", "*.txt", "error*.json")
_NO_LOGS = ("checkpoints", "final")
"""Folders of a run with weights and vocabularies, but without logs."""
_WHOLE = "[0-9]{1,18}"
"""A number as a run writes it; longer ones are damaged."""
_MOST_BYTES = 64 * 2**20
"""Bytes read of a long log: from its beginning, since the first message counts, or from its end."""


@dataclass(frozen=True)
class Evidence:
    """A text, the circumstances of the run, and its plan (None without a run). `unread` is why a plan is not used."""

    text: str
    circumstances: Circumstances = field(default_factory=Circumstances)
    plan: SavedPlan | None = None
    unread: str = ""


def gather(source: Path, run: Path | None = None) -> Evidence:
    """Gather the evidence in a run folder, or in a log file with the plan of `run` or of the log's folder.

    Raises RequestError if there is nothing to read.
    """
    if not source.exists():
        raise RequestError([Problem("", f"there is no file or folder {source}", nearest=path_like(source))])
    folder = source if source.is_dir() else source.parent
    plan, reason = (plan_of(run), "") if run else read_plan(folder)
    text = _text_of(source) if source.is_dir() else read_text(source)
    unread = f"{folder / PLAN} cannot be read ({reason}): the savings of each change are not known"
    return Evidence(text, read_circumstances(text), plan, unread if reason else "")


def _text_of(folder: Path) -> str:
    """The run's newest report, else the log that tells most about a failure, including logs in folders of ranks."""
    reports = [file for name in (REPORT, STOPPED) if (file := folder / name).exists()]
    if reports:
        return read_text(max(reports, key=lambda file: file.stat().st_mtime))
    earlier = earlier_reports(folder)
    found_here = (file for pattern in _LOGS for file in sorted(folder.rglob(pattern)))
    logs = [
        file
        for file in found_here
        if file not in earlier and file.is_file() and not {*file.relative_to(folder).parts} & {*_NO_LOGS}
    ]
    texts = [read_text(file) for file in logs]
    telling = [(weight(found[0]), text) for text in texts if (found := read_message(text)) is not None]
    if not telling:
        looked = f"; looked at {', '.join(str(file.relative_to(folder)) for file in logs)}" if logs else ""
        message = f"{folder} holds no report of a failure ({REPORT}){looked}"
        if earlier:
            message += f"; the run has continued since it stopped: {', '.join(file.name for file in earlier)}"
        nearest = str(earlier[-1]) if earlier else None
        raise RequestError([Problem("", message, expected="a log file, or `-` for standard input", nearest=nearest)])
    return min(telling, key=lambda pair: pair[0])[1]


def earlier_reports(folder: Path) -> list[Path]:
    """Reports of earlier stops after which the run continued, in the order of their steps."""
    found = (file for name in (REPORT, STOPPED) for file in folder.glob(f"{Path(name).stem}{EARLIER}.txt"))
    return sorted(found, key=lambda file: file.stem.partition("-")[2])


def read_text(file: Path) -> str:
    """Read a text file with arbitrary bytes; of a very long one its beginning, or its end if only that has a message.

    Raises RequestError if it cannot be read.
    """
    try:
        with open_regular(file) as opened:
            first = opened.read(_MOST_BYTES)
            text = _decoded(first)
            if len(first) < _MOST_BYTES or read_message(text) is not None:
                return text
            opened.seek(-min(_MOST_BYTES, file.stat().st_size - _MOST_BYTES), 2)
            return _decoded(first[:2] + opened.read())
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        raise RequestError([Problem("", message, expected="a log file, or `-` for standard input")]) from None


def _decoded(data: bytes) -> str:
    """Decode UTF-8, or the UTF-16 that PowerShell's `>` writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff") and b"\0" in data[:200]
    return data.decode("utf-16" if is_utf16 else "utf-8", "replace")


def read_standard_input() -> str:
    """Read the beginning of standard input, with arbitrary bytes."""
    return _decoded(sys.stdin.buffer.read(_MOST_BYTES))


def plan_of(run: Path) -> SavedPlan:
    """The plan of a named run. Raises RequestError if there is none."""
    plan, unread = read_plan(run)
    if plan is None:
        reason = f"holds no {PLAN} that can be read" if run.is_dir() else "is not a folder"
        message = f"{run} {reason}{f' ({unread})' if unread else ''}"
        nearest = path_like(run, _is_run)
        raise RequestError([Problem("--run", message, None, "the folder that `train` wrote", nearest)])
    return plan


def _is_run(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def write_circumstances(circumstances: Circumstances) -> str:
    """The head of `oom.txt`, for `read_circumstances`."""
    facts = {
        "phase": circumstances.phase,
        "step": circumstances.step,
        "micro-batch": circumstances.batch and f"{circumstances.batch} tokens",
        "largest before": circumstances.largest_batch and f"{circumstances.largest_batch} tokens",
        "repaired": "; ".join(map(str, circumstances.repairs)) or None,
        "allocated after each step": " ".join(map(str, circumstances.floors)) or None,
    }
    return "".join(f"{name}: {value}\n" for name, value in facts.items() if value is not None)


def read_circumstances(text: str) -> Circumstances:
    """Parse the head of an `oom.txt`; empty for any other text."""
    head = text[:20_000].partition("\n\n")[0]
    facts = dict(re.findall(r"^([a-z -]+): (.*)$", head, re.MULTILINE))
    if not facts.keys() & {"phase", "step", "repaired"}:  # only the last if the trial's evaluation failed
        return Circumstances()

    def number(name: str) -> int | None:
        match = re.match(rf"{_WHOLE}\b", facts.get(name, ""))
        return int(match.group()) if match else None

    numbers = facts.get("allocated after each step", "").split()
    floors = tuple(int(digits) for digits in numbers if re.fullmatch(_WHOLE, digits))
    pattern = rf"(\S+) ({_WHOLE}) -> ({_WHOLE}) \((\w+) of (?:step ({_WHOLE})|the longest rows)\)"
    repaired = re.findall(pattern, facts.get("repaired", ""))
    repairs = tuple(Repair(key, int(old), int(new), int(step or 0), phase) for key, old, new, phase, step in repaired)
    batch = number("micro-batch") or number("micro batch")  # without the hyphen in earlier versions
    return Circumstances(facts.get("phase"), number("step"), floors, batch, number("largest before"), repairs)
