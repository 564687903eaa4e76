"""Evaluation: the mean loss over held-out rows, the task's metrics, and completions. No logits outlive their batch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.averages import averaged
from framework.build.losses.loss import Batch, Observe
from framework.build.model.parts import causal_model
from framework.build.tasks.objective import Objective
from framework.run.ranks.signals import Interrupt
from framework.run.step import eval_step
from framework.schema.evaluation import FROM_PYTHON

Sums: TypeAlias = Mapping[str, Tensor]
"""Sums over batches by name, from which an objective computes its `metrics`."""
MOST_METRICS = 6
"""Most numbers of an evaluation on its progress line; `metrics.jsonl` has all."""


def format_losses(values: Mapping[str, float]) -> str:
    """One line for an evaluation: the loss, the first of the task's metrics, and the loss of each named set."""
    of_all = [(name.replace("_", " "), value) for name, value in values.items() if "/" not in name][1:MOST_METRICS]
    of_sets, own = (
        [(name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix)]
        for prefix in ("eval_loss/", FROM_PYTHON)
    )
    rest = (f"{name} {value:.4f}" for name, value in (*of_all, *of_sets, *own))
    return "  ".join([f"eval loss {values['eval_loss']:.4f}", *rest])


class Abandoned(Exception):
    """The user asked the run to end during an evaluation."""


def until_asked(batches: Iterable[Batch], interrupt: Interrupt) -> Iterator[Batch]:
    """Yield the batches. Raises Abandoned instead of the next one after Ctrl-C."""
    for batch in batches:
        if interrupt.asked:
            raise Abandoned
        yield batch


def evaluate(assembly: Assembly, batches: Iterable[Batch], observe: Observe) -> dict[str, float]:
    """Compute `eval_loss` (mean over the terms of all batches of all ranks) and the task's metrics. Leaves the model in
    train mode."""
    return assembly.objective.metrics(sum_up(assembly, batches, observe))


def sum_up(assembly: Assembly, batches: Iterable[Batch], observe: Observe) -> Sums:
    """The objective's sums over all batches of all ranks, float64 on the host. Leaves the model in train mode."""
    assembly.model.eval()
    total: dict[str, Tensor] = {}
    try:
        with averaged(assembly):
            for batch in batches:
                for name, value in eval_step(assembly, batch, observe).items():
                    total[name] = total.get(name, 0) + value.double().cpu()
    finally:
        assembly.model.train()
        if assembly.sharding is not None:
            assembly.sharding.free_gathered()  # normally backward does this
        observe("end")
    if assembly.ranks.world > 1:
        device = assembly.place.device  # where the ranks can all-reduce
        total = {name: assembly.ranks.sum(total[name].to(device)).cpu() for name in sorted(total)}
    return total


def add_up(sums: Iterable[Sums]) -> Sums:
    """Add the sums of several sets of rows."""
    total: dict[str, Tensor] = {}
    for own in sums:
        for name, value in own.items():
            total[name] = total.get(name, 0) + value
    return total


def metrics_of_sets(objective: Objective, sums: Mapping[str, Sums]) -> dict[str, float]:
    """`eval_loss` and the task's metrics over all rows, then those of each named set as `METRIC/NAME`."""
    named = ((name, objective.metrics(own)) for name, own in sums.items() if name)
    own = {f"{metric}/{name}": value for name, values in named for metric, value in values.items()}
    return objective.metrics(add_up(sums.values())) | own


def complete(assembly: Assembly, prompt: list[int], new_tokens: int, pad_token_id: int, *, draws: bool) -> list[int]:
    """Generate at most `new_tokens` tokens after a prompt, greedily, or sampled from the 20 most likely at a
    temperature of 0.7 if `draws`. Leaves the model in train mode."""
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
    """Run the forward pass of a completion that needs most memory: `ids`, `[1, tokens]`, are the prompt and everything
    generated, with a full key-value cache."""
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
    """Complete with a trained prompt: peft 0.21 loses a prefix in transformers' `generate`."""
    start = ids.shape[1]
    for _ in range(new_tokens):
        logits = assembly.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        scores, tokens = logits.topk(20 if draws else 1)
        chosen = torch.multinomial((scores / 0.7).softmax(-1), 1) if draws else scores.new_zeros(1, dtype=torch.int64)
        ids = torch.cat([ids, tokens[chosen][None]], 1)
    found: list[int] = ids[0, start:].tolist()
    return found
