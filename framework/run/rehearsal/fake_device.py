"""Fake device: tensors without storage that claim to be on a given card, so that the real step can be rehearsed
anywhere.

Meta tensors report `cuda:0` as their device, CUDA's autocast is emulated, attention and dropout use the kernels that
the card would use, and the few places in torch that require a real GPU are patched. Everything is restored on exit; the
mode is used only in separate processes (`framework.run.planning.plan_pool`).

Private names of torch used here (checked by tests/run/rehearsal/test_fake_device.py):
`torch.autograd._engine_run_backward`,
`torch.utils._foreach_utils`, `torch.cuda.amp.common.amp_definitely_not_available`,
`torch.utils.checkpoint._allowed_determinism_checks_to_fns`, the `aten._scaled_dot_product_*` operators.
"""

import contextlib
import importlib
import math
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.cuda.amp.common
import torch.nn.functional as functional
import torch.utils._foreach_utils
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from framework.errors import Problem, RequestError
from framework.memory.attention import Backend, choose_backend
from framework.memory.cards import capability_of, supports_bf16
from framework.run.rehearsal.fake_functions import HALF_DTYPES, Autocast, Patches, stand_in
from framework.run.rehearsal.kernels import describe_attention
from framework.schema.gpu import GPUParams

META = torch.device("meta")
CPU = "cpu"
"""Name of the card entry for training without a card."""
_DEVICE = torch.Tensor.device
_IS_CUDA = torch.Tensor.is_cuda
_IS_META = torch.Tensor.is_meta
_ATTENTION = functional.scaled_dot_product_attention
_DROPOUTS = frozenset({functional.dropout, torch.dropout})
_DETERMINISM = "_allowed_determinism_checks_to_fns"


def is_on_card(tensor: torch.Tensor) -> bool:
    """Whether `tensor` claims to be on the card: its true device is meta."""
    return bool(_DEVICE.__get__(tensor).type == "meta")


class FakeDeviceMode(TorchFunctionMode):
    """Function mode in which meta tensors claim to be on `device`. `read_values` lists the operations that asked for a
    tensor's values on the host."""

    def __init__(self, card: GPUParams) -> None:
        super().__init__()
        self.card = card
        self.device = torch.device("cpu") if card.name == CPU else torch.device("cuda", 0)
        self.autocast = Autocast(self.device.type, is_on_card)
        self.read_values: list[str] = []
        self.on_empty_cache: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        self.tracing = False
        """Whether torch is capturing a graph, during which backward must not enter the mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._get_property(func, args, kwargs)
        if args and isinstance(args[0], torch.Tensor) and (handler := _TENSOR_METHODS.get(name)) is not None:
            return handler(self, func, args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = self._true_device(kwargs["device"])
        if func in _DROPOUTS and self.device.type == "cuda":
            return self._dropout(func, args, kwargs)
        run = partial(attend, self.card) if func is _ATTENTION and is_on_card(args[0]) else func
        # `out=` overloads are not autocast
        if torch.is_autocast_enabled(self.device.type) and kwargs.get("out") is None:
            return self.autocast.call(func, run, args, kwargs)
        return run(*args, **kwargs)

    def _true_device(self, value: Any) -> Any:
        """Map the fake device in any spelling to meta; anything else is unchanged."""
        if isinstance(value, str | torch.device) and torch.device(value).type == self.device.type:
            return META
        return value

    def _get_property(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # method wrappers are created on each access: compare their descriptor
        descriptor = getattr(func, "__self__", None)
        if descriptor is _IS_META:
            return False
        value = func(*args, **kwargs)
        if descriptor is _DEVICE:
            return self.device if value.type == "meta" else value
        if descriptor is _IS_CUDA:
            return value or (self.device.type == "cuda" and is_on_card(args[0]))
        return value

    def _get_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return 0 if is_on_card(args[0]) else func(*args, **kwargs)

    def _move_to_card(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].to(META)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "device" in kwargs:
            kwargs["device"] = self._true_device(kwargs["device"])
        return func(args[0], *(self._true_device(value) for value in args[1:]), **kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Values for a tensor without storage: zeros in one shared element, which take no host memory."""
        if not is_on_card(args[0]) or (func.__name__ == "cpu" and self.device.type == "cpu"):
            return func(*args, **kwargs)
        self.read_values.append(func.__name__)
        self.on_wait()
        zeros = torch.zeros((), dtype=args[0].dtype, device="cpu").expand(args[0].shape)
        return zeros if func.__name__ == "cpu" else getattr(zeros, func.__name__)()

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In-place random initialization: nothing to do, while torch's meta kernel would spend time on shapes."""
        return args[0] if is_on_card(args[0]) else func(*args, **kwargs)

    @staticmethod
    def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Dropout as CUDA's fused kernel, which keeps a one-byte mask; the composite on meta keeps a full one."""
        tensor, *rest = args
        probability = kwargs.get("p", rest[0] if rest else 0.5)
        training = kwargs.get("training", kwargs.get("train", rest[1] if len(rest) > 1 else True))
        if training and 0 < probability < 1 and is_on_card(tensor):
            return torch.native_dropout(tensor, probability, True)[0]
        return func(*args, **kwargs)


_TENSOR_METHODS: Mapping[str, Callable[..., Any]] = {
    "get_device": FakeDeviceMode._get_device,
    "normal_": FakeDeviceMode._draw,
    "uniform_": FakeDeviceMode._draw,
    "cuda": FakeDeviceMode._move_to_card,
    "to": FakeDeviceMode._move,
    "cpu": FakeDeviceMode._read,
    "numpy": FakeDeviceMode._read,
    "tolist": FakeDeviceMode._read,
}


def attend(
    card: GPUParams,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run scaled_dot_product_attention as on `card`. Queries and result are (batch, heads, rows, width).

    On meta the C++ function always takes the math path, so the card's kernel is called directly, with inputs prepared
    as in aten/src/ATen/native/transformers/attention.cpp. Raises RequestError if none of the kernels enabled by
    `torch.nn.attention.sdpa_kernel` supports the call.
    """
    call = describe_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    allowed = frozenset(backend for backend, is_on in _SWITCHES.items() if is_on())
    backend = choose_backend(card, call, allowed)
    if backend is None:
        dtype = str(query.dtype).removeprefix("torch.")
        facts = f"{call.heads} heads over {call.kv_heads} keys, width {call.head_dim}, {dtype}"
        message = f"{', '.join(allowed)} cannot serve this attention on {card.name} ({facts})"
        nearest = choose_backend(card, call)
        raise RequestError([Problem("model.sdpa_backend", message, expected=f"{nearest}, or leave it unset")])
    if backend is Backend.MATH:
        return _attend_by_definition(card, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    aten: Any = torch.ops.aten
    output: torch.Tensor
    scale = 1 / math.sqrt(call.head_dim) if scale is None else scale
    if backend is Backend.CPU_FLASH:
        bias = _bias(attn_mask, query, key, aligned=False)
        output, *_ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
        return output
    if backend is Backend.FLASH:
        if padding := -call.head_dim % 8:
            query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
        output, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return output[..., : call.head_dim] if padding else output
    bias = _bias(attn_mask, query, key, aligned=backend is Backend.EFFICIENT)
    if backend is Backend.CUDNN:
        output, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, call.requires_grad, dropout_p, is_causal, False, scale=scale
        )
        return output
    if enable_gqa and call.kv_heads != call.heads:
        key, value = (tensor.repeat_interleave(call.heads // call.kv_heads, 1) for tensor in (key, value))
    output, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, call.requires_grad, dropout_p, is_causal, scale=scale
    )
    return output


_SWITCHES: Mapping[Backend, Callable[[], bool]] = {
    Backend.CUDNN: torch.backends.cuda.cudnn_sdp_enabled,
    Backend.FLASH: torch.backends.cuda.flash_sdp_enabled,
    Backend.EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled,
    Backend.MATH: torch.backends.cuda.math_sdp_enabled,
}
"""Switches of `sdpa_kernel`; the same on the CPU, whose flash kernel uses CUDA's switch."""


def _attend_by_definition(
    card: GPUParams,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """_scaled_dot_product_attention_math (attention.cpp), but with the mask added in place, which under any mode the
    original does not do."""
    dtype, heads = query.dtype, query.shape[1]
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, dtype)
    if dtype in HALF_DTYPES:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    query = query * factor
    if causal:
        mask = _additive(torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=META).tril(), query.dtype)
    if enable_gqa and key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], 1) for tensor in (key, value))
    scores = query @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    weights = torch._safe_softmax(scores, -1)
    del scores
    if dropout:
        on_cpu = card.name == CPU
        weights = torch.dropout(weights, dropout, True) if on_cpu else torch.native_dropout(weights, dropout, True)[0]
    returned = weights.to(dtype)  # lives together with the result, and is created before it
    result = (weights @ value).to(dtype)
    del returned
    return result


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """convert_boolean_attn_mask (attention.cpp)."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, aligned: bool) -> torch.Tensor | None:
    """Convert a boolean mask to an additive one of the queries' dtype, expanded to (batch, heads, queries, keys).

    The efficient kernel needs it `aligned`: rows that do not begin at multiples of 8 are copied (`preprocess_mask`).
    """
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = _additive(mask, query.dtype)
    if aligned and (mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1])):
        mask = functional.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _NoDeviceGuard(contextlib.nullcontext[None]):
    """Replacement of `torch.cuda.device(index)`."""

    def __init__(self, device: object = None) -> None:
        super().__init__()


def _patch_cuda(patches: Patches, mode: FakeDeviceMode) -> None:
    """Answer libraries' queries of torch.cuda with the facts of the card."""
    card = mode.card
    major, minor = capability_of(card.capability) if card.capability is not None else (0, 0)
    properties = types.SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.capacity_bytes or 0,
        multi_processor_count=card.multiprocessors or 1,
        warp_size=32,
    )
    answers: Mapping[str, Any] = {
        "is_bf16_supported": lambda *args, **kwargs: supports_bf16(card),
        "get_device_capability": lambda *args, **kwargs: (major, minor),
        "get_device_properties": lambda *args, **kwargs: properties,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device": _NoDeviceGuard,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda *args: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: mode.on_empty_cache(),
    }
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)


def _patch_kernels(patches: Patches) -> None:
    """Let optimizers and clipping take their foreach and fused paths for meta tensors."""
    foreach = torch.utils._foreach_utils
    readers = [importlib.import_module(name) for name in ("torch.optim.optimizer", "torch.nn.utils.clip_grad")]
    for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
        devices = [*getattr(foreach, name)(), "meta"]
        for owner in (foreach, *readers):
            if hasattr(owner, name):
                patches.set(owner, name, lambda devices=devices: devices)


def _patch_autograd(patches: Patches, mode: FakeDeviceMode) -> None:
    """Keep the mode active during backward, where checkpoints recompute and hooks run but torch has popped it."""
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        active = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if mode.tracing or any(entered is mode for entered in active):
            return run_backward(*args, **kwargs)
        with mode:
            return run_backward(*args, **kwargs)

    clear_cache = torch.clear_autocast_cache

    def clear_both() -> None:
        clear_cache()
        mode.autocast.clear()

    patches.set(torch.autograd, "_engine_run_backward", run_in_mode)
    patches.set(torch, "clear_autocast_cache", clear_both)
    # Checkpointing would compare true devices of recomputed tensors with the faked devices of the first ones.
    checks = {**getattr(torch.utils.checkpoint, _DETERMINISM), "default": lambda tensor: (tensor.shape, tensor.dtype)}
    patches.set(torch.utils.checkpoint, _DETERMINISM, checks)


@contextlib.contextmanager
def fake_device(card: GPUParams) -> Iterator[FakeDeviceMode]:
    """Put meta tensors on `card` within the block. All patches are undone at its end."""
    mode = FakeDeviceMode(card)
    patches = Patches()
    try:
        if mode.device.type == "cuda":
            _patch_cuda(patches, mode)
            for owner, name, value in stand_in():
                patches.set(owner, name, value)
        _patch_kernels(patches)
        _patch_autograd(patches, mode)
        with mode:
            yield mode
    finally:
        patches.restore()
