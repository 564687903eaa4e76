"""Optimizers of bitsandbytes and torchao, whose states are codes of 8 or 4 bits or lie in managed memory."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from framework.build.launches import note_launch
from framework.build.optimizers.row import Groups, Looked, Row, State, Trained, betas_of, made_of
from framework.build.ranks import local_part
from framework.memory.trace import PREFETCH, WAIT, Launcher
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


@dataclass(frozen=True)
class LowBit:
    """What a class keeps for each parameter: `states` tensors of `bits`, a float32 scale for every `block` elements.

    Parameters of fewer than SMALLEST elements, or that `block` does not divide where it must (`even`), keep plain
    states; `paged` ones are in managed memory from PAGED_FROM elements on.
    """

    module: str
    name: str
    states: int
    bits: int
    block: int
    paged: bool = False
    even: bool = False

    def is_coded(self, count: int) -> bool:
        """Whether a parameter of `count` elements has quantized states."""
        return self.bits < 32 and count >= SMALLEST and not (self.even and count % self.block)

    def is_paged(self, count: int) -> bool:
        """Whether its states are in managed memory on a CUDA card."""
        return self.paged and count >= PAGED_FROM


_BNB, _AO = "bitsandbytes.optim", "torchao.optim"
LOW_BIT: Mapping[Optimizer, LowBit] = {
    Optimizer.ADAMW_8BIT: LowBit(_BNB, "AdamW8bit", 2, 8, 256),
    Optimizer.PAGED_ADAMW_8BIT: LowBit(_BNB, "PagedAdamW8bit", 2, 8, 256, paged=True),
    Optimizer.PAGED_ADAMW_32BIT: LowBit(_BNB, "PagedAdamW32bit", 2, 32, 256, paged=True),
    Optimizer.LION_8BIT: LowBit(_BNB, "Lion8bit", 1, 8, 256),
    Optimizer.PAGED_LION_8BIT: LowBit(_BNB, "PagedLion8bit", 1, 8, 256, paged=True),
    Optimizer.ADAMW_TORCHAO_8BIT: LowBit(_AO, "AdamW8bit", 2, 8, 256, even=True),
    Optimizer.ADAMW_TORCHAO_4BIT: LowBit(_AO, "AdamW4bit", 2, 4, 128, even=True),
}
"""Read from bitsandbytes 0.50.2 and torchao 0.18.0; tests compare with what their classes build."""

SMALLEST, PAGED_FROM = 4096, 100_000
"""Elements from which states are codes, and from which they are paged (bitsandbytes/optim/optimizer.py)."""


def low_bit_class(choice: Optimizer) -> Any:
    """The library's class. Raises ImportError where the library is not installed: `check` has said so before."""
    row = LOW_BIT[choice]
    return getattr(importlib.import_module(row.module), row.name)


class RehearsedLowBit(torch.optim.Optimizer):
    """Stands in a rehearsal for a class of LOW_BIT: the same states at the same moment, no arithmetic.

    The real ones compute in kernels without temporaries (bitsandbytes), or in compiled code whose temporaries are not
    known (torchao). So a plan needs neither package.
    """

    def __init__(self, params: Any, lr: float, row: LowBit) -> None:
        super().__init__(params, {"lr": lr})
        self.row = row

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the states of each parameter that has a gradient and has none yet, and tell of the launches.

        bitsandbytes waits for the device after each parameter (Optimizer8bit.step), torchao does not.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._make(state, parameter)
                moved = 2 * (sum(map(_nbytes, (parameter, *state.values())))) + _nbytes(parameter.grad)
                if self.row.even:
                    note_launch("torchao_update", moved, Launcher.COMPILED)
                else:
                    bits = 8 if self.row.is_coded(parameter.numel()) else 32
                    if self.row.is_paged(parameter.numel()):
                        note_launch(PREFETCH, 0, Launcher.BITSANDBYTES, tensors=self.row.states)
                    note_launch(f"bitsandbytes_update_{bits}", moved, Launcher.BITSANDBYTES)
                    note_launch(WAIT, 0, Launcher.BITSANDBYTES)

    def _make(self, state: dict[str, Any], parameter: Tensor) -> None:
        row, count = self.row, parameter.numel()
        coded = row.is_coded(count)
        plain = parameter.dtype if row.even else torch.float32
        numbers = range(1, row.states + 1)
        for number in numbers:
            if coded and row.even:
                state[f"state{number}"] = torch.empty(count * row.bits // 8, dtype=torch.uint8, device=parameter.device)
                state[f"absmax{number}"] = torch.empty(count // row.block, device=parameter.device)
                state[f"qmap{number}"] = torch.empty(1 << row.bits, device=parameter.device)
            elif row.is_paged(count):
                state[f"state{number}"] = managed(parameter.shape, torch.uint8 if coded else torch.float32)
            else:
                state[f"state{number}"] = torch.empty_like(parameter, dtype=torch.uint8 if coded else plain)
        for number in numbers if coded and not row.even else ():
            state[f"absmax{number}"] = torch.empty(-(-count // row.block), device=parameter.device)


def _nbytes(state: Tensor) -> int:
    return state.numel() * state.element_size()  # paged states too, which have one element here


def managed(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that claims to be in managed memory, as bitsandbytes marks its own; it takes none here."""
    tensor = torch.zeros((), dtype=dtype, device="cpu").expand(shape)
    tensor.is_paged = True  # type: ignore[attr-defined]
    return tensor


def is_managed(tensor: Tensor) -> bool:
    """Whether the tensor is in managed memory; its reported device is the CPU."""
    return bool(getattr(tensor, "is_paged", False))


def forget_pages(optimizer: torch.optim.Optimizer) -> None:
    """Drop bitsandbytes' extra references to paged states, so that dropped states are freed."""
    for part in (optimizer, *getattr(optimizer, "parts", {}).values()):
        if type(part).__module__.startswith("bitsandbytes"):
            part.page_mng.paged_tensors.clear()


def parts_of(state: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, plain tensor) of what this rank holds of a state: nothing of a number, itself without a name, or its inner
    tensors."""
    state = local_part(state)
    if hasattr(state, "__tensor_flatten__"):
        for inner in state.__tensor_flatten__()[0]:
            yield inner, getattr(state, inner)
    elif isinstance(state, Tensor):
        yield "", state


def _make(choice: Optimizer, training: TrainingParams, groups: Groups, trained: Trained) -> torch.optim.Optimizer:
    row = LOW_BIT[choice]
    if trained.place.rehearsed:
        return RehearsedLowBit(groups, training.learning_rate, row)
    epsilon = {"eps": training.adam_epsilon} if row.states == 2 else {}
    made: torch.optim.Optimizer = low_bit_class(choice)(
        groups, lr=training.learning_rate, betas=betas_of(training), **epsilon
    )
    return made


def _is_one(choice: Optimizer, made: torch.optim.Optimizer) -> bool:
    return type(made) is low_bit_class(choice)


def _states(row: LowBit, training: TrainingParams, looked: Looked) -> Iterator[State]:
    count = looked.tensor.numel()
    coded, paged = row.is_coded(count), looked.on_card and row.is_paged(count)
    if row.even:
        for name in ("exp_avg", "exp_avg_sq"):
            inner = [("codes", "uint8"), ("scale", "float32"), ("qmap", "float32")]
            yield from ((f"{name}.{part}", kind) for part, kind in inner) if coded else [(name, looked.dtype)]
        return
    for number in range(1, row.states + 1):
        yield f"state{number}", made_of(torch.uint8 if coded else torch.float32, paged)
        if coded:
            yield f"absmax{number}", "float32"
            yield f"qmap{number}", "float32"


ROWS = {
    choice: Row(partial(_make, choice), partial(_is_one, choice), partial(_states, row))
    for choice, row in LOW_BIT.items()
}
