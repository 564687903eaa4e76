"""Readers of the loss: whether it is computed as requested, and equal to the model's own."""

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.build.assembly import Assembly
from framework.build.hub import one_line
from framework.build.losses.cross_entropy import PLAIN, LossTerms
from framework.build.losses.loss import (
    Batch,
    asks_for_router_logits,
    chunk_size,
    head_is_last,
    ignore_phases,
    model_inputs,
    token_logits,
)
from framework.build.losses.router_loss import KEY, RouterLoss, has_routers, load_balancing_loss, router_coefficient
from framework.build.model.embedding_noise import embedding_noise
from framework.build.model.parts import causal_model
from framework.build.tasks.next_token import NextToken
from framework.build.tasks.rows import OneClass
from framework.build.verify.reading import Reading
from framework.schema.plural import counted

T = TypeVar("T")
CHANGED, SOURCE = "no: this model changes its logits after the head", "logits with the head's output replaced"
PROBE_TOKENS = 8
TOLERANCE = 1e-4
"""Maximum relative difference of two cross entropies of the same logits in float32: rounding is a hundredth of it."""

TERMS_CLOSE = 2e-3
"""Maximum difference, also relative to the value, of the terms in the loss of 8 tokens, if chunks round half precision
products differently from the full head."""


def read_chunked_loss(assembly: Assembly) -> Iterator[Reading]:
    """Whether the head can be computed separately from the model, by a forward pass of a few tokens."""
    written, task = assembly.config.model.chunked_loss, assembly.config.training.task
    if task.facts.is_of_rows or (written is None and task.facts.has_teacher):
        return
    used = chunk_size(assembly.config.model, assembly.model) if written is None else written
    if used is None or used is False:
        return
    asked = str(used)
    yield Reading("model.chunked_loss", asked, asked if _is_separable(assembly, assembly.model) else CHANGED, SOURCE)
    if assembly.config.training.teacher is not None and assembly.frozen_model is not None:
        found = asked if _is_separable(assembly, assembly.frozen_model) else CHANGED
        yield Reading("model.chunked_loss of the teacher", asked, found, SOURCE)


def _is_separable(assembly: Assembly, model: nn.Module) -> bool:
    """Whether the head of a model can be computed separately from it."""
    was_training = model.training
    model.eval()
    with assembly.autocast:
        batch = {"input_ids": torch.arange(4, device=assembly.place.device).unsqueeze(0)}
        with torch.no_grad():
            separates = assembly.through(head_is_last, batch) if model is assembly.model else head_is_last(model, batch)
    model.train(was_training)
    if assembly.sharding is not None:
        assembly.sharding.free_gathered()  # no backward follows
    return bool(separates)


def read_router_loss(assembly: Assembly) -> Iterator[Reading]:
    """For a mixture of experts: the router loss, and the number of layers whose router logits are in it."""
    causal, written, routers = (
        causal_model(assembly.model),
        assembly.config.training.router_aux_loss_coef,
        _routers(assembly),
    )
    settings = causal.config.get_text_config().to_dict()
    if (
        assembly.config.training.task.facts.is_of_rows
        or not has_routers(settings)
        or load_balancing_loss(causal) is None
    ):
        return
    if not router_coefficient(assembly.config, settings) and routers is None:
        off = ("switched off", "the recipe")
        why, source = off if written == 0 else ("output_router_logits is false", "the model's config")
        yield Reading(KEY, None, f"not in the loss: {why}", source)
        return
    seen = _of_few_tokens(assembly, partial(_router_logits, routers)) if routers is not None else []
    reached = routers is not None and any(logits.requires_grad for logits in seen)
    found = f"{routers.coefficient:g}" if routers is not None and reached else "no router's logits are in the loss"
    asked = f"{router_coefficient(assembly.config, settings):g}"
    yield Reading(KEY, asked, found, f"router logits of {PROBE_TOKENS} tokens, {counted(len(seen), 'layer')}")


def _router_logits(routers: RouterLoss, model: nn.Module, batch: Batch) -> list[Tensor]:
    with routers.watched(model) as seen, torch.enable_grad():
        model(**model_inputs(model, batch), use_cache=False)
    return seen


def read_loss_terms(assembly: Assembly) -> Iterator[Reading]:
    """Label smoothing and z-loss: their part of the loss of a few tokens, compared with torch's computation from the
    same logits. If a rank has only part of the rows or matrices, the attributes of the built loss are read instead."""
    training, objective = assembly.config.training, assembly.objective
    wanted = LossTerms(training.label_smoothing, training.z_loss_coef)
    if isinstance(objective, OneClass) and wanted.smoothing:
        asked, found = f"{wanted.smoothing:g}", f"{objective.smoothing:g}"
        yield Reading("training.label_smoothing", asked, found, "the objective of rows")
    if not isinstance(objective, NextToken) or wanted == PLAIN:
        return
    built, source = objective.loss.terms, "the loss as built"
    if assembly.config.sharing == 1:
        added, expected = _of_few_tokens(assembly, partial(_added, objective, wanted))
        built = wanted if math.isclose(added, expected, rel_tol=TERMS_CLOSE, abs_tol=TERMS_CLOSE) else PLAIN
        source = f"adds {added:.4g} to the loss of {PROBE_TOKENS} tokens, torch {expected:.4g}"
    for key, value, own in zip(("label_smoothing", "z_loss_coef"), wanted, built, strict=True):
        if value:
            yield Reading(f"training.{key}", f"{value:g}", f"{own:g}", source)


def _added(objective: NextToken, wanted: LossTerms, model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The built terms' part of the loss of a batch, and torch's computation from its logits."""
    with torch.no_grad():
        added = objective.loss(model, batch, ignore_phases) - objective.loss.counts(model, batch)[0]
        scores = token_logits(model, batch, ignore_phases)[0, :-1].float()
    smoothed, plain = (
        F.cross_entropy(scores, batch["labels"][0, 1:], reduction="sum", label_smoothing=share)
        for share in (wanted.smoothing, 0.0)
    )
    return float(added), float(smoothed - plain + wanted.z_loss * scores.logsumexp(1).square().sum())


def read_embedding_noise(assembly: Assembly) -> Iterator[Reading]:
    """NEFTune: the noise of the input embeddings in training."""
    asked, found = assembly.config.training.neftune_noise_alpha, embedding_noise(assembly.model)
    if asked is not None or found:
        shown = " and ".join(f"{noise.alpha:g}" for noise in found) or "no noise"
        yield Reading("training.neftune_noise_alpha", f"{asked or 0:g}", shown, "hooks of the input embeddings")


def read_own_loss(assembly: Assembly) -> Iterator[Reading]:
    """Check that the model's own loss has no term that is missing here.

    The model's loss of a few tokens is compared with the cross entropy of the next tokens from the same logits. The
    router loss is read separately. Skipped if a rank has only part of the rows or matrices: such a family's terms are
    found on one device.
    """
    if assembly.config.training.task.facts.is_of_rows or assembly.config.sharing > 1:
        return
    if "labels" not in inspect.signature(type(causal_model(assembly.model)).forward).parameters:
        return
    is_known = assembly.config.training.router_aux_loss_coef is not None or _routers(assembly) is not None
    key, asked = "terms of the loss", "those of the model's own"
    source = f"its loss of {PROBE_TOKENS} tokens"
    try:
        beyond = float(_of_few_tokens(assembly, partial(_beyond, routed=not is_known)))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        yield Reading(key, None, f"not compared: it computes no loss from labels ({one_line(error)})", source)
        return
    if not math.isfinite(beyond):  # a step reports it with its rows
        yield Reading(key, None, "not compared: the loss of so few tokens is not finite", source)
        return
    missing = f"the model's own loss is {beyond:+.3g} off: it has a term that is not supported"
    yield Reading(key, asked, asked if abs(beyond) < TOLERANCE else missing, source)


def _beyond(model: nn.Module, batch: Batch, routed: bool) -> float:
    """Relative difference between the model's own loss and the cross entropy of its logits; 0 if it has no loss.

    `routed`: with its router loss, if any. Encoder-decoder families (BART) use labels as they are, others shift them.
    """
    causal, ids = causal_model(model), batch["input_ids"]
    without = {"output_router_logits": False} if asks_for_router_logits(model) and not routed else {}
    with torch.no_grad():
        output = causal(input_ids=ids, labels=ids, use_cache=False, **without)
    if output.loss is None or output.logits is None:
        return 0.0
    own = float(output.loss)
    pairs = ((output.logits[0, :-1], ids[0, 1:]), (output.logits[0], ids[0]))
    usual = [float(F.cross_entropy(of, to)) for logits, to in pairs for of in (logits.float(), logits)]
    return min((own - loss for loss in usual), key=abs) / max(1.0, abs(own))


def _routers(assembly: Assembly) -> RouterLoss | None:
    return assembly.objective.routers if isinstance(assembly.objective, NextToken) else None


def _of_few_tokens(assembly: Assembly, look: Callable[[nn.Module, Batch], T]) -> T:
    """The result of `look` for a row of a few tokens, with the model in eval mode."""
    vocabulary = causal_model(assembly.model).config.get_text_config().vocab_size
    ids = torch.arange(1, PROBE_TOKENS + 1, device=assembly.place.device).remainder(vocabulary).unsqueeze(0)
    was_training = assembly.model.training
    assembly.model.eval()
    try:
        with assembly.keeping_gradients(is_last=False), assembly.autocast:
            found: T = assembly.through(look, {"input_ids": ids, "labels": ids})
    finally:
        assembly.model.train(was_training)
        if assembly.sharding is not None:
            assembly.sharding.free_gathered()  # no backward follows
    return found
