"""What the model of a run writes: the same code for samples during training, for the last one, and in a plan."""

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.losses.loss import Observe
from framework.build.model.parts import causal_model


def complete(assembly: Assembly, prompt: list[int], new_tokens: int, pad_token_id: int, *, draws: bool) -> list[int]:
    """At most `new_tokens` tokens that follow a prompt: the likeliest each time, or drawn from the 20 likeliest at a
    temperature of 0.7. Leaves the model in train mode."""
    model, ids = assembly.model, torch.tensor([prompt], device=assembly.place.device)
    model.eval()
    try:
        with torch.no_grad(), assembly.autocast:
            if hasattr(model, "prompt_encoder"):
                return _token_by_token(assembly, ids, new_tokens, draws)
            written = causal_model(model).generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                use_cache=True,
                pad_token_id=pad_token_id,
                **({"do_sample": True, "temperature": 0.7, "top_k": 20} if draws else {"do_sample": False}),
            )
            found: list[int] = written[0, len(prompt) :].tolist()
            return found
    finally:
        model.train()


def completion_step(assembly: Assembly, ids: Tensor, observe: Observe) -> None:
    """The forward pass that a completion needs most memory for: `ids`, `[1, tokens]`, are the prompt and all that was
    written, and the keys and values of all of them stay."""
    observe("eval")
    assembly.model.eval()
    try:
        with torch.no_grad(), assembly.autocast:
            if hasattr(assembly.model, "prompt_encoder"):
                assembly.model(input_ids=ids, use_cache=False)
                return
            model = causal_model(assembly.model)
            last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **last)
    finally:
        assembly.model.train()


def _token_by_token(assembly: Assembly, ids: Tensor, new_tokens: int, draws: bool) -> list[int]:
    """The same for a trained prompt: peft 0.21 loses a prefix in transformers' `generate`."""
    start = ids.shape[1]
    for _ in range(new_tokens):
        logits = assembly.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        scores, tokens = logits.topk(20 if draws else 1)
        chosen = torch.multinomial((scores / 0.7).softmax(-1), 1) if draws else scores.new_zeros(1, dtype=torch.int64)
        ids = torch.cat([ids, tokens[chosen][None]], 1)
    found: list[int] = ids[0, start:].tolist()
    return found
