"""The loss of a causal language model: the sum of cross entropies over the supervised tokens of one micro-batch.

It is a sum, not a mean: `train_step` divides by the supervised tokens of the whole global batch, so that the split into
micro-batches does not change the gradients.
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
from framework.schema.heads import AFTER_THE_HEAD, DEFAULT_CHUNK, PLAIN_HEADS
from framework.schema.model import ModelParams

Batch = Mapping[str, Tensor]
Observe = Callable[[str], None]


class Loss(Protocol):
    """Losses and log-probabilities of a causal model; each calls `observe("loss")` where the head begins."""

    @property
    def terms(self) -> LossTerms: ...

    def __call__(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Sum of the token losses, `terms` among them, a float32 scalar."""
        ...

    def log_probabilities(self, model: nn.Module, batch: Batch, observe: Observe) -> Tensor:
        """Log-probability of each next token, 0 if it is not supervised: float32 `[rows, tokens]`."""
        ...

    def counts(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the cross entropies, and number of supervised tokens predicted correctly; float32 and int64
        scalars."""
        ...


def ignore_phases(phase: str) -> None:
    """An `Observe` that does nothing."""


def build_loss(params: ModelParams, model: nn.Module, terms: LossTerms = PLAIN) -> Loss:
    """The loss over all logits at once, or over chunks of tokens. Raises as `chunk_size`."""
    chunk = chunk_size(params, model)
    return _Whole(terms) if chunk is None else _Chunked(chunk, terms)


def chunk_size(params: ModelParams, model: nn.Module, key: str = "model.chunked_loss") -> int | None:
    """Number of tokens whose logits exist at a time; None for all. The default for a model of PLAIN_HEADS is
    DEFAULT_CHUNK, which gives the same loss.

    Raises RequestError, under `key`, if chunks are requested and the model's head is more than one linear layer, its
    logits are capped or scaled, or the model cannot be run without its head.
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
    """Why a model's head cannot be computed separately, and the alternative."""
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
    """Target of each position, `[rows, tokens]`: labels shifted one to the left; under context parallel they were
    shifted before the rows were cut."""
    return batch["next"] if "next" in batch else F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def supervised_tokens(batch: Batch) -> Tensor:
    """Number of supervised tokens of the batch, a scalar int64 on the batch's device."""
    labels = batch["next"] if "next" in batch else batch["labels"][:, 1:]
    return (labels != IGNORED).sum()


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Arguments of a model for a batch: the tokens, and whatever separates documents in a row.

    No labels, because the loss is ours. No padding mask for causal attention, because rows are padded on the right: no
    token sees the padding after it, and the padding's own outputs are not supervised. A mask would not change the loss,
    cost rows x tokens x tokens bytes, and disable the faster attention kernels.
    """
    unread = () if reads_both_ways(causal_model(model).config) else ("attention_mask",)
    left_out = ("labels", "next", "positions", "targets", "reference", *unread, *MARKS)
    tokens = {name: tensor for name, tensor in batch.items() if name not in left_out}
    if "positions" in batch:  # context parallel
        tokens["position_ids"] = batch["positions"]
    # The model would compute its own router loss; ours is in framework/build/losses/router_loss.py.
    without = {"output_router_logits": False} if asks_for_router_logits(model) else {}
    return {**tokens, **without, **keep_documents_separate(causal_model(model), batch)}


def asks_for_router_logits(model: nn.Module) -> bool:
    """Whether the model's config enables its own router auxiliary loss."""
    return getattr(causal_model(model).config.get_text_config(), "output_router_logits", False) is True


@dataclass(frozen=True)
class _Whole:
    """Loss over the logits of all tokens at once, in float32."""

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
    """Loss over chunks, so that the logits of at most `chunk` tokens exist."""

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
    if logits.shape[1] != batch["labels"].shape[1]:  # virtual tokens of a trained prompt before the row
        logits = logits[:, -batch["labels"].shape[1] :]  # its backward takes one more tensor like the logits
    return logits


def head_inputs(model: nn.Module, batch: Batch, observe: Observe) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Inputs of the head, its weight and bias, and the targets, over all tokens of the batch."""
    causal = causal_model(model)
    hidden = causal.base_model(**model_inputs(model, batch), use_cache=False).last_hidden_state
    observe("loss")
    head = causal.get_output_embeddings()
    return hidden.flatten(0, 1), head.weight, head.bias, next_tokens(batch).flatten()


def head_is_last(model: nn.Module, batch: Batch) -> bool:
    """Whether the model's logits are its head's unchanged output, and the head's input is the last hidden state.

    False for models that cap or scale logits, for which the chunked loss would be wrong. The head's output is replaced
    by large known values for one forward pass, so that a cap that small logits never reach is detected too.
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
