"""Kernels of attention that contradict what is asked next to them."""

from collections.abc import Iterator

from framework.schema.choices import Attention, MixedPrecision, SdpaBackend, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.rules.conflict import Conflict


def sdpa_backend(config: TrainingConfig) -> Iterator[Conflict]:
    """The kernel behind sdpa is asked for where another is."""
    kernel, backend = config.model.attn_implementation, config.model.sdpa_backend
    if kernel is Attention.RING_ATTENTION and backend is SdpaBackend.MATH:
        message = "math makes all scores of a row, and does not say what parts of them are put together by"
        yield Conflict(("model.sdpa_backend", "model.attn_implementation"), message, "flash, cudnn or efficient")
    if backend is not None and kernel not in (None, "auto", Attention.SDPA, Attention.RING_ATTENTION):
        message = f"{backend} is a kernel of sdpa, and {kernel} is asked for"
        yield Conflict(("model.sdpa_backend", "model.attn_implementation"), message, "attn_implementation: sdpa")


def half_precision_attention(config: TrainingConfig) -> Iterator[Conflict]:
    """Kernels of the flash-attention package, and those of sdpa by that name and by cuDNN on a card, compute in half
    precision alone."""
    if config.model.torch_dtype_str != TorchDtype.FLOAT32:
        return
    if config.training.mixed_precision_dtype != MixedPrecision.NONE:
        return
    dtypes = ("training.mixed_precision_dtype", "model.torch_dtype_str")
    kernel, backend = config.model.attn_implementation, config.model.sdpa_backend
    if kernel in (Attention.FLASH_ATTENTION_2, Attention.FLASH_ATTENTION_3, Attention.FLASH_ATTENTION_4):
        message = f"{kernel} does not compute in float32"
        yield Conflict(("model.attn_implementation", *dtypes), message, "sdpa, or bf16 or fp16 autocast")
    if backend in (SdpaBackend.FLASH, SdpaBackend.CUDNN) and config.gpu.capability is not None:
        message = f"{backend} does not compute in float32 on a card"
        yield Conflict(("model.sdpa_backend", *dtypes), message, "leave it unset, or bf16 or fp16 autocast")
