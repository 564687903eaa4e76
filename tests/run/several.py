"""Several processes that train together in a test, as torchrun would start them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """The end of one rank, and its own seconds."""

    code: int
    out: str
    err: str


def free_port() -> str:
    """Below the ports that the system assigns: nobody takes it until it is bound."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return str(port)
    raise RuntimeError("100 ports are taken")


def start(script: str, *arguments: str, world: int = 2) -> list["subprocess.Popen[str]"]:
    """Start `script` (Python code) as `world` ranks with a store of their own."""
    named = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **named}
    command, pipe = [sys.executable, "-W", "ignore", "-c", script, *arguments], subprocess.PIPE
    return [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True
        )
        for rank in range(world)
    ]


def ended(processes: list["subprocess.Popen[str]"], within: float = 240) -> list[Ended]:
    """Wait for all ranks. Fails the test, and leaves none behind, when one does not end."""
    end = time.monotonic() + within
    try:
        both = [process.communicate(timeout=max(1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *texts) for process, texts in zip(processes, both, strict=True)]
