"""The tree of errors. Each branch has its exit code.

TunesmithError          1  an internal fault
|- RequestError         2  the request is wrong: every problem, with key and place
|- DoesNotFit           3  the plan is over the card
|- TrainingStopped      4  training ended by itself
|  |- NonFinite            a loss or gradient that is not a number
|  |- BrokenRows           a row of a stream cannot be read
|  |- WorkersLost          processes that prepare batches die again and again
|  |- VerificationFailed   an option asked for is not in effect
|  |- SaveFailed           a checkpoint or export could not be written
|  `- OutOfMemory          memory ran out and could not be repaired
`- Interrupted        130  stopped by the user, after saving
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from framework.terminal import on_one_line


@dataclass(frozen=True)
class Problem:
    """One problem of a request: the key, where it was written, what was expected, and the nearest valid value."""

    key: str
    message: str
    where: str | None = None
    expected: str | None = None
    nearest: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.key}: {self.message}" if self.key else self.message]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.expected:
            lines.append(f"  expected {self.expected}")
        if self.nearest:
            lines.append(f"  did you mean {self.nearest}")
        return "\n".join(map(on_one_line, lines))


class TunesmithError(Exception):
    """Root of the tree. Raised directly only for an internal fault."""

    exit_code = 1
    is_reported = False
    """Whether the message was already printed on stderr."""


class RequestError(TunesmithError):
    """The request cannot be carried out as written."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DoesNotFit(TunesmithError):
    """The plan's upper bound exceeds the card's memory."""

    exit_code = 3


class TrainingStopped(TunesmithError):
    """Training ended before its last step, by itself."""

    exit_code = 4


class NonFinite(TrainingStopped):
    """The loss or the gradient norm is not a finite number."""


class BrokenRows(TrainingStopped):
    """Rows of a stream cannot be read during training; the state until then is saved."""


class WorkersLost(TrainingStopped):
    """Processes that prepare batches die repeatedly; the state until then is saved."""


class VerificationFailed(TrainingStopped):
    """A requested option was not found on the built objects."""


class SaveFailed(TrainingStopped):
    """A checkpoint or export could not be written or failed verification; earlier ones are untouched."""


class OutOfMemory(TrainingStopped):
    """Memory ran out and the run could not be repaired."""


class Interrupted(TunesmithError):
    """The user stopped the run; its state was saved first."""

    exit_code = 130
