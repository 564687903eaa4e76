"""Steps measured on this machine's card, each in a process of its own: forks of a server that loads the libraries once.

This module itself loads no torch: `Measurements` starts `measure.serve` in the child.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

from framework.errors import OutOfMemory, Problem, RequestError
from framework.memory.cards import installed_cards
from framework.run.planning.server import Server
from framework.run.ranks.environment import python_command
from framework.schema.config import TrainingConfig

_COMMAND = python_command("from framework.run.planning.measure import serve; serve()", flags=("-W", "ignore"))
_ASK_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""`torch.cuda.is_available` then starts no CUDA, which forks could not use."""
IS_LAST = "is_last"
"""Key of the answer of a server that has measured without a fork, and still holds memory of the card."""


@dataclass(frozen=True)
class Measured:
    """Measured memory and time of a step, forward to optimizer step. Bytes and seconds."""

    device_name: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    step_seconds: float
    tokens_per_second: float
    phases: dict[str, int]
    loss: float
    torch_version: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _server() -> Server:
    return Server(_COMMAND, "measurement", {**os.environ, **_ASK_DRIVER})


class Measurements:
    """Measures configs, as a context manager. Where a card is found, the server starts with the block."""

    def __enter__(self) -> "Measurements":
        self._server = _server() if installed_cards() else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.end()

    def wait(self) -> None:
        """Wait until the libraries are loaded, so that they do not disturb what this process measures."""
        if self._server is not None:
            self._server.ask(None)

    def __call__(self, config: TrainingConfig) -> Measured:
        """Some steps of a config in a fresh process, so that no other memory of this command is on the card.

        Raises RequestError without a card, OutOfMemory if a step does not fit, TunesmithError if the process ended.
        """
        server = self._server = self._server or _server()
        answer = server.ask(config.model_dump(mode="json"))
        if answer.pop(IS_LAST, False):
            server.end()
            self._server = None
        if "errors" in answer:
            raise RequestError([Problem(**problem) for problem in answer["errors"]])
        if "out_of_memory" in answer:
            raise OutOfMemory(answer["out_of_memory"])
        if "fault" in answer:
            raise server.failure(answer["fault"])
        return Measured(**answer)


def measure_in_subprocess(config: TrainingConfig) -> Measured:
    """The measurement of one config. Raises as `Measurements` does."""
    with Measurements() as measured:
        return measured(config)
