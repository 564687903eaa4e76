"""A base in 4 bits whose layers are split over the ranks.

`fully_shard` splits, gathers and frees parameters, casts those of a floating dtype to the dtype that it gathers in, and
knows nothing of scales next to them. So the packed numbers of a layer and, behind them, their scales are one parameter,
whose dtype is only a name for bytes. It is the dtype of gathering, so that no cast takes the bytes for numbers; still
they are gathered as bytes, since what CUDA copies of half precision has one NaN for all. Codes, offsets and the scales
of nested scales (4 bytes for 16,384 weights) are whole on every rank.
"""

from collections.abc import Iterable
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.quantize import BLOCK, NESTED_BLOCK, Packing
from framework.errors import Problem, RequestError
from framework.schema.plural import counted

_ALIGNED = 4
"""Bytes: scales are read as float32 behind the numbers, and either may be stored as float32."""


class SplitLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
    """A linear layer that computes with the packed numbers and scales of its gathered parameter.

    `weight` is one row of numbers of `quant_storage`. bitsandbytes' own forward would put another parameter in the
    place of the gathered one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of `x`."""
        numbers, state = self._read()
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product: Tensor = bnb.matmul_4bit(x.to(self.compute_dtype), numbers, bias=bias, quant_state=state)
        return product.to(x.dtype)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        nn.Module._save_to_state_dict(self, *arguments)  # the scales are in the weight

    def _read(self) -> tuple[Tensor, QuantState]:
        held: Packing = self.packing
        count = held.shape.numel()
        end = count // 2 // self.quant_storage.itemsize
        scales = self.weight[end:].view(torch.uint8 if held.nested else torch.float32)[: -(-count // BLOCK)]
        settings = {"shape": held.shape, "quant_type": held.quant_type, "dtype": held.dtype, "blocksize": BLOCK}
        nested = {}
        if held.nested:
            of_scales = {"absmax": self.nested_scales, "code": self.nested_code, "blocksize": NESTED_BLOCK}
            nested = {"offset": self.offset, "state2": QuantState(**of_scales, dtype=torch.float32)}
        return self.weight[:end], QuantState(absmax=scales, code=self.code, **settings, **nested)

    def empty_matrix(self, device: torch.device) -> Tensor:
        """Room for the layer's weights as the model without packing has them."""
        rows, columns = self.packing.shape
        shape = (columns, rows) if self.source_cls is Conv1D else (rows, columns)
        return torch.empty(shape, dtype=self.packing.dtype, device=device)

    def pack(self, matrix: Tensor) -> None:
        """Hold the values of an `empty_matrix`, in 4 bits and on its device."""
        weight = (matrix.T if self.source_cls is Conv1D else matrix).detach().contiguous()
        settings = {"quant_type": self.packing.quant_type, "compress_statistics": self.packing.nested}
        self.hold(bnb.nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device))

    def hold(self, packed: Any) -> None:
        """Hold what bitsandbytes has packed, numbers and scales as one."""
        state: QuantState = packed.quant_state
        parts = [packed.detach().flatten(), state.absmax.view(torch.uint8)]
        missing = -sum(map(len, parts)) % _ALIGNED
        parts += [parts[0].new_zeros(missing)] if missing else []
        joined = torch.cat(parts).view(self.quant_storage).as_subclass(Tensor)
        whole = {"code": state.code}
        if state.nested:
            whole |= {"offset": state.offset, "nested_scales": state.state2.absmax, "nested_code": state.state2.code}
        for name, tensor in whole.items():
            self.register_buffer(name, tensor, persistent=False)
        self.quant_state = None  # with the scales once more
        self.packing = Packing(state.shape, state.dtype, state.quant_type, state.nested)
        self.weight = nn.Parameter(joined, requires_grad=False)
        of_peft = {"quant_type": state.quant_type, "compress_statistics": state.nested}  # which reads them there
        self.weight.__dict__.update(quant_state=self.packing, **of_peft)


def store_as(storage: torch.dtype, model: PreTrainedModel) -> None:
    """Hold each packed layer of a model, on meta or not, as one parameter of the dtype `storage`.

    Raises RequestError naming the layers whose bytes make no whole numbers of it.
    """
    layers = [(name, module) for name, module in model.named_modules() if type(module) is bnb.nn.Linear4bit]
    odd = [name for name, module in layers if module.weight.quant_state.shape.numel() % (2 * _ALIGNED)]
    if odd:
        layers_have = counted(len(odd), "layer has", "layers have")
        message = f"{layers_have} a number of weights that 8 does not divide, first {odd[0]}"
        works = "fsdp.enable_fsdp: false (each device holds the packed base), or peft.q_lora: false"
        raise RequestError([Problem("peft.q_lora", f"{message}: their bytes cannot be split", expected=works)])
    for _, module in layers:
        module.__class__ = SplitLinear4bit
        module.quant_storage = storage
        module.hold(module.weight)


class GatheredBytes(FSDPParam):
    """torch's record of a packed weight, which is put together from bytes.

    `torch._foreach_copy_`, which gathering begins with, takes half precision through float32 on CUDA: words that would
    be NaN come out as one and the same (0.09 % of the bfloat16 words of normal weights in nf4; bitsandbytes 0.50).
    """

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """This rank's part, as bytes."""
        return [part.view(torch.uint8) for part in super().all_gather_inputs]

    def init_all_gather_outputs(self, *arguments: Any, **named: Any) -> None:
        """Room for the whole, which those who read it know by the dtype of the parts."""
        super().init_all_gather_outputs(*arguments, **named)
        self.all_gather_outputs = [whole.view(self.orig_dtype) for whole in self.all_gather_outputs]


def gather_as_bytes(records: Iterable[FSDPParam]) -> None:
    """Have torch gather the packed weights among `records` as the bytes that they are."""
    for record in records:
        info = record._module_info
        if isinstance(info.module, SplitLinear4bit) and info.param_name == "weight":
            record.__class__ = GatheredBytes


def mark_parts(root: nn.Module) -> None:
    """After the layers below `root` were split: what the parts stand for is found at them, as it was at the whole."""
    for module in root.modules():
        if isinstance(module, SplitLinear4bit):
            module.weight.__dict__["quant_state"] = module.packing
