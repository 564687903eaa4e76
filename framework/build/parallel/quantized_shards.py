"""Sharding of a 4-bit base.

`fully_shard` splits, gathers and frees parameters, casts floating dtypes to its gathering dtype, and does not know
about scales. So the quantized values of a layer, followed by their scales, are one parameter whose dtype only labels
bytes. It is the gathering dtype, so that no cast changes the bytes; they are still gathered as uint8, since CUDA's
copies of half precision canonicalize NaNs. Codes, offsets and the scales of nested scales (4 bytes for 16,384 weights)
are replicated on every rank.
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
"""Alignment in bytes: scales are read as float32 after the values, and the parameter may have dtype float32."""


class SplitLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
    """A linear layer that computes with the quantized values and scales in its gathered parameter.

    `weight` is flat, with dtype `quant_storage`. bitsandbytes' own forward would replace the gathered parameter.
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
        """Empty tensor for the layer's unquantized weights."""
        rows, columns = self.packing.shape
        shape = (columns, rows) if self.source_cls is Conv1D else (rows, columns)
        return torch.empty(shape, dtype=self.packing.dtype, device=device)

    def pack(self, matrix: Tensor) -> None:
        """Quantize the values of an `empty_matrix` to 4 bits, on its device."""
        weight = (matrix.T if self.source_cls is Conv1D else matrix).detach().contiguous()
        settings = {"quant_type": self.packing.quant_type, "compress_statistics": self.packing.nested}
        self.hold(bnb.nn.Params4bit(weight, requires_grad=False, **settings).to(weight.device))

    def hold(self, quantized: Any) -> None:
        """Store bitsandbytes' quantized values and scales as one parameter."""
        state: QuantState = quantized.quant_state
        parts = [quantized.detach().flatten(), state.absmax.view(torch.uint8)]
        missing = -sum(map(len, parts)) % _ALIGNED
        parts += [parts[0].new_zeros(missing)] if missing else []
        joined = torch.cat(parts).view(self.quant_storage).as_subclass(Tensor)
        whole = {"code": state.code}
        if state.nested:
            whole |= {"offset": state.offset, "nested_scales": state.state2.absmax, "nested_code": state.state2.code}
        for name, tensor in whole.items():
            self.register_buffer(name, tensor, persistent=False)
        self.quant_state = None  # it would hold the scales a second time
        self.packing = Packing(state.shape, state.dtype, state.quant_type, state.nested)
        self.weight = nn.Parameter(joined, requires_grad=False)
        of_peft = {"quant_type": state.quant_type, "compress_statistics": state.nested}  # peft reads them there
        self.weight.__dict__.update(quant_state=self.packing, **of_peft)


def store_as(storage: torch.dtype, model: PreTrainedModel) -> None:
    """Convert each quantized layer of a model, on meta or not, to one parameter with dtype `storage`.

    Raises RequestError with the layers whose bytes are not a multiple of its size.
    """
    layers = [(name, module) for name, module in model.named_modules() if type(module) is bnb.nn.Linear4bit]
    odd = [name for name, module in layers if module.weight.quant_state.shape.numel() % (2 * _ALIGNED)]
    if odd:
        layers_have = counted(len(odd), "layer has", "layers have")
        message = f"{layers_have} a number of weights that 8 does not divide, first {odd[0]}"
        works = "fsdp.enable_fsdp: false (each device holds the quantized base), or peft.q_lora: false"
        raise RequestError([Problem("peft.q_lora", f"{message}: their bytes cannot be split", expected=works)])
    for _, module in layers:
        module.__class__ = SplitLinear4bit
        module.quant_storage = storage
        module.hold(module.weight)


class GatheredBytes(FSDPParam):
    """FSDP's record of a quantized weight that is gathered as bytes.

    `torch._foreach_copy_`, the first step of gathering, converts half precision through float32 on CUDA, which changes
    all NaN patterns to one (0.09 % of the 16-bit values of normally distributed weights in nf4; bitsandbytes 0.50).
    """

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """This rank's shard, as bytes."""
        return [part.view(torch.uint8) for part in super().all_gather_inputs]

    def init_all_gather_outputs(self, *arguments: Any, **named: Any) -> None:
        """Allocate the gathered tensor, viewed in the parameter's dtype."""
        super().init_all_gather_outputs(*arguments, **named)
        self.all_gather_outputs = [whole.view(self.orig_dtype) for whole in self.all_gather_outputs]


def gather_as_bytes(records: Iterable[FSDPParam]) -> None:
    """Make torch gather the quantized weights among `records` as bytes."""
    for record in records:
        info = record._module_info
        if isinstance(info.module, SplitLinear4bit) and info.param_name == "weight":
            record.__class__ = GatheredBytes


def mark_parts(root: nn.Module) -> None:
    """Attach the quantization state to the sharded parameters below `root`, as it was attached to the full ones."""
    for module in root.modules():
        if isinstance(module, SplitLinear4bit):
            module.weight.__dict__["quant_state"] = module.packing
