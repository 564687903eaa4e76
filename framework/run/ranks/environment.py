"""Whether something has started this process as one of several (torchrun, accelerate, srun, `tunesmith --nproc`), and
command lines of the Python processes that this package starts for its own work. Loads no torch.
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
"""Below the ports that Linux gives to outgoing connections (from 32768)."""


@dataclass(frozen=True)
class Launched:
    """This process among the `world` that were started together by the command `by`; they meet at `address:port`."""

    rank: int
    world: int
    local_rank: int
    by: str
    address: str
    port: int
    local_world: int = 1
    """Processes on this machine."""


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What the environment says, None for a process on its own. Raises RequestError when it says it incompletely."""
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
    # A script of sbatch has the numbers of a task too, but is no step: what it starts without srun is one process.
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
    """The machine of rank 0: Slurm numbers tasks in the order of its list of nodes."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if "[" not in nodes:
        return nodes.partition(",")[0]
    try:
        asked = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        message = f"the first machine of {nodes} is not known: scontrol does not say it ({error})"
        raise RequestError([Problem("", message, expected="MASTER_ADDR, the name of rank 0's machine")]) from None


_ROOT = str(Path(__file__).absolute().parents[3])
# The package is imported from where it lies here, which need not be on the other process's path (a checkout that is
# not installed); its folder then goes to the end, where it stands in front of no other module.
_IMPORT = f"import sys, typing; sys.path.insert(0, {_ROOT!r}); import framework; sys.path.append(sys.path.pop(0)); "


def python_command(code: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Command line of a Python that runs `code`, with `arguments` in `sys.argv[1:]` and the interpreter's `flags`.

    `framework` is this very package there. Nothing is imported from the working directory, whatever modules it holds
    (`-P`); `PYTHONPATH` counts as it does here.
    """
    return [sys.executable, "-P", *flags, "-c", _IMPORT + code, *arguments]


def train_command(*arguments: str) -> list[str]:
    """Command line of `tunesmith train` with these words after it."""
    return python_command("from framework.__main__ import main; sys.exit(main())", "train", *arguments)
