"""Two processes of a sharded run on the CPU, over gloo, and what they find. A start takes seconds: do much in one."""

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from framework.build.assembly import Assembly, assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.build.ranks import Ranks, whole
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.run.several import ended, start
from tests.tiny import split, tiny_config, unequal_rows

Look = Callable[[Ranks, Path], Mapping[str, Any]]
STEPS = 2
SMOOTH = 1e-3
"""AdamW's epsilon: gradients that differ by a rounding of d move a weight by at most rate x d / epsilon apart. With the
usual 1e-8 a gradient near 0 makes a whole rate of it, on one processor and not on another."""


def on_two(look: Look, folder: Path, world: int = 2) -> list[dict[str, Any]]:
    """Results of `look`, a function that can be pickled, on each rank."""
    (folder / "look.pickle").write_bytes(pickle.dumps(look))
    for rank in ended(start("import sys, tests.sharded; tests.sharded.found()", str(folder), world=world)):
        assert rank.code == 0, rank.err
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def found() -> None:
    """Look on this rank, and leave what was found in the folder."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    look: Look = pickle.loads((folder / "look.pickle").read_bytes())
    seen = look(Ranks(rank, world, rank, world), folder)
    (folder / f"found-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def sharded(config: TrainingConfig, ranks: Ranks) -> Assembly:
    """The config's assembly on one of several CPU ranks."""
    torch.manual_seed(config.training.seed)
    return assemble(config, read_architecture(config), real_place(torch.device("cpu")), 10, ranks)


def settings(world: int, architecture: dict[str, Any], **sections: Any) -> TrainingConfig:
    """8 rows a step on `world` devices, sharded where there are several."""
    training = {"global_batch_size": 8, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    training |= sections.pop("training", {})
    if "adamw_torch" in training.get("optimizer", "adamw_torch"):
        training["adam_epsilon"] = SMOOTH
    strategy = sections.pop("fsdp", {})
    fsdp = {"enable_fsdp": True, **strategy} if world > 1 else {}
    return tiny_config(architecture, training=training, fsdp=fsdp, gpu={"name": "cpu", "count": world}, **sections)


def trained(assembly: Assembly, steps: Sequence[int] = range(1, STEPS + 1)) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps over the same rows, of which this rank takes its share."""
    ranks, size = assembly.ranks, assembly.config.training.per_device_train_batch_size
    rows = unequal_rows()
    share = len(rows["input_ids"]) // ranks.world
    mine = {name: tensor[ranks.rank * share : (ranks.rank + 1) * share] for name, tensor in rows.items()}
    results = [train_step(assembly, split(mine, int(size)), step) for step in steps]
    return [result.loss for result in results], [result.grad_norm for result in results]


def weights(assembly: Assembly) -> dict[str, torch.Tensor]:
    """The whole of every parameter, under its name; every rank must call this."""
    return {name: whole(parameter).detach().clone() for name, parameter in assembly.model.named_parameters()}
