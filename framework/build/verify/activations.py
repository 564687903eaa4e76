"""What the blocks really do: recomputation and attention."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from framework.build.activations import checkpointed_blocks
from framework.build.assembly import Assembly
from framework.build.batches import full_batch
from framework.build.compiled import plain_code
from framework.build.hub import one_line
from framework.build.loss import causal_model, model_inputs
from framework.build.verify.reading import Reading


def read_checkpointed_blocks(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks recompute in train mode; none when it was not asked for."""
    done, blocks = checkpointed_blocks(assembly.model)
    key, asks = "training.enable_gradient_checkpointing", assembly.config.training.enable_gradient_checkpointing
    if asks and not blocks:
        yield Reading(key, "every block", "0/0", "this model class has no blocks that can be checkpointed")
    else:
        yield Reading(key, f"{blocks if asks else 0}/{blocks}", f"{done}/{blocks}", "blocks in train mode")


_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_safe_softmax": "math",
}
"""The operator that tells each kernel of scaled_dot_product_attention."""
_PROBE_TOKENS = 16


class _SeenKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of those operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.kernels |= {_KERNELS[name] for name in (func.overloadpacket.__name__,) if name in _KERNELS}
        return func(*args, **(kwargs or {}))


def read_sdpa_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that really ran behind `sdpa` when a few tokens went forward as in training."""
    asked = assembly.config.model.sdpa_backend
    if causal_model(assembly.model).config._attn_implementation != "sdpa":
        if asked is not None:
            yield Reading("model.sdpa_backend", str(asked), "none: this model does not use sdpa", "model.config")
        return
    device, length = assembly.place.device, assembly.config.model.model_max_length
    tokens = min(_PROBE_TOKENS, length) if isinstance(length, int) else _PROBE_TOKENS
    batch = full_batch(assembly.config, torch.zeros((1, tokens), dtype=torch.int64, device=device))
    devices = [device] if assembly.place.kind == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            assembly.attention,
            assembly.autocast,
            plain_code(assembly.model),
            _SeenKernels() as seen,
        ):
            assembly.model(**model_inputs(assembly.model, batch), use_cache=False)
        found = ", ".join(sorted(seen.kernels)) or "none"
    except RuntimeError as error:  # "No available kernel. Aborting execution."
        if "kernel" not in str(error).lower():
            raise
        found = f"none ({one_line(error)})"
    yield Reading("model.sdpa_backend", str(asked) if asked else None, found, f"operators of {tokens} tokens forward")


def read_attention_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that the model's own config dispatches to; whatever it chose is said when none was asked for."""
    found = causal_model(assembly.model).config._attn_implementation
    asked = assembly.config.model.attn_implementation
    yield Reading("model.attn_implementation", str(asked) if asked else None, str(found), "model.config")
