"""torch dtypes of the words that a recipe has for them."""

import torch

from framework.schema.choices import MixedPrecision, TorchDtype
from framework.schema.training import TrainingParams

TORCH_DTYPES = {
    TorchDtype.FLOAT32: torch.float32,
    TorchDtype.BFLOAT16: torch.bfloat16,
    TorchDtype.FLOAT16: torch.float16,
}
AUTOCAST_DTYPES = {MixedPrecision.BF16: torch.bfloat16, MixedPrecision.FP16: torch.float16}


def autocast_dtype(training: TrainingParams) -> torch.dtype | None:
    """The dtype that products are computed in where it is not the weights' own."""
    return AUTOCAST_DTYPES.get(MixedPrecision(training.mixed_precision_dtype or "none"))
