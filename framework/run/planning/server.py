"""A Python process that answers lines: a question in JSON on its stdin, an answer in JSON on its stdout.

It loads its libraries once and forks for each question. This module itself loads no torch.
"""

import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from framework.errors import TunesmithError

_TAIL = 2000


class Server:
    """A process started from `command`; `work` names what it does in errors. Raises OSError if it cannot start."""

    def __init__(self, command: Sequence[str], work: str, environment: Mapping[str, str] | None = None) -> None:
        self._work = work
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, text=True, stdin=pipe, stdout=pipe, stderr=self._complaints, env=environment
            )
        except OSError:
            self._complaints.close()
            raise

    def ask(self, question: object) -> Any:
        """The answer. Raises TunesmithError if the process ended without one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self.failure(f"exit {self._process.wait()}")
        return json.loads(line)

    def failure(self, otherwise: str) -> TunesmithError:
        """An error with the last line that the process wrote, or with `otherwise`."""
        self._complaints.seek(0)
        complaints = self._complaints.read()
        last = next((line for line in reversed(complaints.splitlines()) if line.strip()), otherwise)
        failure = TunesmithError(f"the {self._work} failed: {last} (--debug shows where; please report it)")
        failure.add_note(complaints[-_TAIL:])
        return failure

    def kill(self) -> None:
        """Kill the process and its forks; whoever waits for an answer then raises TunesmithError."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(OSError):  # a part of a question is left
            self._process.stdin.close()

    def end(self) -> None:
        """Kill the process and its forks, and wait for their end."""
        assert self._process.stdout is not None
        self.kill()
        with self._process:
            self._process.stdout.read()  # forks have it too
        self._complaints.close()


def end_with_client() -> None:
    """In a server or its fork: end this process at once, also amid its work, when the client ends or calls `kill`."""

    def wait() -> None:
        client = select.poll()
        client.register(0, 0)  # no event but that its other end is closed
        client.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="client").start()
