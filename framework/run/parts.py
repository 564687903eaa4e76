"""Checkpoints of sharded weights: every rank writes its own part and reads its own part, whatever part that is.

The files are safetensors, written and read by torch.distributed.checkpoint, which finds the parts of each tensor by
the offsets in their headers. So a run goes on with more or fewer ranks than saved it, with one, or sharded where it was
not before. Parts are read on the host straight into their place: nothing is there twice on the device.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from framework.build.assembly import Assembly
from framework.build.ranks import whole
from framework.errors import Problem, RequestError, SaveFailed
from framework.run.checkpoint import PARTS
from framework.run.optimizer_state import SEPARATOR, placed
from framework.run.trained import trained_state


def split_state(assembly: Assembly) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and optimizer states by name, each as this rank's part of a whole; and the states that are numbers."""
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


def write_parts(folder: Path, assembly: Assembly) -> None:
    """Write this rank's part beside those of the others, into an empty folder; every rank must call this.

    Raises SaveFailed on every rank when one cannot write.
    """
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    tensors, _ = split_state(assembly)
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise SaveFailed(f"rank {rank} could not write {folder}: {cause}. Earlier saves are untouched.") from error


def verify_parts(folder: Path, assembly: Assembly) -> None:
    """Raises SaveFailed unless the parts add up to the tensors that there are, by the headers of all files."""
    tensors, _ = split_state(assembly)
    stored: dict[str, int] = dict.fromkeys(tensors, 0)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                count = 1
                for size in opened.get_slice(name).get_shape():
                    count *= size
                stored[name] = stored.get(name, 0) + count
    wrong = [name for name, count in stored.items() if name not in tensors or count != tensors[name].numel()]
    if wrong:
        raise SaveFailed(
            f"{folder} does not read back as it was written: {len(wrong)} tensors differ, first {wrong[0]}"
        )


def load_parts(checkpoint: Path, assembly: Assembly, numbers: Mapping[str, Any]) -> None:
    """Weights and states of any checkpoint into this rank's parts, or into a whole model.

    Raises RequestError when it holds other tensors than the model that was built.
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
        message = f"{checkpoint} holds another model: {len(wrong)} tensors differ, first {wrong[0]}"
        raise RequestError([Problem("--resume", message)])
    states = _empty_states(assembly, stored)
    named = dict(assembly.model.named_parameters())
    target = weights | {path: _part_of_state(assembly, named, path, state) for path, state in states.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as asked
        load(target, storage_reader=reader, no_dist=not assembly.is_in_parts)
    for path, value in {**states, **numbers}.items():
        name, key = path.split(SEPARATOR)
        parameter = named[name]
        assembly.optimizer.state[parameter][key] = placed(assembly.optimizer, parameter, key, value)


def _empty_states(assembly: Assembly, stored: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Room for the states: like their parameter where they have its shape, else whole on every rank."""
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
    """Each tensor gathered on the device, one after the other, and kept on the host of the rank that is to `keep` them;
    every rank must call this."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.detach().cpu().contiguous()
        del gathered
    return found
