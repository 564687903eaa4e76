"""Optimizers that read on the device whether a step was finite.

`optimizer.found_inf`, in torch's words, is a scalar that is 1 where the update must change neither weights nor states.

| optimizer | reads `found_inf` |
| --- | --- |
| adamw_torch_fused (torch) | on the device; its count of steps is there too |
| anyprecision_adamw, anyprecision_adamw_8bit (ours) | on the device, in its kernel |
| adamw_torch, sgd (torch, foreach), adafactor (transformers) | no: the host waits for the norm |
| lion, sophia, muon, galore_adamw, apollo_adamw, schedule_free_adamw (ours, plain torch) | no: the host waits |
| 8-bit, 4-bit and paged ones (bitsandbytes, torchao) | no: the host waits |

Gradients of zeros would be no way out: momentum, decay and the count of steps would go on.
"""

import torch
from torch import Tensor

from framework.build.optimizers.any_precision import AnyPrecisionAdamW


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parts of an optimizer read `found_inf` on the device."""
    return all(hasattr(part, "found_inf") or _is_fused(part) for part in _parts(optimizer))


def found_inf_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """The scalar that the optimizer reads, float32 on `device`; made, as 0, when first asked for."""
    parts = _parts(optimizer)
    found: Tensor | None = getattr(parts[0], "found_inf", None)
    if found is None:
        found = torch.zeros((), device=device)
        for part in parts:
            part.found_inf = found  # type: ignore[attr-defined]
    return found


def forget_skipped_steps(optimizer: torch.optim.Optimizer) -> None:
    """Begin anew after steps that changed nothing: the scalar is 0, and counts on the host are those before them."""
    for part in _parts(optimizer):
        if isinstance(part, AnyPrecisionAdamW):
            part.take_back_skipped_steps()
    found: Tensor | None = getattr(_parts(optimizer)[0], "found_inf", None)
    if found is not None:
        found.zero_()


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(getattr(optimizer, "parts", {}).values()) or [optimizer]


def _is_fused(part: torch.optim.Optimizer) -> bool:
    """torch sets this where `step` looks at `found_inf` by itself (torch/optim/adam.py)."""
    return bool(getattr(part, "_step_supports_amp_scaling", False))
