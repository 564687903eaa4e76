"""Probes of a small random model: does it mix documents of a row, and can ranks split its rows?

A document that follows another must not depend on it (the gradient with respect to the other's embeddings is exactly
zero, in any dtype), and its output must be that of the document alone (positions restart). State-space and
linear-attention layers, and positions counted from the beginning of the row, fail one of these.

Ranks can split a row if only attention mixes its tokens. With every token attending to itself alone, a part of a row,
with its positions, must give the same output as within the row. Convolutions, state spaces, linear attention and
positions counted from the first token given fail that.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.build.attention.context import Context
from framework.build.attention.ring_attention import NAME, attending_to_themselves, know_ring_attention
from framework.build.data.packing import mark_documents, on_device
from framework.build.hub import one_line
from framework.build.losses.loss import model_inputs
from framework.build.model.parts import causal_model
from framework.errors import Problem, RequestError
from framework.schema.choices import Attention
from framework.schema.config import TrainingConfig
from framework.schema.data import DataParams

FIRST, SECOND = 5, 7
"""Tokens of the two documents of the probe; the second one is tested."""
TOLERANCE = 0.1
"""Allowed relative difference of the median token from the document alone. Half precision differs by a few hundredths
at most; positions that do not restart by more than a third."""
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
"""Upper bounds for the config of the small model; smaller and missing values are kept."""


def joining_key(data: DataParams) -> str | None:
    """The key that requested several documents per row, if any."""
    if not data.joins_rows:
        return None
    return "data.packing" if data.packing else "data.padding_free"


def refuse_leaks(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError, before any weight is loaded, if a small random model of this architecture mixes documents.

    Architectures that cannot be cut down, and kernels that need a GPU, are tested on the built model.
    """
    key, kernel = joining_key(config.data), config.model.attn_implementation
    if key is None or kernel not in (None, Attention.EAGER, Attention.SDPA):
        return
    with torch.random.fork_rng(devices=[]):
        small = cut_down(architecture, str(kernel) if kernel else None)
        leak = find_leak(small, torch.device("cpu")) if small is not None else None
    if leak is not None:
        message = f"{architecture.model_type} does not separate documents in one row: {leak}"
        raise RequestError([Problem(key, message, expected="false")])


def find_leak(model: nn.Module, device: torch.device) -> str | None:
    """How this model mixes documents, or None if it does not. Restores the model's mode."""
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
        return f"it does not accept the arguments that would ({one_line(error)})"
    finally:
        handle.remove()
        model.train(training)
    if bool(gradient[:, :FIRST].any()):
        return "predictions in one depend on the one before"
    distance = (packed.detach() - alone).norm(dim=-1) / alone.norm(dim=-1)
    if not float(distance.median()) < TOLERANCE:
        return f"positions do not restart (its predictions differ by {float(distance.median()):.0%} from those alone)"
    return None


def cut_down(architecture: PretrainedConfig, attention: str | None) -> PreTrainedModel | None:
    """A random float32 model of a few thousand weights with one layer of each type; None if it cannot be built."""
    small = copy.deepcopy(architecture)
    text = small.get_text_config()
    groups = getattr(text, "num_key_value_heads", None) != getattr(text, "num_attention_heads", None)
    for name, size in {**_SMALL, "num_key_value_heads": 2 if groups else 4}.items():
        if isinstance(written := getattr(text, name, None), int) and written > size:
            with contextlib.suppress(AttributeError):
                setattr(text, name, size)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = 0  # the small vocabulary has no such token
    _keep_one_layer_of_each_kind(text)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=attention
        )
        with torch.no_grad():
            model.eval()(input_ids=torch.arange(1, 9).unsqueeze(0), use_cache=False)
    except Exception:  # inconsistent shapes: each family raises its own error
        return None
    for parameter in model.parameters():  # with usual initial weights layers have hardly any effect
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


def _keep_one_layer_of_each_kind(text: PretrainedConfig) -> None:
    """Reduce the layers, and every list with an entry per layer, to the first of each type."""
    layers = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers}
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kinds.setdefault(str([values[layer] for values in lists.values()]), layer)
    kept = sorted(kinds.values())[:8]
    text.num_hidden_layers = len(kept)
    for name, values in lists.items():
        setattr(text, name, [values[layer] for layer in kept])


SHARING, CHUNK = 2, 4
"""Ranks of the probe, and tokens of each of their two chunks."""
MIXING_TOLERANCE = 1e-3
"""Relative difference of logits in float32; a convolution's is a tenth and more."""
_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions that depend on the largest position given, which differs between ranks."""


def refuse_mixing(config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError, before any weight is loaded, if ranks cannot split rows of such a model.

    Architectures that cannot be cut down are tested on the built model (`framework.build.verify.sharding`).
    """
    if config.context_size == 1:
        return
    kind = architecture.model_type
    message = None
    if stretched := sorted({*_rope_types(architecture.get_text_config().to_dict())} & {*_BY_LENGTH}):
        message = f"{kind} has {stretched[0]} positions, which depend on the last position that a device sees"
    else:
        know_ring_attention()
        with torch.random.fork_rng(devices=[]):
            with attending_to_themselves():
                small = cut_down(architecture, NAME)
            if small is None and cut_down(architecture, None) is not None:
                message = f"{kind} does not use transformers' attention interface"
            elif small is not None and not _difference(small) < MIXING_TOLERANCE:
                message = f"other layers than attention mix the tokens of {kind}, of which each device has a part"
    if message is not None:
        raise RequestError([Problem("model.attn_implementation", message, expected="sdpa")])


def _difference(model: PreTrainedModel) -> float:
    """Largest relative difference of a token's logits between a part of a row and the whole row."""
    ids = (torch.arange(2 * CHUNK * SHARING) * 5 + 3).remainder(model.config.get_text_config().vocab_size).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad(), attending_to_themselves():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = [Context(rank, SHARING).cut(batch) for rank in range(SHARING)]
        found = [(part, model(**model_inputs(model, part), use_cache=False).logits) for part in parts]
    rows = [(logits, whole[:, part["positions"][0]]) for part, logits in found]
    return max(float(((logits - row).norm(dim=-1) / row.norm(dim=-1)).max()) for logits, row in rows)


def _rope_types(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in ("rope_scaling", "rope_parameters"):
        rope = settings.get(key)
        if isinstance(rope, Mapping):
            kinds = [rope, *(item for item in rope.values() if isinstance(item, Mapping))]
            yield from (str(kind.get("rope_type", kind.get("type"))) for kind in kinds)
