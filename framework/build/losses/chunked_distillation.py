"""How far a student's next tokens are from a teacher's, over all logits at once or a chunk of tokens at a time.

Of each supervised token: alpha T^2 D(teacher, student) + (1 - alpha) cross entropy with the label, D taken between the
softmaxes of logits / T. T^2 keeps the size of the gradients when T changes (Hinton et al. 2015, arXiv 1503.02531,
section 2). Forward KL is theirs, reverse KL that of MiniLLM (Gu et al. 2023, arXiv 2306.08543), JSD the even mixture of
GKD (Agarwal et al. 2023, arXiv 2306.13649, equation 1 with beta = 1/2).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.build.losses.chunked_loss import HeadGradients, chunk_logits, chunks, product_dtype
from framework.schema.choices import Divergence
from framework.schema.distillation import DistillationParams

IGNORED = -100


class Head(NamedTuple):
    """What a head is given, `[tokens, width]`, with its weight `[vocabulary, width]` and bias."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Compared(NamedTuple):
    """Sums over supervised tokens, scalars: the loss, the divergence alone, the labels' cross entropy, and how many
    tokens are the likeliest."""

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
    return Compared(_mixed(divergence, label_loss, rule), divergence, label_loss, _hits(scores, targets))


def chunked_distillation(student: Head, teacher: Head, targets: Tensor, rule: DistillationParams, chunk: int) -> Tensor:
    """The same loss without the logits of more than `chunk` tokens: a float32 scalar."""
    kind, dtype = product_dtype(student.hidden, student.weight)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _Distillation.apply(*student, teacher, targets, rule, chunk, dtype)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def chunked_comparison(student: Head, teacher: Head, targets: Tensor, rule: DistillationParams, chunk: int) -> Compared:
    """All four sums, a chunk at a time."""
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
    """The dtype of the teacher's products: autocast's where there is autocast, else its own weights'."""
    kind = "cpu" if teacher.hidden.device.type == "cpu" else "cuda"
    return dtype if torch.is_autocast_enabled(kind) else teacher.weight.dtype


class _Distillation(torch.autograd.Function):
    """Gradients are computed in forward, as for a chunked cross entropy."""

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
    """Loss sum of one chunk. The student's float32 logits become d loss / d logits, in place; the teacher's are used
    up."""
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
    """The same, and T times its gradient with respect to the student's logits, `[tokens, vocabulary]`."""
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


def _hits(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores.argmax(1) == targets).sum()
