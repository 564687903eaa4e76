"""`--nproc`: start and supervise one process per device.

torch's own launcher kills ranks 30 seconds after asking them to end, so a rank that saves after Ctrl-C would lose its
checkpoint, and it has its own exit codes. So the processes are started here, with the environment that torchrun sets
and torch's rendezvous.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from framework.activity import now
from framework.build.refuse import refuse_impossible
from framework.errors import DoesNotFit, Problem, RequestError, TrainingStopped
from framework.run.checkpoints.resume import check_allowed
from framework.run.planning.capacity import require_capacity, too_large
from framework.run.planning.fit import decide_or_refuse
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.ranks.coordinator import ALIVE, FAILED, FIRST, GRACE, LAUNCHER
from framework.run.ranks.environment import train_command
from framework.run.ranks.signals import noted_signals
from framework.run.record.run_folder import open_folder
from framework.schema.choices import OnOutOfMemory
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted
from framework.text import to_yaml

LOST = 4
"""Exit code of a run one of whose ranks was killed: training stopped by itself."""
_HOST = "127.0.0.1"
_PAUSE = 0.1


def launch(config: TrainingConfig, name: str, options: Sequence[str]) -> int:
    """Train on `gpu.count` devices of this machine and return the run's exit code.

    Each rank runs `tunesmith train` with `options`. Raises RequestError and DoesNotFit before any rank is started.
    """
    config = _possible(config, name, options)
    world = config.gpu.count
    # created in this process, so that no other can take its port in between
    store = TCPStore(_HOST, 0, None, True, wait_for_workers=False)
    coordinator = PrefixStore(FIRST, store)
    coordinator.set(LAUNCHER, "")
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        recipe = Path(folder) / f"{name}.yaml"
        recipe.write_text(to_yaml(config))
        command = train_command(str(recipe), *options)
        ranks: list[subprocess.Popen[bytes]] = []
        now("")  # the first rank shows the activity
        with noted_signals() as noted:
            try:
                for rank in range(world):  # in separate sessions, so that a terminal's Ctrl-C is not sent twice
                    environment = _environment(rank, world, store.port)
                    ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
                return _watched(ranks, coordinator, noted)
            finally:
                for process in ranks:
                    if process.poll() is None:
                        process.kill()
                        process.wait()


def _possible(config: TrainingConfig, name: str, options: Sequence[str]) -> TrainingConfig:
    """The config with every `auto` decided. Everything that can be refused is refused here, before ranks start."""
    check_allowed([options[at + 1] for at, word in enumerate(options) if word == "--allow"])
    require_devices(config)
    decided = decide_or_refuse(config)
    for line in decided.reasons:
        print(f"auto      {line}", file=sys.stderr)
    refuse_impossible(decided.config, devices="one")
    folder = open_folder(decided.config, name, "--resume" in options, "--overwrite" in options)
    plan = plan_in_subprocess(decided.config)
    if not plan.fits and decided.config.training.on_oom is not OnOutOfMemory.SHRINK:  # else rank 0 warns
        raise DoesNotFit(f"{too_large(plan)} `tunesmith plan` shows every term; nothing was started.")
    require_capacity(plan, folder.path, decided.config.data.workers, decided.config.gpu.count, folder.fallback)
    return decided.config


def require_devices(config: TrainingConfig) -> None:
    """Raise RequestError if this machine has fewer cards than processes are to be started."""
    count = torch.cuda.device_count()
    if config.gpu.name != "cpu" and config.gpu.count > count:
        message = counted(config.gpu.count, "process is", "processes are")
        message += f" asked for, and this machine has {counted(count, 'CUDA card')}"
        raise RequestError([Problem("gpu.count", message, expected="gpu=cpu, or at most as many processes as cards")])


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment that torchrun sets. Its store, like ours, is kept by the launching process."""
    threads = max(1, (os.cpu_count() or 1) // world)
    return {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise store clients print stack frames when this process is killed
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _watched(ranks: Sequence["subprocess.Popen[bytes]"], coordinator: Store, noted: list[int]) -> int:
    """Wait for all ranks; when one fails the others end within seconds. Signals are forwarded; before all ranks can
    handle them, when there is nothing to save either, KeyboardInterrupt is raised."""
    while any(process.poll() is None for process in ranks):
        if noted and not coordinator.check([f"{ALIVE}/{rank}" for rank in range(len(ranks))]):
            raise KeyboardInterrupt
        while noted:
            number = noted.pop(0)
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(number)
        failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
        if failed is not None:
            return _ended(ranks, failed, coordinator)
        time.sleep(_PAUSE)
    return next((_ended(ranks, rank, coordinator) for rank, process in enumerate(ranks) if process.returncode), 0)


def _ended(ranks: Sequence["subprocess.Popen[bytes]"], failed: int, coordinator: Store) -> int:
    """Leave a note on behalf of a killed rank and wait for the others. Returns the run's exit code.

    Raises TrainingStopped for killed ranks, since they cannot report it themselves.
    """
    code = ranks[failed].returncode
    mine = json.dumps({"rank": failed, "code": code if code > 0 else LOST})
    note = json.loads(coordinator.compare_set(FAILED, "", mine))
    end = time.monotonic() + 4 * GRACE
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(_PAUSE)
    deaths = [
        f"rank {rank} {_death(-process.returncode)}; checkpoints are intact"
        for rank, process in enumerate(ranks)
        if process.poll() is not None and process.returncode < 0
    ]
    if code < 0 and note["rank"] == failed:  # so no rank has reported another failure
        raise TrainingStopped("; ".join(deaths))
    for death in deaths:
        print(f"error {death}", file=sys.stderr)
    return int(note["code"])


def _death(number: int) -> str:
    """Text for the signal that ended a process."""
    if number == signal.SIGKILL:
        return "was killed (SIGKILL), by a user or by the system when the host's memory ran out"
    return f"died of {signal.Signals(number).name}"
