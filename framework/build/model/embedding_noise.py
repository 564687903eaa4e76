"""NEFTune: uniform noise on the output of the input embeddings during training.

Jain et al. 2023, arXiv 2310.05914, algorithm 1: at most alpha / sqrt(tokens x width), drawn for each micro-batch.
Tokens include padding, as in transformers' Trainer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framework.build.model.parts import causal_model


@dataclass(frozen=True)
class EmbeddingNoise:
    """Forward hook of the input embeddings. In evaluation it changes nothing and draws nothing."""

    alpha: float

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        most = self.alpha / math.sqrt(output.shape[-2] * output.shape[-1])
        return output + torch.empty_like(output).uniform_(-most, most)


def add_embedding_noise(alpha: float | None, model: nn.Module) -> None:
    """Add the noise to the input embeddings of a built model, unless `alpha` is None."""
    if alpha is not None:
        causal_model(model).get_input_embeddings().register_forward_hook(EmbeddingNoise(alpha))


def embedding_noise(model: nn.Module) -> list[EmbeddingNoise]:
    """The noise hooks on the input embeddings of a model."""
    hooks = causal_model(model).get_input_embeddings()._forward_hooks.values()
    return [hook for hook in hooks if isinstance(hook, EmbeddingNoise)]
