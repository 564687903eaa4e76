"""Matrices that several devices share: which are in parts, and that all devices of a group predict the same."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from framework.build.assembly import Assembly
from framework.build.verify.predictions import few_tokens, is_alike, predicting
from framework.build.verify.reading import Reading
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.build.parallel.tensor_parallel import TensorParallel

KEY = "fsdp.tensor_parallel_size"
TOKENS = 8


def read_shared_matrices(assembly: Assembly) -> Iterator[Reading]:
    """What this rank holds of each planned matrix, and the predictions of a few tokens on all ranks of its group."""
    tensor = assembly.tensor
    if tensor is None:
        return
    named = dict(assembly.model.named_parameters())
    held = sum(
        named[name].shape[dimension] * tensor.size == tensor.lengths[name]
        for name, dimension in tensor.dimensions.items()
    )
    asked, found = (f"1/{tensor.size} of {counted(count, 'tensor')}" for count in (len(tensor.dimensions), held))
    yield Reading(KEY, asked, found, f"parameters of this rank: {_shapes(tensor, assembly.model)}; all else is whole")
    asked = f"the same on {tensor.size} devices"
    difference = _difference(assembly, tensor)
    found = asked if is_alike(assembly, difference) else f"predictions differ by {difference:.0%}"
    yield Reading(KEY, asked, found, f"logits of {TOKENS} tokens, which differ by {difference:.0e} in a group")


def _shapes(tensor: "TensorParallel", model: nn.Module) -> str:
    """The parts of the matrices of a block, each kind once."""
    shapes: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in tensor.dimensions and parameter.dim() == 2:
            kind = ".".join(part for part in name.split(".")[-4:-1] if part not in ("base_layer", "default"))
            shapes.setdefault(".".join(kind.split(".")[-2:]), "x".join(map(str, parameter.shape)))
    return ", ".join(f"{kind} {shape}" for kind, shape in shapes.items())


def _difference(assembly: Assembly, tensor: "TensorParallel") -> float:
    """How far the logits of this rank's group are from each other, relative to their size."""
    with predicting(assembly) as predict, assembly.attention:
        logits = predict(few_tokens(assembly, TOKENS))
    most, least = logits.clone(), logits.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, tensor.group)
    dist.all_reduce(least, dist.ReduceOp.MIN, tensor.group)
    return float((most - least).norm() / most.norm())
