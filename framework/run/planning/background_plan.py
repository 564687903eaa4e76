"""The plan of a run from a process of its own, which goes on to find out what each lever saves. Loads no torch."""

import json
import math
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from framework.errors import Problem, RequestError, SaveFailed
from framework.memory.ledger import Plan
from framework.run.planning.plan_process import failed
from framework.run.planning.python_process import python_command
from framework.schema.config import TrainingConfig

_COMMAND = python_command(
    "from framework.run.planning.lever_savings import main; sys.exit(main())", flags=("-W", "ignore")
)

Keep = Callable[[Mapping[str, Any]], None]
"""Stores the document of `plan.json`."""


@dataclass
class Forecast:
    """A plan, and the levers' savings as far as they are known. Made by hand it has none, and nothing goes on.

    Call `stop` when the run ends. `entries` are those of `levers` in `plan.json`.
    """

    plan: Plan
    entries: list[dict[str, Any]] = field(default_factory=list)
    patience: float = math.inf
    """Seconds that a run which has failed may wait for more of them, where others hang meanwhile."""
    _process: "subprocess.Popen[str] | None" = None
    _keep: Keep | None = None
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def document(self) -> dict[str, Any]:
        """The document of `plan.json`."""
        return {**self.plan.to_json(), **({"levers": self.entries} if self.entries else {})}

    def keep(self, keep: Keep) -> None:
        """Store the document now, and again whenever more is known."""
        with self._lock:
            self._keep = keep
            keep(self.document)

    def wait(self, seconds: float) -> None:
        """Give the levers that are left some more time."""
        if self._thread is not None:
            self._thread.join(seconds)

    def stop(self, after: float = 0.0) -> None:
        """End the process, `after` so many seconds at the latest."""
        self.wait(after)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._keep = None

    def follow(self, process: "subprocess.Popen[str]", lines: IO[str]) -> None:
        """Read on in a thread."""
        self._process = process
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                if not line.endswith("\n"):
                    return  # cut short when the process was ended
                document = json.loads(line)
                with self._lock:
                    if "levers" in document:
                        self.entries[:] = document["levers"]
                    else:
                        self.entries[document["position"]]["saves"] = document["saves"] or {}
                    if self._keep is not None:
                        with suppress(SaveFailed):  # a full disk ends the run at its next save, not here
                            self._keep(self.document)


_awaited: list["subprocess.Popen[str]"] = []
"""Those whose plan has not come yet."""


def abandon() -> None:
    """End the processes whose plans are waited for in other threads, where these then raise TunesmithError."""
    for process in _awaited:
        process.kill()


def forecast_in_subprocess(config: TrainingConfig) -> Forecast:
    """The plan of a composed config, returned as soon as it is made; its levers follow.

    Raises RequestError with the problems that the rehearsal found, TunesmithError when the child itself failed.
    """
    with tempfile.TemporaryFile("w+") as complaints:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": complaints}
        process = subprocess.Popen(_COMMAND, text=True, **pipes)  # type: ignore[call-overload]
        started = False
        _awaited.append(process)
        try:
            process.stdin.write(config.model_dump_json())
            process.stdin.close()
            line = process.stdout.readline()
            document = json.loads(line) if line.endswith("\n") else {}
            if "errors" in document:
                raise RequestError([Problem(**problem) for problem in document["errors"]])
            if "plan" not in document:
                process.wait()
                complaints.seek(0)
                raise failed(complaints.read(), f"exit {process.returncode}")
            forecast = Forecast(Plan.from_json(document["plan"]))
            forecast.follow(process, process.stdout)
            started = True
            return forecast
        finally:
            _awaited.remove(process)
            if not started:
                process.kill()
                process.wait()
                process.stdout.close()
