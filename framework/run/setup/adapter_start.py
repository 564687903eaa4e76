"""`peft.lora_init: eva`: LoRA's A matrices from the principal components of what the adapted modules are given.

Paischer et al. 2024, arXiv 2410.07170, by peft's own `initialize_lora_eva_weights`, with the rank of each module kept.
"""

import time
from itertools import islice
from unittest.mock import patch

import torch
from torch import Tensor, nn

from framework.build.data.batches import eval_batches
from framework.build.data.packing import on_device
from framework.build.losses.loss import Batch, model_inputs
from framework.build.model.parts import causal_model
from framework.build.text.labels import IGNORED
from framework.errors import Problem, RequestError, VerificationFailed
from framework.run.session import Session
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit
from framework.schema.plural import counted

KEY = "peft.lora_init"
MOST_BATCHES, MOST_PASSES = 32, 50
"""Micro batches of training rows that are looked at, in turns, and how often at most; components of language models'
inputs converge within a few turns."""
ORTHONORMAL = 1e-3
"""Largest distance of A A^T from the identity: float32 components of peft's incremental decomposition."""


def start_from_rows(session: Session) -> None:
    """Start the A matrices of a new run from its training rows, where that was asked for.

    Raises RequestError where rows have too few supervised tokens, VerificationFailed where the matrices are no
    components.
    """
    config, adapter = session.config, session.assembly.adapter
    is_asked = config.peft.lora_init is LoraInit.EVA and "lora_init" in ADAPTERS[config.peft.peft_method].keys
    if adapter is None or not is_asked or session.step or config.peft.adapter_path is not None:
        return
    from peft.tuners.lora.config import EvaConfig
    from peft.tuners.lora.eva import SVDHook, initialize_lora_eva_weights  # seconds to import

    from framework.build.adapters.first_adapter import drawn_for

    batches, began, passes = _batches(session), time.perf_counter(), 0

    def look(model: nn.Module, batch: Batch) -> None:
        nonlocal passes
        passes += 1
        if passes > MOST_PASSES * len(batches):
            message = f"the components of {counted(len(batches), 'micro batch', 'micro batches')} do not converge"
            raise RequestError([Problem(KEY, message, expected="gaussian, or longer rows")])
        causal = causal_model(model)
        with torch.no_grad(), session.assembly.attention, session.assembly.autocast:
            causal.base_model(**model_inputs(model, batch), use_cache=False)

    own = adapter.model.peft_config["default"]
    own.init_lora_weights, own.eva_config = "eva", EvaConfig(rho=1.0)  # each module keeps the rank that was planned
    # Under autocast the decomposition's products would be half precision, which torch's QR takes on no device.
    decompose = torch.autocast(session.assembly.place.kind, enabled=False)(SVDHook.__call__)
    drawn = drawn_for("eva", config.training.seed, session.assembly.place)
    with drawn, torch.no_grad(), patch.object(SVDHook, "__call__", decompose):
        initialize_lora_eva_weights(
            adapter.model,
            dataloader=batches,
            forward_fn=look,
            prepare_model_inputs_fn=lambda batch, _: _looked_at(batch).nonzero(),
            show_progress_bar=False,
        )
    # How many A matrices there are, and how far the products of their rows are from the identity at most.
    found = [item.detach().float() for name, item in adapter.model.named_parameters() if ".lora_A." in name]
    count, apart = len(found), max(float((item @ item.T - torch.eye(len(item)).to(item)).abs().max()) for item in found)
    if apart > ORTHONORMAL:
        raise VerificationFailed(f"{KEY}: asked eva, in effect A matrices whose rows are not orthonormal ({apart:.2g})")
    session.meter.observe("end")
    seconds = time.perf_counter() - began
    session.progress.say(
        f"start     {counted(count, 'A matrix', 'A matrices')} from the inputs of their modules in {seconds:.1f} s"
    )


def _batches(session: Session) -> list[Batch]:
    """Micro batches of the first training rows that have as many supervised tokens as the highest rank is."""
    config, least = session.config, _highest_rank(session)
    made = eval_batches(
        session.inputs.data.train,
        config.batch.per_device,
        session.batches.pad_token_id,
        padding_free=config.data.padding_free,
        multiple=config.padded(1),
    )
    placed = (on_device(session.assembly.place.device, batch) for batch in made)
    wanted = (batch for batch in placed if int(_looked_at(batch).sum()) >= least)
    found: list[Batch] = list(islice(wanted, MOST_BATCHES))
    if not found:
        message = f"no micro batch has as many supervised tokens as the rank is ({least})"
        raise RequestError([Problem(KEY, message, expected="gaussian, more rows a micro batch, or a lower rank")])
    return found


def _highest_rank(session: Session) -> int:
    named = session.assembly.model.named_parameters()
    return max(item.shape[0] for name, item in named if ".lora_A." in name)


def _looked_at(batch: Batch) -> Tensor:
    """Which tokens the components are of: the supervised ones, or all that are no padding; bool `[rows, tokens]`."""
    if "labels" in batch:
        return batch["labels"] != IGNORED
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
