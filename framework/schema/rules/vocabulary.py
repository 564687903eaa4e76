"""Added tokens, and what can train their rows of the embedding."""

from collections.abc import Iterator

from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig
from framework.schema.peft import PeftParams
from framework.schema.rules.conflict import Conflict

_TOKENS = "peft.trainable_token_indices"
_WHOLE = "peft.lora_modules_to_save=[embed_tokens, lm_head], by the model's names for them"
_EMBEDDINGS = ("wte", "word_embeddings", "tok_embeddings")
"""Names of embeddings that do not begin with `embed`."""


def trains_embedding(peft: PeftParams) -> bool:
    """Whether an embedding is among the modules that are trained in full next to the adapter."""
    names = [name.rpartition(".")[2] for name in peft.lora_modules_to_save]
    return any(name.startswith("embed") or name in _EMBEDDINGS for name in names)


def vocabulary_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Rows that no adapter of this kind holds, or that are split over devices."""
    peft, method = config.peft, config.peft.peft_method
    if not config.training.use_peft:
        return
    if config.model.added_tokens and not ADAPTERS[method].trains_tokens and not trains_embedding(peft):
        message = f"an adapter of the kind {method} would be saved without the rows of the added tokens"
        expected = "a LoRA kind" if ADAPTERS[method].is_prompt else f"a LoRA kind, or {_WHOLE}"
        yield Conflict(("model.added_tokens", "peft.peft_method"), message, expected)
    trains_rows = bool(peft.trainable_token_indices) or (
        bool(config.model.added_tokens) and peft.trainable_token_indices is None and not trains_embedding(peft)
    )
    split = "fsdp.enable_fsdp" if config.fsdp.is_sharded else "fsdp.tensor_parallel_size"
    if trains_rows and (config.fsdp.is_sharded or config.fsdp.tensor_parallel_size > 1):
        key = _TOKENS if peft.trainable_token_indices else "model.added_tokens"
        message = "single rows of an embedding are not trained where weights are split over devices"
        yield Conflict((key, split), message, _WHOLE)
