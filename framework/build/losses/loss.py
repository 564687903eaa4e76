"""The loss of a causal language model: the sum of cross entropies over the supervised tokens of one micro batch.

It is a sum, not a mean: `train_step` divides by the supervised tokens of the whole global batch, so that how the batch
is split into micro batches does not change the gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.data.packing import MARKS, keep_documents_separate
from framework.build.losses.chunked_loss import chunked_counts, chunked_cross_entropy, chunked_log_probabilities
from framework.build.losses.cross_entropy import PLAIN, LossTerms
from framework.build.model.heads import reads_both_ways
from framework.build.model.parts import causal_model
from framework.build.text.labels import IGNORED
from framework.errors import Problem, RequestError
from framework.schema.model import ModelParams

DEFAULT_CHUNK = 1024
"""Tokens a chunk unless a number is asked for: on an H200 0.7 % slower than 4,096 for the 1B, and 0.7 GiB smaller."""

AFTER_THE_HEAD = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings of Gemma 2, Granite and Cohere that change logits, with the value that changes nothing. What has no setting
is found at start-up, by `head_is_last`; a plan has no values to find it with."""

PLAIN_HEADS = frozenset(
    {
        *("apertus", "arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text"),
        *("glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "lfm2"),
        *("llama", "ministral", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
        *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types whose logits are their head's output, but for AFTER_THE_HEAD: where nobody says otherwise, their loss
goes over chunks. tests/build/losses/test_loss.py asks a small model of each type."""

Batch = Mapping[str, Tensor]
Observe = Callable[[str], None]


class Loss(Protocol):
    """What is made of a causal model's logits; each calls `observe("loss")` where the head begins."""

    @property
    def terms(self) -> LossTerms: ...

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Sum of the token losses, `terms` among them, a float32 scalar."""
        ...

    def log_probabilities(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Log-probability of the token that follows each, 0 where it is not supervised: float32 `[rows, tokens]`."""
        ...

    def counts(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the cross entropies, and how many supervised tokens are the likeliest; float32 and int64 scalars."""
        ...


def ignore_phases(phase: str) -> None:
    """Observe nothing."""


def build_loss(params: ModelParams, model: nn.Module, terms: LossTerms = PLAIN) -> Loss:
    """The loss that was asked for: over all logits at once, or a chunk of tokens at a time. Raises as `chunk_size`."""
    chunk = chunk_size(params, model)
    return _Whole(terms) if chunk is None else _Chunked(chunk, terms)


def chunk_size(params: ModelParams, model: nn.Module, key: str = "model.chunked_loss") -> int | None:
    """Tokens whose logits may exist at a time; None for all. Where nobody says, DEFAULT_CHUNK for a model of
    PLAIN_HEADS, as it gives the same loss.

    Raises RequestError, about `key`, when chunks are asked for and the model's head is more than one linear layer, caps
    or scales its output, which chunks cannot repeat, or when the model below its head cannot be called apart.
    """
    if params.chunked_loss is False:
        return None
    obstacle = _obstacle_to_chunks(model)
    if params.chunked_loss is None:
        is_plain = causal_model(model).config.model_type in PLAIN_HEADS and not hasattr(model, "prompt_encoder")
        return DEFAULT_CHUNK if is_plain and obstacle is None else None
    if obstacle is not None:
        message, expected = obstacle
        raise RequestError([Problem(key, message, expected=expected)])
    return DEFAULT_CHUNK if params.chunked_loss is True else int(params.chunked_loss)


def _obstacle_to_chunks(model: nn.Module) -> tuple[str, str] | None:
    """Why a model's head cannot be computed apart from it, and what to ask for instead."""
    causal, expected = causal_model(model), "model.chunked_loss: false"
    settings = causal.config.get_text_config().to_dict()
    after = [
        f"{name} {settings[name]:g}" for name, idle in AFTER_THE_HEAD.items() if settings.get(name) not in (None, idle)
    ]
    if after:
        return f"this model changes its logits after the head ({', '.join(after)}), so a chunk's would differ", expected
    if causal.base_model is causal:  # Llama 4 in transformers 5.24
        return f"{causal.config.model_type} cannot be called without its head, so there are no chunks", expected
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        message = f"chunks need a plain linear head; this model's is {type(head).__name__}"
        return message, f"{expected}, or no adapter on the head"
    return None


def next_tokens(batch: Batch) -> Tensor:
    """What each position has to predict, `[rows, tokens]`: labels moved one to the left, or, in a part of rows that
    several ranks share, what they were before the rows were cut."""
    return batch["next"] if "next" in batch else F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def supervised_tokens(batch: Batch) -> Tensor:
    """Tokens of the batch that the loss is taken over, as a scalar int64 on the batch's device."""
    labels = batch["next"] if "next" in batch else batch["labels"][:, 1:]
    return (labels != IGNORED).sum()


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What a model is given of a batch: the tokens, and what keeps several documents in a row apart.

    No labels, because the loss is ours. No mask of the padding where tokens see only those before them, because rows
    are padded on the right: no token of a row can see the padding behind it, and the padding's own outputs are not
    supervised. It would change nothing that is trained on, cost rows x tokens x tokens bytes, and keep the faster
    attention kernels from running.
    """
    unread = () if reads_both_ways(causal_model(model).config) else ("attention_mask",)
    left_out = ("labels", "next", "positions", "targets", "reference", *unread, *MARKS)
    tokens = {name: tensor for name, tensor in batch.items() if name not in left_out}
    if "positions" in batch:  # of a part of each row
        tokens["position_ids"] = batch["positions"]
    # A model would compute its router loss anew, from whatever mask it is given; ours is in
    # framework/build/losses/router_loss.py.
    without = {"output_router_logits": False} if asks_for_router_logits(model) else {}
    return {**tokens, **without, **keep_documents_separate(causal_model(model), batch)}


def asks_for_router_logits(model: nn.Module) -> bool:
    """Whether the model's own config has it add a router auxiliary loss to the loss that it computes."""
    return getattr(causal_model(model).config.get_text_config(), "output_router_logits", False) is True


@dataclass(frozen=True)
class _Whole:
    """Over the logits of all tokens at once, in float32."""

    terms: LossTerms = PLAIN

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        logits = token_logits(model, batch, observe)
        scores = logits.float().flatten(0, 1)
        targets, (smoothing, z_loss) = next_tokens(batch).flatten(), self.terms
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        if z_loss:
            loss = loss + z_loss * scores.logsumexp(1).square().where(targets != IGNORED, 0).sum()
        return loss

    def log_probabilities(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        logits = token_logits(model, batch, observe)
        targets = next_tokens(batch).flatten()
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="none")
        return -losses.view(batch["labels"].shape)

    def counts(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = token_logits(model, batch, ignore_phases)
        targets = next_tokens(batch).flatten()
        correct = (logits.argmax(-1).flatten() == targets).sum()
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
        return loss, correct


full_loss = _Whole()


@dataclass(frozen=True)
class _Chunked:
    """A chunk of tokens at a time, so that the logits of no more than `chunk` exist."""

    chunk: int
    terms: LossTerms = PLAIN

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        return chunked_cross_entropy(*head_inputs(model, batch, observe), self.chunk, self.terms)

    def log_probabilities(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        return chunked_log_probabilities(*head_inputs(model, batch, observe), self.chunk).view(batch["labels"].shape)

    def counts(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return chunked_counts(*head_inputs(model, batch, ignore_phases), self.chunk)


def token_logits(model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
    """The logits of all tokens, `[rows, tokens, vocabulary]`, in the dtype that the model gives them."""
    logits: Tensor = model(**model_inputs(model, batch), use_cache=False).logits
    observe("loss")
    if logits.shape[1] != batch["labels"].shape[1]:  # places of a trained prompt before the row
        logits = logits[:, -batch["labels"].shape[1] :]  # whose backward takes one more tensor like the logits
    return logits


def head_inputs(model: nn.Module, batch: Batch, observe: Observe) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What the head is given, its weight and bias, and what it should say, over all tokens of the batch."""
    causal = causal_model(model)
    hidden = causal.base_model(**model_inputs(model, batch), use_cache=False).last_hidden_state
    observe("loss")
    head = causal.get_output_embeddings()
    return hidden.flatten(0, 1), head.weight, head.bias, next_tokens(batch).flatten()


def head_is_last(model: nn.Module, batch: Batch) -> bool:
    """Whether the model's logits are its head's output as it stands, and the head reads the last hidden state.

    False for models that cap or scale logits: there the chunked loss would train something else. The head's output is
    replaced by large known values for one forward pass, so that even a cap that small logits never reach is seen.
    """
    causal = causal_model(model)
    head, seen = causal.get_output_embeddings(), {}

    def replace(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["hidden"] = inputs[0]
        seen["marker"] = torch.linspace(-64, 64, output.numel(), device=output.device).view_as(output).to(output.dtype)
        return seen["marker"]

    handle = head.register_forward_hook(replace)
    try:
        with torch.no_grad():
            inputs = model_inputs(model, batch)
            logits = causal(**inputs, use_cache=False).logits
            hidden = causal.base_model(**inputs, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    return torch.equal(logits.float(), seen["marker"].float()) and torch.equal(hidden, seen["hidden"])
