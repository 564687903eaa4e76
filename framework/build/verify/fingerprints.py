"""Whether weights are bit for bit what they were: of what a task measures the trained model against."""

from dataclasses import dataclass

from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.model.fingerprint import fingerprint
from framework.build.tasks import WithFirstAdapter, WithoutAdapter, reference_of


@dataclass(frozen=True)
class Fingerprints:
    """Of what is measured against, and of what is trained, before training."""

    fixed: int
    trained: int


def take_fingerprints(assembly: Assembly) -> Fingerprints | None:
    """None for a task that measures against no weights."""
    fixed = _fixed(assembly)
    return Fingerprints(fingerprint(fixed), fingerprint(assembly.trained)) if fixed else None


def fixed_fingerprint(assembly: Assembly) -> int | None:
    """Of what is measured against; None where nothing is, and of split weights, of which no rank has all."""
    fixed = _fixed(assembly) if assembly.sharding is None else []
    return fingerprint(fixed) if fixed else None


def _fixed(assembly: Assembly) -> list[Tensor]:
    frozen_model: list[Tensor] = list(assembly.frozen_model.parameters()) if assembly.frozen_model is not None else []
    if isinstance(reference_of(assembly.objective), WithoutAdapter | WithFirstAdapter):
        return [*(item for item in assembly.model.parameters() if not item.requires_grad), *frozen_model]
    return frozen_model
