"""In which numbers the card multiplies."""

import torch

from framework.build.place import Place
from framework.schema.training import TrainingParams


def choose_float32_products(training: TrainingParams, place: Place) -> None:
    """Let float32 matrix products run in tf32, or not. A setting of the process; unset leaves torch's own (not).

    It goes through the one function that torch 2.11 to 2.13 keep in step with both of their newer and older switches.
    """
    if training.tf32 is not None and not place.rehearsed:
        torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
