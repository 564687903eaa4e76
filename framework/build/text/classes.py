"""Targets of classification and regression: class indices or values."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from unicodedata import decimal

import numpy as np
import numpy.typing as npt

from framework.build.hub import nearest
from framework.build.text.messages import describe
from framework.schema.plural import counted

HIGHEST = float(np.finfo(np.float32).max)
"""Largest target: targets are float32."""


COARSE = 1e-3
"""Share of the values' standard deviation; float32 steps above it distort the targets."""


class WrongLabel(ValueError):
    """A label that does not fit the others."""


@dataclass(frozen=True)
class Targets:
    """Conversion of a label to a target.

    With one class a row the target is its index; with several, 1 or 0 for each class; for values, the values.
    """

    names: tuple[str, ...]
    """Names of the classes by index; empty if rows have values."""
    several: bool
    """Whether a row may have any number of classes."""
    size: int
    """Length of a target."""

    def of(self, label: object) -> npt.NDArray[np.float32]:
        """The target, float32 of shape (size,). Raises WrongLabel."""
        if not self.names:
            return self._values(label)
        if isinstance(label, list) is not self.several:
            wanted = "a list of classes" if self.several else "one class"
            raise WrongLabel(f"expected {wanted}, as in the first row, not {label!r}")
        if not isinstance(label, list):
            return np.array([self._index(label)], np.float32)
        found = np.zeros(self.size, np.float32)
        found[[self._index(each) for each in label]] = 1
        return found

    def _index(self, label: object) -> int:
        name = class_name(label)
        if _is_no_class(label):
            raise WrongLabel(
                f"{name} is not a class; rows without a class need no label, and values need the task regression"
            )
        if name in self.names:
            return self.names.index(name)
        if isinstance(label, (int, float)) and label < len(self.names) and not any(map(str.isdecimal, self.names)):
            return int(label)  # if class names are numbers, a number is a name and not an index
        close = nearest(name, self.names)
        known = ", ".join(self.names[:12]) + (", .." if len(self.names) > 12 else "")
        raise WrongLabel(
            f"{name!r} is not one of the classes ({known})" + (f"; did you mean {close}?" if close else "")
        )

    def _values(self, label: object) -> npt.NDArray[np.float32]:
        values = label if isinstance(label, list) else [label]
        if not values:
            raise WrongLabel("expected a number or a list of them, and the list is empty")
        if len(values) != self.size:
            raise WrongLabel(f"expected {counted(self.size, 'value')}, as in the first row, not {len(values)}")
        return np.array([_number(value) for value in values], np.float32)


def find_classes(labels: Iterable[str | None], given: Sequence[str] | None) -> Targets:
    """Classes of these labels (JSON texts): those given, or every name that occurs, sorted; numbers by size.

    Raises WrongLabel if there are labels and none of them is a class.
    """
    several: bool | None = None
    names: set[str] = set()
    first: object = None
    for label in _parsed(labels):
        first = label if several is None else first
        several = isinstance(label, list) if several is None else several
        for each in label if isinstance(label, list) else [label]:
            if not _is_no_class(each):  # such a row is refused later, with its location
                names.add(class_name(each))
    by_name = sorted(names)
    # `1` and `01` have the same size; sorting by name first makes their order deterministic
    ordered = sorted(by_name, key=size_of) if all(map(str.isdecimal, names)) else by_name
    found = tuple(given or ordered)
    if not found and several is not None:
        raise WrongLabel(f"no row has a class: the first label is {json.dumps(first)}")
    return Targets(found, bool(several), len(found) if several else 1)


def find_values(labels: Iterable[str | None]) -> Targets:
    """Targets for values; the first row gives their number."""
    first = next((label for label in _parsed(labels) if label != []), 0.0)
    return Targets((), False, len(first) if isinstance(first, list) else 1)


def coarse_values(labels: Iterable[str | None]) -> list[str]:
    """Warnings about values so close together and far from 0 that float32 merges them; one for each value of a row."""
    rows = [label if isinstance(label, list) else [label] for label in _parsed(labels)]
    found = []
    for column in zip_longest(*rows):
        values = np.unique([number for value in column if (number := _finite(value)) is not None])
        if not len(values):
            continue
        kept, step = len(np.unique(values.astype(np.float32))), float(np.spacing(np.float32(abs(values).max())))
        spread = float(values.std())
        if kept < len(values) and step > COARSE * spread:
            found.append(
                f"the {counted(len(values), 'different value')} from {values[0]:.10g} to {values[-1]:.10g} are "
                f"{kept:,} in float32, whose steps are {step:g} there: subtract {values.mean():.10g} from them "
                f"in the file and divide by {spread:.3g}, and undo both on the predictions"
            )
    return found


def class_name(label: object) -> str:
    """Name of the class: `true`, `3` (also for 3.0, as tables store it), or the text."""
    if isinstance(label, bool):
        return str(label).lower()
    return str(int(label)) if isinstance(label, float) and label == int(label) else str(label)


def _is_no_class(label: object) -> bool:
    return isinstance(label, (int, float)) and (label < 0 or label != int(label))


def size_of(number: str) -> tuple[int, str]:
    """Sort key of a decimal number in any script by size, without Python's limit on the length of integers."""
    digits = "".join(str(decimal(digit)) for digit in number).lstrip("0")
    return len(digits), digits


def _parsed(labels: Iterable[str | None]) -> Iterator[object]:
    """The distinct labels. Most rows share a few, so each text is parsed once."""
    seen: dict[str, object] = {}
    for text in labels:
        if text is not None and text not in seen:
            seen[text] = json.loads(text)
            yield seen[text]


def _number(value: object) -> float:
    number = _finite(value)
    if number is None:
        raise WrongLabel(f"expected a finite number (of float32), not {describe(value)}")
    return number


def _finite(value: object) -> float | None:
    """The value as a number if float32 can hold it, else None."""
    try:
        if isinstance(value, (int, float, str)) and abs(number := float(value)) <= HIGHEST:
            return number
    except (ValueError, OverflowError):
        pass
    return None
