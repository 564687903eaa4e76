"""Detection of a launcher (torchrun, accelerate, srun, `tunesmith --nproc`) from the environment, and command lines of
this package's own child processes. Loads no torch.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from framework.errors import Problem, RequestError

_PORTS = range(15_000, 30_000)
"""Below the ports that Linux uses for outgoing connections (from 32768)."""


@dataclass(frozen=True)
class Launched:
    """This process among the `world` processes started by the command `by`, with the rendezvous at `address:port`."""

    rank: int
    world: int
    local_rank: int
    by: str
    address: str
    port: int
    local_world: int = 1
    """Processes on this machine."""


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Read the launcher's variables, None for a single process. Raises RequestError if they are incomplete."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if absent and world > 1:
            message = f"RANK {rank} of WORLD_SIZE {world} is set, but not {' and '.join(absent)}"
            raise RequestError([Problem("", message, expected="torchrun, which sets all four, or none of them")])
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the launcher"
        address, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", 0))
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", world))
        return Launched(rank, world, local_rank, by, address, port, local_world)
    # An sbatch script has a task's variables too, but a process that it starts without srun is a single one.
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _by_slurm(environment)
    return None


def _by_slurm(environment: Mapping[str, str]) -> Launched:
    job, step = int(environment.get("SLURM_JOB_ID", 0)), int(environment["SLURM_STEP_ID"])
    return Launched(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_STEP_NUM_TASKS"]),
        int(environment["SLURM_LOCALID"]),
        "srun",
        environment.get("MASTER_ADDR") or _first_host(environment),
        int(environment.get("MASTER_PORT") or _PORTS[(job + step) % len(_PORTS)]),
        # "4(x2)": four on each of two machines
        int(re.split(r"\D", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0]),
    )


def _first_host(environment: Mapping[str, str]) -> str:
    """The machine of rank 0: Slurm numbers tasks in the order of its node list."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if "[" not in nodes:
        return nodes.partition(",")[0]
    try:
        asked = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        message = f"the first machine of {nodes} is not known: scontrol failed ({error})"
        raise RequestError([Problem("", message, expected="MASTER_ADDR, the name of rank 0's machine")]) from None


_ROOT = str(Path(__file__).absolute().parents[3])
# The package is imported from its present location, which need not be on the child's path (a checkout that is not
# installed); its folder then moves to the end of the path, where it shadows no other module.
_IMPORT = f"import sys, typing; sys.path.insert(0, {_ROOT!r}); import framework; sys.path.append(sys.path.pop(0)); "


def python_command(code: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Command line of a Python that runs `code`, with `arguments` in `sys.argv[1:]` and the interpreter's `flags`.

    `framework` is this same package there. Nothing is imported from the working directory (`-P`); `PYTHONPATH` applies
    as usual.
    """
    return [sys.executable, "-P", *flags, "-c", _IMPORT + code, *arguments]


def train_command(*arguments: str) -> list[str]:
    """Command line of `tunesmith train` with these arguments."""
    return python_command("from framework.__main__ import main; sys.exit(main())", "train", *arguments)
