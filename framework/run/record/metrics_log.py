"""Writer of `metrics.jsonl` and `samples.jsonl`, whose failures never end a run. Loads no torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from framework.run.record.layout import append_line, replace_file
from framework.schema.plural import counted

FILE, SAMPLES = "metrics.jsonl", "samples.jsonl"


class MetricsLog:
    """A log of JSON lines. Lines that cannot be written wait in memory and are retried with each further one.

    `say` receives one message when lines begin to wait, and one when they are written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], name: str = FILE) -> None:
        self._file, self._say = folder / name, say
        self._waiting: list[str] = []

    def append(self, values: Mapping[str, Any]) -> None:
        """Add one line."""
        had = len(self._waiting)
        self._waiting.append(json.dumps(values))
        error = self._flush()
        if error is not None and not had:
            self._say(f"warning   {self._file} cannot be written ({error.strerror}): its lines wait in memory")
        elif error is None and had:
            self._say(f"metrics   {counted(had + 1, 'line')} that waited in memory are written")

    def close(self, elsewhere: Path | None) -> None:
        """Write waiting lines, to `elsewhere` if the file itself cannot be written; report lost ones."""
        count = len(self._waiting)
        if not count or self._flush() is None:
            return
        lost = f"warning   the last {counted(count, 'line')} of {self._file} could not be written"
        if elsewhere is not None:
            try:
                elsewhere.mkdir(parents=True, exist_ok=True)
                replace_file(elsewhere / self._file.name, "".join(f"{line}\n" for line in self._waiting))
            except OSError as error:
                return self._say(f"{lost}, nor to {elsewhere}: {error.strerror}")
            return self._say(
                f"warning   the last {counted(count, 'line')} of {self._file} are in {elsewhere / self._file.name}"
            )
        self._say(lost)

    def _flush(self) -> OSError | None:
        """Write waiting lines as far as possible. Returns the error that stopped it, if any."""
        try:
            while self._waiting:
                append_line(self._file, self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            return error
        return None
