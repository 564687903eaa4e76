"""Which share of the trained elements moves: an update below half a last bit leaves a bf16 weight as it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.build.ranks import local_part
from framework.schema.choices import TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.optimizers import facts_of

SPAN = 50
"""Steps between two looks."""
SAMPLE = 1024
"""Elements at most of each tensor that are looked at, evenly spread: 1 MiB a look for a model of 256 tensors."""
TINY = 0.1
"""Below this share a run is warned about. Plain bfloat16 weights of spread 0.02 at a rate of 6e-6 move 5 %."""


@dataclass(frozen=True)
class Moved:
    """Shares of the trained elements that changed, of all and of vectors alone (norms and biases; None without any)."""

    all: float
    vectors: float | None


class MovedElements:
    """Remembers a sample of what this rank holds of every trained tensor, on the host, from one look to the next."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self._trained = trained
        self._before = self._sample()

    def look(self) -> Moved:
        """What changed since the last look."""
        before, self._before = self._before, self._sample()
        changed = [
            float((now != then).float().mean()) for now, then in zip(self._before, before, strict=True) if len(now)
        ]
        here = [tensor for tensor in map(local_part, self._trained) if tensor.numel()]
        sizes, vectors = [tensor.numel() for tensor in here], [tensor.dim() < 2 for tensor in here]
        return Moved(
            _mean(changed, sizes) or 0.0,
            _mean(changed, [size * is_vector for size, is_vector in zip(sizes, vectors, strict=True)]),
        )

    @torch.no_grad()
    def _sample(self) -> list[Tensor]:
        # An odd stride, so that the elements of a matrix are not all of one column.
        here = [local_part(tensor).detach() for tensor in self._trained]
        taken = [tensor.flatten()[:: -(-tensor.numel() // SAMPLE) | 1] for tensor in here]
        together = torch.cat([part.float() for part in taken]).cpu()  # one copy from the device, not one a tensor
        return list(torch.split(together, [len(part) for part in taken]))


def _mean(values: Sequence[float], weights: Sequence[int]) -> float | None:
    total = sum(weights)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else None


def caution(moved: Moved, config: TrainingConfig) -> str | None:
    """What to tell of a run whose weights stand still. Kahan's compensation moves before its weight does."""
    if (moved.all >= TINY and moved.vectors != 0) or facts_of(config.training.optimizer).keeps_small_updates:
        return None
    which = f"{moved.all:.1%} of the trained elements"
    which += "" if moved.vectors is None else f" and {moved.vectors:.1%} of norms and biases"
    cure = f"the rate is {config.training.learning_rate:g} at its peak"
    if config.model.torch_dtype_str is TorchDtype.BFLOAT16:
        cure = "updates round away in bfloat16: training.optimizer=anyprecision_adamw, or model.torch_dtype_str=float32"
    return f"warning   only {which} changed in the last {SPAN} steps; {cure}"
