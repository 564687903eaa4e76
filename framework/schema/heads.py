"""Heads of causal language models: which chunks of the loss are the default. Imports no torch."""

from framework.schema.architecture import language_part
from framework.schema.choices import Fp8
from framework.schema.config import TrainingConfig

DEFAULT_CHUNK = 1024
"""Default tokens per chunk: on an H200 0.7 % slower than 4,096 for the 1B, and 0.7 GiB smaller."""

AFTER_THE_HEAD = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings of Gemma 2, Granite and Cohere that change logits, with the neutral value. Changes without a setting are
found at start-up by `head_is_last`, which a plan cannot run."""

PLAIN_HEADS = frozenset(
    {
        *("apertus", "arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text"),
        *("glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "lfm2"),
        *("llama", "ministral", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
        *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types whose logits are their head's output, except for AFTER_THE_HEAD: their loss is chunked by default.
tests/build/losses/test_loss.py checks a small model of each type."""

CHANGES_LOGITS = frozenset({"cohere", "cohere2", "gemma2"})
"""Those of them with a setting AFTER_THE_HEAD that is not neutral unless it is written."""


def chunks_by_default(config: TrainingConfig) -> bool:
    """Whether an unset `model.chunked_loss` is certainly DEFAULT_CHUNK, by the architecture that the recipe has written
    out. An adapter, fp8 and a teacher may decide otherwise (`chunk_size` in framework/build/losses/loss.py)."""
    training, settings = config.training, config.model.architecture
    may_differ = training.use_peft or training.fp8 is not Fp8.NONE or not training.task.facts.is_next_token
    if settings is None or may_differ:
        return False
    part = language_part(settings)
    is_last = all(part.get(name) in (None, idle) for name, idle in AFTER_THE_HEAD.items())
    return is_last and settings.get("model_type") in PLAIN_HEADS - CHANGES_LOGITS
