"""Linear head and loss over chunks of tokens.

Only the logits of one chunk exist at a time, and their gradient overwrites them: for 8,192 tokens and a vocabulary of
128,256 that is 0.25 GiB instead of the 11.7 GiB of float32 logits and their gradient. For the cross entropy the
gradients are computed in forward, and backward only scales them; the backward of log-probabilities needs their incoming
gradients, so it computes each chunk's logits again. Source of the idea: Liger's fused linear cross entropy (Hsu et al.
2024); this is our own code.

The distillation loss of a supervised token is alpha T^2 D(teacher, student) + (1 - alpha) cross entropy with the label,
with D between the softmaxes of logits / T. T^2 keeps the size of the gradients independent of T (Hinton et al. 2015,
arXiv 1503.02531, section 2). Forward KL is theirs, reverse KL that of MiniLLM (Gu et al. 2023, arXiv 2306.08543), JSD
the even mixture of GKD (Agarwal et al. 2023, arXiv 2306.13649, equation 1 with beta = 1/2).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.build.losses.cross_entropy import PLAIN, LossTerms, token_losses
from framework.build.text.labels import IGNORED
from framework.schema.choices import Divergence
from framework.schema.objectives import DistillationParams


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, terms: LossTerms = PLAIN
) -> Tensor:
    """Sum of cross entropies, and of `terms`, of `hidden @ weight.T + bias` against `targets`, which ignore -100.

    hidden `[tokens, width]`, weight `[vocabulary, width]`, bias `[vocabulary]`, targets `[tokens]`; float32 scalar.
    Under autocast the products run in its dtype, as a linear layer's would.
    """
    kind, dtype = product_dtype(hidden, weight)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, chunk, dtype, terms)  # type: ignore[no-untyped-call]
    return loss


def chunked_log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
) -> Tensor:
    """Log-probability of each target, 0 where it is -100: float32 of shape `[tokens]`. Arguments as above."""
    kind, dtype = product_dtype(hidden, weight)
    with torch.autocast(kind, enabled=False):
        found: Tensor = _ChunkedLogProbabilities.apply(hidden, weight, bias, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def chunked_counts(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum of cross entropies, and number of correctly predicted targets: float32 and int64 scalars."""
    kind, dtype = product_dtype(hidden, weight)
    losses = new_losses(hidden, targets)
    hits = torch.empty_like(targets, dtype=torch.bool)
    with torch.autocast(kind, enabled=False):
        computed = weight.to(dtype)
        for part in chunks(hidden, chunk):
            logits = chunk_logits(hidden[part].to(dtype), computed, bias)
            token_losses(logits, targets[part], losses[part], hits=hits[part])
            del logits
    return losses.sum(), hits.sum()


def product_dtype(hidden: Tensor, weight: Tensor) -> tuple[str, torch.dtype]:
    """Device type, and the dtype of a linear layer's product."""
    kind = "cpu" if hidden.device.type == "cpu" else "cuda"
    return kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def chunks(hidden: Tensor, chunk: int) -> Iterator[slice]:
    """Slices of the tokens, chunk by chunk."""
    return (slice(start, start + chunk) for start in range(0, hidden.shape[0], chunk))


def chunk_logits(rows: Tensor, computed: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of one chunk, in the dtype of the product."""
    logits = rows @ computed.t()
    if bias is not None:
        logits += bias
    return logits


def new_losses(hidden: Tensor, targets: Tensor) -> Tensor:
    """Empty tensor for token losses: float32, or float64 for float64 hidden states."""
    return torch.empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


class HeadGradients:
    """Gradients of a linear head's inputs and weights, accumulated over chunks; None if not needed."""

    def __init__(self, needed: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        of_hidden, of_weight, of_bias = needed
        self.hidden = torch.empty_like(hidden) if of_hidden else None
        self.weight = torch.zeros_like(weight) if of_weight else None
        self.bias = torch.zeros_like(bias) if bias is not None and of_bias else None

    def add(self, part: slice, grad: Tensor, rows: Tensor, computed: Tensor) -> None:
        """Add one chunk, given the gradient of its logits, the head's inputs and its weight in the dtype of the
        product."""
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.hidden is not None and self.hidden.dtype == grad.dtype:
            torch.mm(grad, computed, out=self.hidden[part])
        elif self.hidden is not None:
            self.hidden[part] = grad @ computed
        if self.weight is None:
            return
        if self.weight.dtype == grad.dtype:  # avoids a temporary as large as the weight
            self.weight.addmm_(grad.t(), rows)
        elif self.weight.dtype == torch.float32 and grad.device.type == "cuda" and torch.version.hip is None:
            # cuBLAS adds the product to a float32 total without a half-precision product
            torch.addmm(self.weight, grad.t(), rows, out_dtype=self.weight.dtype, out=self.weight)
        else:
            self.weight += grad.t() @ rows

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the order of the head's arguments."""
        return self.hidden, self.weight, self.bias


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
        terms: LossTerms,
    ) -> Tensor:
        needed = ctx.needs_input_grad[:3]
        computed, losses = weight.to(dtype), new_losses(hidden, targets)
        gradients = HeadGradients(needed, hidden, weight, bias)
        for part in chunks(hidden, chunk):
            rows = hidden[part].to(dtype)
            logits = chunk_logits(rows, computed, bias)
            token_losses(logits, targets[part], losses[part], with_grad=any(needed), terms=terms)
            gradients.add(part, logits, rows, computed)
            del logits
        ctx.save_for_backward(*gradients.all())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad.mul_(scale) if grad is not None else None for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None)


class _ChunkedLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        computed, losses = weight.to(dtype), new_losses(hidden, targets)
        for part in chunks(hidden, chunk):
            logits = chunk_logits(hidden[part].to(dtype), computed, bias)
            token_losses(logits, targets[part], losses[part])
            del logits
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk, ctx.dtype = chunk, dtype
        return losses.neg_()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        computed, scale = weight.to(ctx.dtype), scale.neg()
        losses = new_losses(hidden, targets)
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias)
        for part in chunks(hidden, ctx.chunk):
            rows = hidden[part].to(ctx.dtype)
            logits = chunk_logits(rows, computed, bias)
            token_losses(logits, targets[part], losses[part], scales=scale[part], with_grad=True)
            gradients.add(part, logits, rows, computed)
            del logits
        return (*gradients.all(), None, None, None)


class Head(NamedTuple):
    """Inputs of a head, `[tokens, width]`, with its weight `[vocabulary, width]` and bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Compared(NamedTuple):
    """Sums over supervised tokens, scalars: the loss, the divergence, the labels' cross entropy, and the number of
    correct predictions."""

    loss: Tensor
    divergence: Tensor
    label_loss: Tensor
    correct: Tensor


def compare(scores: Tensor, teachers: Tensor, targets: Tensor, rule: DistillationParams) -> Compared:
    """Student's and teacher's logits `[tokens, vocabulary]` against `targets` `[tokens]`; autograd follows."""
    supervised = targets != IGNORED
    log_q, log_p = ((part.float() / rule.temperature).log_softmax(1) for part in (scores, teachers))
    divergence = _between(log_p, log_q, rule.divergence).where(supervised, 0).sum()
    label_loss = F.cross_entropy(scores.float(), targets, ignore_index=IGNORED, reduction="sum")
    return Compared(_mixed(divergence, label_loss, rule), divergence, label_loss, (scores.argmax(1) == targets).sum())


def chunked_distillation(student: Head, teacher: Head, targets: Tensor, rule: DistillationParams, chunk: int) -> Tensor:
    """The distillation loss with the logits of at most `chunk` tokens at a time: a float32 scalar."""
    kind, dtype = product_dtype(student.hidden, student.weight)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _Distillation.apply(*student, teacher, targets, rule, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def chunked_comparison(student: Head, teacher: Head, targets: Tensor, rule: DistillationParams, chunk: int) -> Compared:
    """All sums of `Compared`, over chunks."""
    kind, dtype = product_dtype(student.hidden, student.weight)
    found: list[Compared] = []
    with torch.autocast(kind, enabled=False):
        weights = student.weight.to(dtype), teacher.weight.to(_teachers(teacher, dtype))
        for part in chunks(student.hidden, chunk):
            scores = chunk_logits(student.hidden[part].to(dtype), weights[0], student.bias)
            others = chunk_logits(teacher.hidden[part].to(weights[1].dtype), weights[1], teacher.bias)
            found.append(compare(scores, others, targets[part], rule))
            del scores, others
    return Compared(*(torch.stack(sums).sum() for sums in zip(*found, strict=True)))


def _teachers(teacher: Head, dtype: torch.dtype) -> torch.dtype:
    """dtype of the teacher's products: autocast's, else that of its weights."""
    kind = "cpu" if teacher.hidden.device.type == "cpu" else "cuda"
    return dtype if torch.is_autocast_enabled(kind) else teacher.weight.dtype


class _Distillation(torch.autograd.Function):
    """Distillation loss with gradients computed in forward, as for the chunked cross entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Head,
        targets: Tensor,
        rule: DistillationParams,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        computed, teachers = weight.to(dtype), teacher.weight.to(_teachers(teacher, dtype))
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in chunks(hidden, chunk):
            rows = hidden[part].to(dtype)
            scores = chunk_logits(rows, computed, bias).float()
            others = chunk_logits(teacher.hidden[part].to(teachers.dtype), teachers, teacher.bias).float()
            total += _chunk(scores, others, targets[part], rule)
            del others
            grad = scores.to(dtype)
            del scores
            gradients.add(part, grad, rows, computed)
            del grad
        ctx.save_for_backward(*gradients.all())
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads = [grad.mul_(scale) if grad is not None else None for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None, None)


def _chunk(scores: Tensor, others: Tensor, targets: Tensor, rule: DistillationParams) -> Tensor:
    """Loss sum of one chunk. The student's float32 logits become d loss / d logits in place; the teacher's are
    overwritten."""
    supervised, picked = targets != IGNORED, targets.clamp_min(0).unsqueeze(1)
    temperature, alpha = rule.temperature, rule.alpha
    log_q = (scores / temperature).log_softmax(1)
    log_p = others.div_(temperature).log_softmax(1)
    values, slope = _with_slope(log_p, log_q, rule.divergence)
    del log_p, log_q
    divergence = values.where(supervised, 0).sum()
    log_sum = scores.logsumexp(1)
    label_loss = (log_sum - scores.gather(1, picked).squeeze(1)).where(supervised, 0).sum()
    scores.sub_(log_sum.unsqueeze(1)).exp_()
    scores.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=scores.dtype))
    scores.mul_(1 - alpha).add_(slope, alpha=alpha * temperature)
    scores.mul_(supervised.unsqueeze(1))
    return _mixed(divergence, label_loss, rule)


def _mixed(divergence: Tensor, label_loss: Tensor, rule: DistillationParams) -> Tensor:
    return rule.alpha * rule.temperature**2 * divergence + (1 - rule.alpha) * label_loss


def _between(log_p: Tensor, log_q: Tensor, kind: Divergence) -> Tensor:
    """Divergence of each token from teacher `log_p` and student `log_q`, `[tokens]`."""
    if kind is Divergence.FORWARD_KL:
        return (log_p.exp() * (log_p - log_q)).sum(1)
    if kind is Divergence.REVERSE_KL:
        return (log_q.exp() * (log_q - log_p)).sum(1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * ((log_p.exp() * (log_p - log_m)).sum(1) + (log_q.exp() * (log_q - log_m)).sum(1))


def _with_slope(log_p: Tensor, log_q: Tensor, kind: Divergence) -> tuple[Tensor, Tensor]:
    """Divergence of each token, and T times its gradient with respect to the student's logits, `[tokens,
    vocabulary]`."""
    q = log_q.exp()
    if kind is Divergence.FORWARD_KL:
        p = log_p.exp()
        values = (log_p.sub_(log_q).mul_(p)).sum(1)
        return values, q.sub_(p)
    if kind is Divergence.REVERSE_KL:
        gap = log_q.sub_(log_p)
        values = (q * gap).sum(1)
        return values, q.mul_(gap.sub_(values.unsqueeze(1)))
    log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
    teachers = (log_p.exp() * (log_p - log_m)).sum(1)
    gap = log_q.sub_(log_m)
    own = (q * gap).sum(1)
    return 0.5 * (teachers + own), q.mul_(gap.sub_(own.unsqueeze(1))).mul_(0.5)
