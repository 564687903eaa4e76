"""Export of a sharded model: gathered tensor by tensor, written file by file by the first rank.

No rank holds the whole model, except if transformers joins or renames tensors when saving: then the first rank's host
holds one copy.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from framework.build.assembly import Assembly
from framework.build.averages import take_average
from framework.build.model.parts import causal_model
from framework.build.ranks import whole
from framework.errors import SaveFailed
from framework.run.checkpoints.checkpoint import written_aside
from framework.run.checkpoints.export import verify_folder, write_adapter, write_base
from framework.run.checkpoints.read_back import verify_tensors

LARGEST_FILE = "5GB"
"""Largest file, as the hub advises; the first rank's host holds one at a time."""


def export_sharded(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    base: Mapping[str, Any] | None = None,
    fallback: Path | None = None,
) -> torch.dtype:
    """Write model (or adapter) and tokenizer to `target`, completely or not at all; every rank must call this. `base`
    is the record of an adapter's base.

    Returns the dtype written. Raises SaveFailed on the first rank if the folder cannot be written, even if writing to
    `fallback` then succeeded.
    """
    take_average(assembly)
    failure = _written(assembly, tokenizer, target, base)
    if fallback is not None and _has_failed(assembly, failure):
        second = _written(assembly, tokenizer, fallback, base)
        if failure:
            failure = f"{failure}\n{second}" if second else f"{failure} The export is {fallback}"
    if failure:
        raise SaveFailed(failure)
    return _dtype(assembly)


def _written(
    assembly: Assembly, tokenizer: PreTrainedTokenizerBase, target: Path, base: Mapping[str, Any] | None
) -> str:
    """Write the export on the first rank with the others' help. Returns there why it failed; otherwise empty."""
    tensors, failure = _tensors(assembly), ""
    if assembly.ranks.is_main:
        try:
            with written_aside(target) as aside:
                if assembly.adapter is not None:
                    write_adapter(assembly.adapter, dict(tensors), aside, None)
                    write_base(base, aside)
                else:
                    _write_model(assembly, tensors, aside)
                tokenizer.save_pretrained(aside)
        except SaveFailed as error:
            failure = str(error)
    for _ in tensors:
        pass
    return failure


def _has_failed(assembly: Assembly, failure: str) -> bool:
    """Whether the first rank has failed, on every rank."""
    has_failed = torch.tensor(int(bool(failure)), device=assembly.place.device)
    dist.broadcast(has_failed, src=0)
    return bool(has_failed)


def _dtype(assembly: Assembly) -> torch.dtype:
    return assembly.trained[0].dtype if assembly.adapter is not None else assembly.export_dtype


def _parts(assembly: Assembly) -> Iterator[tuple[str, Tensor]]:
    """Tensors to export, as they are held: parameters and persistent buffers by name."""
    if assembly.adapter is not None:
        from framework.build.adapters.adapter import adapter_state  # peft takes seconds to import

        named = assembly.adapter.model.state_dict()
        parts = {name: assembly.as_part(name, tensor) for name, tensor in named.items()}
        yield from adapter_state(assembly.adapter.model, parts)
        return
    model, saved = causal_model(assembly.model), set(causal_model(assembly.model).state_dict())
    yield from ((name, assembly.as_part(name, item.detach())) for name, item in model.named_parameters())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _tensors(assembly: Assembly) -> Iterator[tuple[str, Tensor]]:
    """The same tensors gathered, on the host and in the dtype of the export; every rank must iterate over all."""
    dtype = _dtype(assembly)
    for name, part in _parts(assembly):
        tensor = whole(part.detach())
        kept = dtype if tensor.is_floating_point() and assembly.adapter is None else tensor.dtype
        yield name, tensor.to("cpu", kept).contiguous() if assembly.ranks.is_main else tensor


def _write_model(assembly: Assembly, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    model, dtype = causal_model(assembly.model), assembly.export_dtype
    model.config.dtype = dtype
    shapes = {name: torch.empty(part.shape, dtype=dtype, device="meta") for name, part in _parts(assembly)}
    if set(revert_weight_conversion(model, dict(shapes))) != set(shapes):
        model.save_pretrained(folder, state_dict=dict(tensors))
    else:
        plan = split_torch_state_dict_into_shards(shapes, max_shard_size=LARGEST_FILE)
        _write_files(tensors, plan.filename_to_tensors, folder)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    verify_folder(folder, dtype, "model")


def _write_files(tensors: Iterator[tuple[str, Tensor]], files: dict[str, list[str]], folder: Path) -> None:
    """Write each file as soon as its tensors are complete; they arrive in the order in which they were assigned to
    files."""
    waiting = {file: set(names) for file, names in files.items()}
    owner = {name: file for file, names in files.items() for name in names}
    held: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for name, tensor in tensors:
        file = owner[name]
        held[file][name] = tensor
        waiting[file].discard(name)
        if not waiting[file]:
            written = held.pop(file)
            save_file(written, folder / file, metadata={"format": "pt"})
            verify_tensors(folder / file, written)
            del written
