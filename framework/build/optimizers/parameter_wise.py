"""One optimizer for each parameter: its step can come during backward, and its states can live off the device."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.build.launches import note_launch
from framework.build.levers.offload import pinning
from framework.build.optimizers.weights_average import AVERAGE
from framework.build.place import Place
from framework.errors import Problem, RequestError
from framework.memory.trace import LINK_COPY, UNPINNED_COPY, WAIT, Launcher


@dataclass(frozen=True)
class StateStore:
    """Where states stay between two steps: host memory, pinned for a CUDA card, or files in `folder`."""

    place: Place
    folder: Path | None

    def hold(self, like: Tensor, name: str) -> Tensor:
        """An empty tensor in the store, with the shape and dtype of `like`. Raises RequestError if the disk is full."""
        if self.place.rehearsed:
            on_card = self.place.kind == "cuda"  # one shared element in the host's name: a rehearsal takes no memory
            return torch.zeros((), dtype=like.dtype, device="cpu").expand(like.shape) if on_card else like.clone()
        if self.folder is not None:
            return _mapped(self.folder / f"optimizer-{os.getpid()}-{name}", like)
        with pinning(like.nbytes):
            return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self.place.kind == "cuda")

    def note_copies(self, state: Tensor) -> None:
        """Tell a rehearsal, whose one step creates the states, of the copies to the device and back in later steps."""
        for _ in ("to the device", "back"):
            if self.folder is None:
                note_launch(LINK_COPY, state.nbytes, Launcher.TORCH)
            else:  # files are not pinned, so CUDA returns when the copy is done
                note_launch(UNPINNED_COPY, state.nbytes, Launcher.TORCH)
                note_launch(WAIT, 0, Launcher.TORCH)


def _mapped(file: Path, like: Tensor) -> Tensor:
    """A memory-mapped tensor. The file's name is removed at once, so that nothing is left behind; its disk space is
    allocated now, because a full disk would kill the process later.
    """
    size = like.numel() * like.element_size()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # left by a killed process
        with file.open("xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
        tensor = torch.from_file(str(file), shared=True, size=like.numel(), dtype=like.dtype, device="cpu")
    except OSError as error:
        message = f"{size:,} bytes of optimizer states cannot be kept there: {error}"
        raise RequestError([Problem("training.optimizer_offload_folder", message)]) from None
    finally:
        file.unlink(missing_ok=True)
    return tensor.view(like.shape)


class ParameterWise(torch.optim.Optimizer):
    """`parts`, one optimizer a parameter, as one. They share each parameter's state, and their groups, with it.

    With a `store`, a parameter's states come to its device for its own update only: the device holds those of one
    parameter at a time. The copies are ordered on the current stream and not overlapped with compute.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], store: StateStore | None) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.parts = {parameter: part for part in parts for parameter in part.param_groups[0]["params"]}
        self.store = store
        self.stepped: set[Tensor] = set()
        """Parameters updated since gradients were last cleared."""
        self.held: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        """The store's tensors by parameter and name of the state."""
        self._numbers = {parameter: number for number, parameter in enumerate(self.parts)}
        self.defaults, self.param_groups = parts[0].defaults, groups
        self.state = defaultdict(dict, {parameter: part.state[parameter] for parameter, part in self.parts.items()})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, one after the other."""
        for parameter in self.parts:
            if parameter.grad is not None:
                self.step_parameter(parameter)

    def step_parameter(self, parameter: Tensor) -> None:
        """Update one parameter."""
        if self.store is not None:
            for key, value in self.state[parameter].items():
                if moves(key, value):
                    self.state[parameter][key] = value.to(parameter.device, non_blocking=True)
        self.parts[parameter].step()
        self.stepped.add(parameter)
        self.stow(parameter)

    @torch.no_grad()
    def stow(self, parameter: Tensor) -> None:
        """Move the states of a parameter to the store, if there is one."""
        if self.store is None:
            return
        state, held = self.state[parameter], self.held[parameter]
        for key, value in state.items():
            if not moves(key, value):
                continue
            if key not in held:
                held[key] = self.store.hold(value, f"{self._numbers[parameter]}-{key}")
            if value is not held[key]:
                if self.store.place.rehearsed:
                    self.store.note_copies(value)
                else:
                    held[key].copy_(value, non_blocking=True)
                state[key] = held[key]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and the record of updated parameters."""
        self.stepped.clear()
        super().zero_grad(set_to_none)


def moves(key: str, value: Any) -> bool:
    """Whether a state is offloaded; step counts and the average of the weights are not."""
    return isinstance(value, Tensor) and value.dim() > 0 and key != AVERAGE
