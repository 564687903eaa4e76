"""Emulation of autocast and attention functions on the fake device.

C++ autocast never sees meta tensors. The lists name the Python functions that reach the operators of
aten/src/ATen/autocast_mode.h (torch 2.11 to 2.13). The cache of cast weights follows autocast's own rule (cached_cast
in autocast_mode.cpp): leaf, requires grad, float32, not a view; it lives until `torch.clear_autocast_cache`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, masking_utils, modeling_utils

HALF_DTYPES = (torch.float16, torch.bfloat16)
_NAMESPACES = (torch, torch.Tensor, functional, torch._C._nn, torch.linalg, torch.special)


def _functions(names: str) -> frozenset[Any]:
    found = (getattr(namespace, name, None) for name in names.split() for namespace in _NAMESPACES)
    return frozenset(function for function in found if callable(function))


LOWER_PRECISION = _functions(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr matmul einsum mm "
    "mv linear addbmm baddbmm bmm chain_matmul multi_dot __matmul__ __rmatmul__ scaled_dot_product_attention"
)
FLOAT32 = _functions(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus "
    "layer_norm native_layer_norm group_norm norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp"
)
FLOAT32_OUTPUT = _functions("softmax log_softmax prod cumprod cumsum sum")


class Autocast:
    """Casts arguments as the card's autocast would. `on_weight_cast` is called with each cached copy of a weight."""

    def __init__(self, device_type: str, on_device: Callable[[torch.Tensor], bool]) -> None:
        self._device_type = device_type
        self.on_weight_cast: Callable[[torch.Tensor], None] | None = None
        self._on_device = on_device
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        """Clear the cache of cast weights, as leaving the outermost autocast region does."""
        self._copies.clear()

    def call(self, function: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call `run` with the arguments that autocast would pass to `function` in an enabled region."""
        if function in LOWER_PRECISION:
            dtype = torch.get_autocast_dtype(self._device_type)
            # The C++ casts are function arguments, which gcc evaluates from right to left.
            kwargs = {name: self._cast(value, dtype) for name, value in reversed(list(kwargs.items()))}
            args = tuple(reversed([self._cast(value, dtype) for value in reversed(args)]))
        elif function in FLOAT32:
            args = tuple(self._cast(value, torch.float32) for value in args)
            kwargs = {name: self._cast(value, torch.float32) for name, value in kwargs.items()}
        elif function in FLOAT32_OUTPUT:
            if args and _is_half(args[0]) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        elif function is functional.cross_entropy and self._is_plain_half_loss(args, kwargs):
            # cross_entropy_loss keeps the explicit half dtype in log_softmax; only nll_loss is cast.
            return functional.nll_loss(
                torch.log_softmax(args[0], 1).float(),
                args[1],
                weight=kwargs.get("weight"),
                ignore_index=kwargs.get("ignore_index", -100),
                reduction=kwargs.get("reduction", "mean"),
            )
        return run(*args, **kwargs)

    @staticmethod
    def _is_plain_half_loss(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return (
            len(args) == 2
            and _is_half(args[0])
            and not kwargs.get("label_smoothing")
            and not args[1].is_floating_point()
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return type(value)(self._cast(item, dtype) for item in value)
        return value

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)
        if not eligible or not self._on_device(tensor):
            return tensor
        if not (
            dtype in HALF_DTYPES
            and tensor.dtype == torch.float32
            and tensor.is_leaf
            and tensor.requires_grad
            and tensor._base is None
            and torch.is_autocast_cache_enabled()
        ):
            return tensor.to(dtype)
        known = self._copies.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        with torch.enable_grad():  # as in C++: a copy first made without grad mode must also serve recorded calls
            copy = tensor.to(dtype)
        self._copies[id(tensor)] = (weakref.ref(tensor), copy)
        if self.on_weight_cast is not None:
            self.on_weight_cast(copy)
        return copy


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES


FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
FLEX = "flex_attention"


def stand_in() -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, value) for every attribute of transformers to replace."""
    runs: dict[str, Callable[..., Any]] = dict.fromkeys((*FLASH, FLEX), _as_flash)
    no_mask = dict.fromkeys((*FLASH, FLEX), _no_mask)
    yield modeling_utils.ALL_ATTENTION_FUNCTIONS, "_local_mapping", runs
    yield masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping", no_mask
    yield PreTrainedModel, "_flash_attn_import_error", lambda *args, **kwargs: None
    yield modeling_utils, "lazy_import_flash_attention", lambda *args, **kwargs: None
    yield modeling_utils, "is_kernels_available", lambda *args, **kwargs: False


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: rows are padded on the right, so kernels get none. Flex's block table (kilobytes) is omitted."""


def _as_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`[rows, heads, tokens, width] -> [rows, tokens, heads, width]`, as transformers' attention functions.

    A narrower value is padded, as flash-attn requires. Flex writes its result in the query's layout, so transformers'
    `contiguous` copies nothing (H200, torch 2.11: benchmarks/results/levers_h200.json).
    """
    width = value.shape[-1]
    if width != query.shape[-1]:
        value = functional.pad(value, [0, query.shape[-1] - width])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
    return output.transpose(1, 2)[..., :width], None


class Patches:
    """Replaced attributes, restored in reverse order."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)
