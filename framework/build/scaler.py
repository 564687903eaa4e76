"""Loss scaling for float16 autocast, which keeps small gradients from underflowing; and the flag `found_inf`, by which
the device skips an update."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from framework.build.optimizers.any_precision import AnyPrecisionAdamW
from framework.build.place import Place
from framework.schema.choices import MixedPrecision
from framework.schema.training import TrainingParams


@dataclass
class LossScale:
    """torch's scaler with the number of optimizer steps skipped so far.

    Without float16 autocast the scaler is disabled and passes everything through.
    """

    scaler: torch.amp.GradScaler
    skipped: int = 0

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def skip(self) -> bool:
        """Lower the scale after non-finite gradients. Returns whether that may help, so that the step is skipped.

        It does not help at a scale of 1 or less, or if the gradients were finite and only their norm overflowed, in
        which case the scale stays. Call it after `unscale_`.
        """
        if not self.enabled:
            return False
        before = self.scaler.get_scale()
        self.scaler.update()
        if not 1 < before > self.scaler.get_scale():
            return False
        self.skipped += 1
        return True

    def forget_step(self) -> None:
        """Discard the record that the gradients of a failed step were unscaled."""
        if self.enabled:
            self.scaler._per_optimizer_states.clear()

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as plain numbers (a scale is a power of two); empty if disabled."""
        return {**self.scaler.state_dict(), "skipped": self.skipped} if self.enabled else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore `state`; an empty one, of a run without float16, changes nothing."""
        if state and self.enabled:
            self.scaler.load_state_dict({key: value for key, value in state.items() if key != "skipped"})
            self.skipped = state["skipped"]


def build_loss_scale(training: TrainingParams, place: Place) -> LossScale:
    """torch's scaler with its defaults, enabled only for float16 autocast: bfloat16 has the range of float32."""
    # torch uses the kind only to ask whether CUDA is available, which a rehearsal does not need
    kind = "cpu" if place.rehearsed else place.kind
    return LossScale(torch.amp.GradScaler(kind, enabled=training.mixed_precision_dtype == MixedPrecision.FP16))


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parts of an optimizer read `found_inf` on the device."""
    # torch sets this if `step` itself reads `found_inf` (torch/optim/adam.py).
    return all(
        hasattr(part, "found_inf") or bool(getattr(part, "_step_supports_amp_scaling", False))
        for part in _parts(optimizer)
    )


def found_inf_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """The `found_inf` scalar that the optimizer reads, float32 on `device`; created as 0 on first use."""
    parts = _parts(optimizer)
    found: Tensor | None = getattr(parts[0], "found_inf", None)
    if found is None:
        found = torch.zeros((), device=device)
        for part in parts:
            part.found_inf = found  # type: ignore[attr-defined]
    return found


def forget_skipped_steps(optimizer: torch.optim.Optimizer) -> None:
    """Reset after skipped steps: the scalar to 0, and step counts on the host to their values before them."""
    for part in _parts(optimizer):
        if isinstance(part, AnyPrecisionAdamW):
            part.take_back_skipped_steps()
    found: Tensor | None = getattr(_parts(optimizer)[0], "found_inf", None)
    if found is not None:
        found.zero_()


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    return list(getattr(optimizer, "parts", {}).values()) or [optimizer]
