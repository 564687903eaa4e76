"""Whether a model keeps the documents of one row apart, found by asking it.

Two things must hold of a document that follows another: nothing that it predicts depends on the other (the gradient
with respect to the other's embeddings is exactly zero, whatever the dtype), and it comes out as it does alone (its
positions restart). State-space and linear-attention layers, and positions counted from the row's beginning, fail one.
"""

import contextlib
import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.build.data.documents import mark_documents, on_device
from framework.build.hub import one_line
from framework.build.losses.loss import model_inputs
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.choices import Attention
from framework.schema.config import TrainingConfig
from framework.schema.data import DataParams

FIRST, SECOND = 5, 7
"""Tokens of the two documents of the probe; the second one is looked at."""
TOLERANCE = 0.1
"""Relative difference of the median token from the document alone. Half precision differs by a few hundredths at most;
positions that do not restart, in models that count them from the beginning, by more than a third."""
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
}
"""What a model of the same kind is cut down to; where a config has a smaller value, or none, it keeps that."""


def joining_key(data: DataParams) -> str | None:
    """The key that asked for several documents in a row, if one did."""
    if not data.joins_rows:
        return None
    return "data.packing" if data.packing else "data.padding_free"


def refuse_leaks(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raises RequestError, before any weight is loaded, where a small random model of this kind mixes documents.

    Kinds that cannot be cut down this way, and kernels that need a GPU, are left to the built model's own reading.
    """
    key, kernel = joining_key(config.data), config.model.attn_implementation
    if key is None or kernel not in (None, Attention.EAGER, Attention.SDPA):
        return
    with torch.random.fork_rng(devices=[]):
        small = cut_down(architecture, str(kernel) if kernel else None)
        leak = find_leak(small, torch.device("cpu")) if small is not None else None
    if leak is not None:
        message = f"{architecture.model_type} does not keep documents in one row apart: {leak}"
        raise RequestError([Problem(key, message, expected="false")])


def find_leak(model: nn.Module, device: torch.device) -> str | None:
    """What mixes documents in this model, or None where nothing does. Leaves the model in the mode it was in."""
    embedding, seen = causal_model(model).get_input_embeddings(), []
    vocabulary = causal_model(model).config.get_text_config().vocab_size
    ids = (torch.arange(FIRST + SECOND, device=device) * 5 + 3).remainder(vocabulary).unsqueeze(0)
    batch = {"input_ids": ids, **on_device(device, mark_documents([[FIRST, SECOND]], FIRST + SECOND))}

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    training = model.training
    model.eval()
    handle = embedding.register_forward_hook(watch)
    try:
        with torch.enable_grad():
            packed = model(**model_inputs(model, batch), use_cache=False).logits[0, FIRST:].float()
        (gradient,) = torch.autograd.grad(packed.square().mean(), seen[0])
        with torch.no_grad():
            alone = model(input_ids=ids[:, FIRST:], use_cache=False).logits[0].float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        return f"it does not take what would ({one_line(error)})"
    finally:
        handle.remove()
        model.train(training)
    if bool(gradient[:, :FIRST].any()):
        return "what it predicts in one depends on the one before"
    apart = (packed.detach() - alone).norm(dim=-1) / alone.norm(dim=-1)
    if not float(apart.median()) < TOLERANCE:
        return f"positions do not restart (its predictions differ by {float(apart.median()):.0%} from those alone)"
    return None


def cut_down(architecture: PretrainedConfig, attention: str | None) -> PreTrainedModel | None:
    """A random float32 model of a few thousand weights with one layer of each kind; None where there is no such."""
    small = copy.deepcopy(architecture)
    text = small.get_text_config()
    groups = getattr(text, "num_key_value_heads", None) != getattr(text, "num_attention_heads", None)
    for name, size in {**_SMALL, "num_key_value_heads": 2 if groups else 4}.items():
        if isinstance(written := getattr(text, name, None), int) and written > size:
            with contextlib.suppress(AttributeError):
                setattr(text, name, size)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = 0  # the probe has no such token
    _keep_one_layer_of_each_kind(text)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=attention
        )
        with torch.no_grad():
            model.eval()(input_ids=torch.arange(1, 9).unsqueeze(0), use_cache=False)
    except Exception:  # a shape that does not fit another: each family has its own error for it
        return None
    for parameter in model.parameters():  # usual starting weights are so small that layers hardly matter
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def _keep_one_layer_of_each_kind(text: PretrainedConfig) -> None:
    """Cut the list of layers, and every list that has an entry a layer, down to the first of each kind."""
    layers = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers}
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kinds.setdefault(str([values[layer] for values in lists.values()]), layer)
    kept = sorted(kinds.values())[:8]
    text.num_hidden_layers = len(kept)
    for name, values in lists.items():
        setattr(text, name, [values[layer] for layer in kept])
