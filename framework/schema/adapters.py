"""Facts of the adapter kinds, one row each. Imports no torch."""

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
    """Facts of one kind of adapter."""

    keys: tuple[str, ...] = _FACTORS
    """Keys of `peft` that it uses, except those of all kinds."""
    has_own_start: bool = False
    """Whether its initialization is independent of the adapted weights."""
    moves_base: bool = False
    """Whether its initial values are subtracted from the base, so that the base alone is not the original model."""
    is_decomposed: bool = False
    """Whether it is initialized from a decomposition of each weight, on the weights' device."""
    is_cut: bool = False
    """Whether tensor parallelism can split it along with the adapted weight."""

    @property
    def trains_tokens(self) -> bool:
        """Whether it can train single rows of the embedding: all kinds that peft implements as LoRA."""
        return self.has_factors

    @property
    def is_prompt(self) -> bool:
        """Whether it trains virtual tokens before the row instead of modules."""
        return "num_virtual_tokens" in self.keys

    @property
    def has_factors(self) -> bool:
        """Whether it trains a pair of matrices for each adapted one."""
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
