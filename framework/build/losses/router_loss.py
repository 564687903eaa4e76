"""Router auxiliary loss of a mixture of experts, which balances the load of its experts.

transformers adds it to the model's own loss if the config has `output_router_logits: true`. Our loss is computed from
logits or hidden states, so the term is added here, by the model's own `load_balancing_loss_func` from the same router
logits. Other terms that a model may add are refused.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.build.losses.loss import Batch
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.config import TrainingConfig

KEY = "training.router_aux_loss_coef"
_NAMES = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient in a model's config; the second is JetMoe's (transformers 5.17 to 5.24)."""
_OTHER_TERMS = ("z_loss_coefficient", "router_z_loss_coef", "mtp_loss_scaling_factor", "mtp_loss_weight")
"""Coefficients of unsupported terms: Bamba's z-loss of the logits, a z-loss of routers, multi-token prediction heads
(transformers 5.17 to 5.24). 0 means that the model does not use the term."""
_ARGUMENTS = {"gate_logits", "num_experts", "top_k", "attention_mask"}


@dataclass(frozen=True)
class RouterLoss:
    """The term of a model: `coefficient` x the load balancing loss over the tokens of a micro-batch."""

    coefficient: float
    function: Callable[..., Tensor]
    experts: int
    chosen: int

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """Within the block record the router logits of each forward pass: per layer, `[tokens, experts]`."""
        seen: list[Tensor] = []
        body = causal_model(model).base_model

        def ask(module: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return inputs, {**named, "output_router_logits": True}

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            seen.extend(output.router_logits or ())

        handles = [body.register_forward_pre_hook(ask, with_kwargs=True), body.register_forward_hook(note)]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self, seen: list[Tensor], batch: Batch) -> Tensor:
        """The term, a float32 scalar. Padding is excluded as in transformers; virtual tokens of a trained prompt
        count."""
        ids = batch["input_ids"]
        mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(ids)
        places = seen[0].shape[0] // len(ids) - ids.shape[1]
        found: Tensor = self.function(tuple(seen), self.experts, self.chosen, F.pad(mask, (places, 0), value=1))
        return self.coefficient * found.float()


def refuse_other_terms(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError for an unsupported term of the model's own loss, and for a router loss without routers or
    where it cannot be computed as in transformers."""
    if config.training.task.facts.is_of_rows and config.training.router_aux_loss_coef is None:
        return  # models with a head for rows add no term
    settings, kind = architecture.get_text_config().to_dict(), architecture.model_type
    problems = [
        Problem(
            "model.architecture",
            f"the loss of {kind} adds a term, {name} {settings[name]:g}, which is not supported",
            None,
            f"{name}: 0",
        )
        for name in _OTHER_TERMS
        if settings.get(name)
    ]
    written = config.training.router_aux_loss_coef
    if written and not any(name in settings for name in _NAMES):
        problems.append(Problem(KEY, f"{kind} has no router auxiliary loss in transformers", expected="unset"))
    elif router_coefficient(config, settings):
        problems += [Problem(KEY, message, expected="0 (trains without the term)") for message in _impossible(config)]
    if problems:
        raise RequestError(problems)


def _impossible(config: TrainingConfig) -> Iterator[str]:
    """Reasons why a router loss cannot be part of this run."""
    training = config.training
    if not training.task.facts.is_next_token:
        yield f"the router auxiliary loss is added to the tasks sft and pretrain, and this is {training.task}"
    if config.sharing > 1:
        yield "with context or tensor parallel each device sees only a part of the tokens of the router auxiliary loss"
    if training.compile is True:
        yield "compiled blocks do not return the router logits for the auxiliary loss"
    if training.enable_gradient_checkpointing is True and training.gradient_checkpointing_kwargs.use_reentrant:
        yield "a re-entrant checkpoint cuts the router auxiliary loss off from its gradient"


def router_coefficient(config: TrainingConfig, settings: Mapping[str, Any]) -> float:
    """Coefficient of the term: as written, else the model's own if its config enables router logits, as in
    transformers; 0 for none. `settings` is the model's text config."""
    if config.training.router_aux_loss_coef is not None:
        return config.training.router_aux_loss_coef
    if config.training.task.facts.is_of_rows or not settings.get("output_router_logits"):
        return 0.0
    return float(next((settings[name] for name in _NAMES if settings.get(name)), 0.0))


def has_routers(settings: Mapping[str, Any]) -> bool:
    """Whether transformers has a router auxiliary loss for the model."""
    return "output_router_logits" in settings and any(name in settings for name in _NAMES)


def build_router_loss(config: TrainingConfig, model: nn.Module) -> RouterLoss | None:
    """The term of a built model; None without one. Raises RequestError for a family with a different computation."""
    causal = causal_model(model)
    coefficient = router_coefficient(config, causal.config.get_text_config().to_dict())
    function = load_balancing_loss(causal)
    if not coefficient or (function is None and config.training.router_aux_loss_coef is None):
        return None
    experts, chosen = getattr(causal, "num_experts", None), getattr(causal, "num_experts_per_tok", None)
    if function is None or {*inspect.signature(function).parameters} != _ARGUMENTS or not experts or not chosen:
        message = f"the router auxiliary loss of {causal.config.model_type} is not supported"
        raise RequestError([Problem(KEY, message, expected="0 (trains without the term)")])
    return RouterLoss(coefficient, function, experts, chosen)


def load_balancing_loss(causal: PreTrainedModel) -> Callable[..., Tensor] | None:
    """The function in the model's own module; None if it has none (Llama 4 has only a coefficient)."""
    return getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)


def describe_routers(config: TrainingConfig, architecture: PretrainedConfig) -> tuple[str, ...]:
    """A plan's assumptions about the router loss."""
    settings = architecture.get_text_config().to_dict()
    if not has_routers(settings) or config.training.task.facts.is_of_rows:
        return ()
    if coefficient := router_coefficient(config, settings):
        return (f"the routers' auxiliary loss is in the loss, x {coefficient:g}: their logits are kept for backward",)
    return ()
