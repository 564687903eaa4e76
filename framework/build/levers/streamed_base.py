"""`model.offload_frozen_base`: frozen weights of the transformer blocks stay in host memory and are streamed to the
device.

Each block's frozen weights are one contiguous buffer on the host (its home), pinned on a GPU machine. The device has
two slots; block i is copied to slot i mod 2 while the block before it (after it, in backward) computes. Weights saved
by autograd, the parameter or a view of it, stay valid: the parameter's data is swapped between home and slot, and a
view reads the slot, into which the block is copied again before its backward. Copying into a slot changes no
parameter's version counter, since `parameter.data = ...` shares bytes and not the counter.
"""

import mmap
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.levers.offload import could_not_pin
from framework.build.model.parts import transformer_blocks
from framework.build.place import Place
from framework.errors import Problem, RequestError

KEY = "model.offload_frozen_base"
SLOTS = 2
_ALIGNMENT, _PAGE = 256, 4096


def loading_place(place: Place) -> Place:
    """The place where a streamed base is loaded and adapted: host memory."""
    return place if place.rehearsed else Place(torch.device("cpu"), place.kind)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks in the order of the model, outermost ones only."""
    blocks: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in transformer_blocks(model):
        if module not in inner:
            blocks.append(module)
            inner |= set(module.modules())
    return blocks


class Block:
    """One block's frozen weights: `home` has their bytes, `parts` each parameter with its view of home and of slot."""

    def __init__(self, parameters: Sequence[nn.Parameter], home: Tensor) -> None:
        self.home = home
        self.parts: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.views = list(_views(parameters, home))
        for parameter, view in zip(parameters, self.views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self._parameters = parameters

    def connect(self, slot: Tensor) -> None:
        """Assign the block's slot on the device."""
        on_device = _views(self._parameters, slot)
        self.parts = list(zip(self._parameters, self.views, on_device, strict=True))

    def show(self, on_device: bool) -> None:
        """Point the parameters to the slot or to the home."""
        for parameter, home, slot in self.parts:
            parameter.data = slot if on_device else home


class StreamedBase:
    """Streams the blocks' frozen weights from the host by hooks.

    `copied_bytes` counts bytes copied to the device.
    """

    def __init__(self, model: nn.Module, place: Place) -> None:
        """Move the frozen weights of `model`'s blocks to the host, and everything else to the place's device.

        Raises RequestError for a model without blocks, and if host memory cannot be pinned.
        """
        modules = blocks_of(model)
        if not modules:
            message = "this model class has no blocks to stream"
            raise RequestError([Problem(KEY, message, expected="false, or peft.q_lora=true for a smaller base")])
        self.place = place
        self.copied_bytes = 0
        self.parameters: set[nn.Parameter] = set()
        self._addresses: list[int] = []
        self._finalizer = weakref.finalize(self, _unpin, self._addresses)
        self.blocks = [self._bring_home(parameters) for parameters in _streamable(model, modules)]
        move_rest(model, place.device, self.parameters)
        sizes = [len(block.home) for block in self.blocks]
        self.slots = [_bytes(max(sizes[number::SLOTS]), place.device) for number in range(min(SLOTS, len(sizes)))]
        for number, block in enumerate(self.blocks):
            block.connect(self.slots[number % SLOTS])
        self._held: dict[int, int] = {}  # slot -> block in it
        self._shown: set[int] = set()
        self._task = -1  # id of autograd's last backward pass
        is_real_card = place.kind == "cuda" and not place.rehearsed
        self._stream = torch.cuda.Stream(place.device) if is_real_card else None  # type: ignore[no-untyped-call]
        self._arrived = [torch.cuda.Event() for _ in self.slots] if is_real_card else []  # type: ignore[no-untyped-call]
        self._handles = [handle for number, module in enumerate(modules) for handle in self._hook(module, number)]

    def _bring_home(self, parameters: list[nn.Parameter]) -> Block:
        size = sum(_padded(parameter) for parameter in parameters)
        home = _host_bytes(size, self.place)
        block = Block(parameters, home)
        if self.place.kind == "cuda" and not self.place.rehearsed and size:
            # Pin in place. torch's pinned memory would be a second copy, rounded up to powers of two.
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(home.data_ptr(), -(-len(home) // _PAGE) * _PAGE, 0))
            if error:
                message = could_not_pin(len(home), f"CUDA error {error}")
                raise RequestError(
                    [Problem(KEY, message, expected="more memory that may be locked (ulimit -l), or false")]
                )
            self._addresses.append(home.data_ptr())
        self.parameters |= set(parameters)
        return block

    @property
    def homes(self) -> list[Tensor]:
        """Each block's bytes in host memory."""
        return [block.home for block in self.blocks]

    @property
    def bytes_per_micro_batch(self) -> int:
        """Bytes copied in one forward and backward pass: the blocks that are not already in a slot."""
        return sum(map(len, self.homes[SLOTS:])) + self.bytes_in_backward if len(self.homes) > SLOTS else 0

    @property
    def bytes_in_backward(self) -> int:
        """Bytes copied in the backward pass, which starts with the last blocks in the slots."""
        return sum(map(len, self.homes[:-SLOTS]))

    # -- hooks of a block
    def _hook(self, module: nn.Module, number: int) -> Iterator[Any]:
        yield module.register_forward_pre_hook(lambda module, inputs: self._before_forward(number), prepend=True)
        yield module.register_forward_hook(
            lambda module, inputs, output: self._after_forward(number, output), always_call=True
        )

    def _before_forward(self, number: int) -> None:
        if _in_backward():  # a checkpoint recomputes the block
            self._before_backward(number)
        else:
            self._use(number)
            self._fetch(number + 1)

    def _after_forward(self, number: int, output: Any) -> None:
        if _in_backward():
            return  # the block's own backward follows
        self._show(number, on_device=False)
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda grad: self._before_backward(number))  # type: ignore[no-untyped-call]

    def _before_backward(self, number: int) -> None:
        """Called when the gradient of the block's output is complete, after the backward of later blocks."""
        if self._task != torch._C._current_graph_task_id():
            self._task = torch._C._current_graph_task_id()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._hide_but(None))
        self._use(number)
        self._fetch(number - 1)

    def _hide_but(self, number: int | None) -> None:
        for done in self._shown - {number}:
            self._show(done, on_device=False)

    # -- moving
    def _use(self, number: int) -> None:
        """Bring the block into its slot, ordered on the current stream, with only its parameters pointing there."""
        self._hide_but(number)
        self._fetch(number)
        if self._stream is not None:
            torch.cuda.current_stream(self.place.device).wait_event(self._arrived[number % SLOTS])
        self._show(number, on_device=True)

    def _fetch(self, number: int) -> None:
        """Start the block's copy into its slot unless it is there, after the slot's last use."""
        slot = number % SLOTS
        if not 0 <= number < len(self.blocks) or self._held.get(slot) == number:
            return
        home = self.blocks[number].home
        self._held[slot] = number
        self.copied_bytes += len(home)
        if self.place.rehearsed:
            return
        with torch.no_grad():
            if self._stream is None:
                self.slots[slot][: len(home)].copy_(home)
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.place.device))
            with torch.cuda.stream(self._stream):
                self.slots[slot][: len(home)].copy_(home, non_blocking=True)
                self._arrived[slot].record(self._stream)

    def _show(self, number: int, on_device: bool) -> None:
        self.blocks[number].show(on_device)
        (self._shown.add if on_device else self._shown.discard)(number)

    def dissolve(self, model: nn.Module) -> None:
        """Restore a plain model: separate host memory for every parameter, and no hooks."""
        for handle in self._handles:
            handle.remove()
        if self._stream is not None:
            self._stream.synchronize()
        self._finalizer()
        self.slots.clear()
        for block in self.blocks:
            for parameter, home, _ in block.parts:
                parameter.data = home.clone()
            block.parts, block.views, block.home = [], [], block.home[:0].clone()
        move_rest(model, torch.device("cpu"), set())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def move_rest(model: nn.Module, device: torch.device, but: set[nn.Parameter]) -> None:
    """Move parameters and buffers to `device`, except some."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in but and tensor.device.type != device.type and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _streamable(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """The frozen parameters of each block; shared ones stay on the device."""
    owned = [set(module.parameters()) for module in modules]
    within = {inner for module in modules for inner in module.modules()}
    outside = {
        parameter
        for module in model.modules()
        if module not in within
        for parameter in module.parameters(recurse=False)
    }
    owners = Counter(parameter for parameters in owned for parameter in parameters)
    for module in modules:
        yield [
            parameter
            for parameter in module.parameters()
            if not parameter.requires_grad and owners[parameter] == 1 and parameter not in outside
        ]


def _padded(parameter: Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // _ALIGNMENT) * _ALIGNMENT


def _views(parameters: Sequence[nn.Parameter], flat: Tensor) -> Iterator[Tensor]:
    """Each parameter's part of `flat`, bytes, as a tensor of its dtype and shape."""
    start = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        yield flat[start : start + size].view(parameter.dtype).view(parameter.shape)
        start += _padded(parameter)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _host_bytes(size: int, place: Place) -> Tensor:
    """Host pages of their own, to be pinned separately, since `is_pinned` checks the start of a storage."""
    if place.rehearsed:
        return _bytes(size, place.device)
    if size == 0:
        return _bytes(0, torch.device("cpu"))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unpin(addresses: list[int]) -> None:
    runtime: Any = torch.cuda.cudart() if addresses else None  # type: ignore[no-untyped-call]
    while addresses:
        runtime.cudaHostUnregister(addresses.pop())
