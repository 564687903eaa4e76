"""Checkpoints of sharded weights: every rank writes and reads its own shards.

The files are safetensors, written and read by torch.distributed.checkpoint, which locates the shards of each tensor by
offsets in the headers. So a run can resume with more or fewer ranks, with one, or sharded differently. Shards are read
on the host directly into place: the device never holds a tensor twice.
"""

import json
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from framework.build.assembly import Assembly
from framework.build.ranks import whole
from framework.errors import Problem, RequestError, SaveFailed
from framework.run.checkpoints.read_back import count_differing, save_verified
from framework.run.ranks.coordinator import WAIT
from framework.run.record.layout import PARTS
from framework.run.state import SEPARATOR, placed, renamed, trained_state


def split_state(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's shards of weights and optimizer states by name, and the states that are numbers."""
    tensors, numbers = _weights(assembly), dict[str, Any]()
    for name, parameter in assembly.model.named_parameters():
        for key, value in assembly.optimizer.state.get(parameter, {}).items():
            path = f"{name}{SEPARATOR}{key}"
            if not isinstance(value, Tensor):
                numbers[path] = value
            else:
                tensors[path] = assembly.as_part(name, value) if value.shape == parameter.shape else value
    return tensors, numbers


def _weights(assembly: Assembly) -> dict[str, Tensor]:
    return {name: assembly.as_part(name, tensor) for name, tensor in trained_state(assembly.model).items()}


def writers_group() -> ProcessGroup:
    """Create a process group for writing during training, separate from training's collectives; every rank must call
    this. Its timeout allows for waiting as long as a save takes."""
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=WAIT)
    return group


class _Writer(HuggingFaceStorageWriter):
    """Writes the same files as torch's writer, but directly from the tensors, and reads them back.

    torch's writer first builds a whole file in memory while holding the GIL (1.3 s for 512 MiB; one CPU core, torch
    2.13, 2026-11), which would block a concurrent training step.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, Any] = {}
        for item in plan.items:
            assert item.tensor_data is not None  # there are only tensors
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor.detach().cpu().contiguous()
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        if tensors:
            file = Path(self.path) / _gen_file_name(1, 1, plan.storage_data["shard_index"])
            known = {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
            save_verified(file, tensors, {**known, FORMAT_KEY: FORMAT_VALUE})
        done = Future[list[WriteResult]]()
        done.set_result([])
        return done


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Write this rank's shards into a folder common to all ranks, empty before; every rank must call this.

    `group` is the process group to use; None is training's. Raises SaveFailed on every rank if one cannot write.
    """
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        save(dict(tensors), storage_writer=_Writer(str(folder), save_distributed=True), process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SaveFailed(f"rank {rank} could not write {folder}: {cause}. Earlier saves are untouched.") from error


def verify_parts(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise SaveFailed unless the shards add up to `tensors`, judging by the headers of all files."""
    stored: dict[str, int] = dict.fromkeys(tensors, 0)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                stored[name] = stored.get(name, 0) + math.prod(opened.get_slice(name).get_shape())
    wrong = [name for name, count in stored.items() if name not in tensors or count != tensors[name].numel()]
    if wrong:
        raise SaveFailed(f"{folder} does not read back as it was written: {count_differing(wrong)}")


def load_parts(checkpoint: Path, assembly: Assembly, numbers: Mapping[str, Any]) -> None:
    """Load weights and states of any checkpoint into this rank's shards, or into an unsharded model.

    Raises RequestError if its tensors are not those of the built model.
    """
    folder = checkpoint / PARTS if (checkpoint / PARTS).exists() else checkpoint
    reader = HuggingFaceStorageReader(str(folder))
    stored = {
        name: item
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    weights = _weights(assembly)
    wrong = [name for name in weights if name not in stored or stored[name].size != weights[name].shape]
    if wrong:
        message = f"{checkpoint} holds another model: {count_differing(wrong)}"
        raise RequestError([Problem("--resume", message)])
    states = _empty_states(assembly, stored)
    named = dict(assembly.model.named_parameters())
    target = weights | {path: _part_of_state(assembly, named, path, state) for path, state in states.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as asked
        load(target, storage_reader=reader, no_dist=not assembly.is_in_parts)
    for path, value in renamed(assembly, {**states, **numbers}).items():
        name, key = path.split(SEPARATOR)
        parameter = named[name]
        assembly.optimizer.state[parameter][key] = placed(assembly, parameter, key, value)


def _empty_states(assembly: Assembly, stored: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Empty tensors for the states: sharded like their parameter if they have its shape, else whole on every rank."""
    states: dict[str, Tensor] = {}
    for name, parameter in assembly.model.named_parameters():
        for path, item in stored.items():
            if not path.startswith(f"{name}{SEPARATOR}"):
                continue
            dtype = item.properties.dtype
            if item.size == assembly.as_part(name, parameter).shape:
                states[path] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                states[path] = torch.empty(item.size, dtype=dtype, device=assembly.place.device)
    return states


def _part_of_state(assembly: Assembly, named: Mapping[str, Tensor], path: str, state: Tensor) -> Tensor:
    name, _ = path.split(SEPARATOR)
    return assembly.as_part(name, state) if state.shape == named[name].shape else state


def whole_on_host(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gather one tensor after the other on the device, and copy them to host memory on the ranks with `keep`; every
    rank must call this."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.detach().to("cpu", copy=gathered is tensor).contiguous()
        del gathered
    return found
