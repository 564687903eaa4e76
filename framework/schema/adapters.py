"""The kinds of adapters: one row of facts each. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from framework.schema.choices import PeftMethod

_PLACED = ("lora_target_modules", "lora_exclude_modules", "layers_to_transform")
_DRAWN = (*_PLACED, "lora_r", "lora_dropout")
_OF_MATRICES = ("lora_alpha", "lora_plus_lr_ratio", "rank_pattern", "alpha_pattern", "lora_freeze_a")
_FACTORS = (*_DRAWN, *_OF_MATRICES, "trainable_token_indices")
_STARTED = (*_FACTORS, "lora_init")


@dataclass(frozen=True)
class AdapterFacts:
    """What is true of one kind of adapter."""

    keys: tuple[str, ...] = _FACTORS
    """Keys of `peft` that it reads and that not all kinds do."""
    has_own_start: bool = False
    """Whether its layers start from numbers of their own, not from the weights that they adapt."""
    moves_base: bool = False
    """Whether it takes its start out of the base: without the adapter the model is not what it was before training."""
    is_decomposed: bool = False
    """Whether it starts from a decomposition of each weight, made where the weights are."""
    is_cut: bool = False
    """Whether it is a product of two matrices, of which one can be cut as the weight next to them is."""

    @property
    def trains_tokens(self) -> bool:
        """Whether it can train single rows of the embedding: what peft calls LoRA, whatever its start."""
        return self.has_factors

    @property
    def is_prompt(self) -> bool:
        """Whether it trains tokens before the row, on no module."""
        return "num_virtual_tokens" in self.keys

    @property
    def has_factors(self) -> bool:
        """Whether it trains a pair of matrices for each that it adapts."""
        return "lora_alpha" in self.keys


ADAPTERS: Mapping[PeftMethod, AdapterFacts] = {
    PeftMethod.LORA: AdapterFacts(_STARTED, has_own_start=True, is_cut=True),
    PeftMethod.RSLORA: AdapterFacts(_STARTED, has_own_start=True, is_cut=True),
    PeftMethod.DORA: AdapterFacts(_STARTED),
    PeftMethod.PISSA: AdapterFacts(moves_base=True, is_decomposed=True),
    PeftMethod.OLORA: AdapterFacts(moves_base=True, is_decomposed=True),
    PeftMethod.LOFTQ: AdapterFacts(moves_base=True),
    PeftMethod.VERA: AdapterFacts(_DRAWN),
    PeftMethod.IA3: AdapterFacts(_PLACED, has_own_start=True),
    PeftMethod.OFT: AdapterFacts((*_PLACED, "oft_block_size")),
    PeftMethod.PREFIX: AdapterFacts(("num_virtual_tokens",)),
    PeftMethod.PROMPT: AdapterFacts(("num_virtual_tokens",)),
}
