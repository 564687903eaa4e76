"""`peft.lora_init: eva`: LoRA's A matrices from the principal components of the adapted modules' inputs.

Paischer et al. 2024, arXiv 2410.07170, with peft's own `initialize_lora_eva_weights`, keeping each module's rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from framework import activity
from framework.build.data.batches import eval_batches
from framework.build.data.packing import on_device
from framework.build.losses.loss import Batch, model_inputs
from framework.build.model.parts import causal_model
from framework.build.text.labels import IGNORED
from framework.errors import Problem, RequestError, VerificationFailed
from framework.run.session import Session
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit
from framework.schema.peft import EVA_PASSES
from framework.schema.plural import counted

KEY = "peft.lora_init"
WORK = "the components of the adapted modules' inputs"
MOST_BATCHES = 32
"""Micro-batches of training rows, used in turn."""
ORTHONORMAL = 1e-3
"""Tolerance of A A^T's distance from the identity, for float32 components of peft's incremental decomposition."""


@dataclass
class _Search:
    """Iterative search for the components, pass by pass."""

    session: Session
    passes: int = 0
    converged: dict[str, Tensor] = field(default_factory=dict)
    """Name of a module -> which of its components have converged; bool `[rank]`."""
    unsettled: int = 0
    """Number of modules whose components have not converged in the last pass."""
    _began: float = field(default_factory=time.perf_counter)

    def forward(self, model: nn.Module, batch: Batch) -> None:
        """Run a forward pass over a micro-batch, in which peft's hooks see the inputs. The first one finds equal
        inputs."""
        settled = sum(bool(item.all()) for item in self.converged.values())
        if self.passes:
            known = f", {settled} of {len(self.converged)} inputs settled" if self.converged else ""
            pace = (time.perf_counter() - self._began) / self.passes
            activity.now(f"{WORK}: pass {self.passes} of at most {EVA_PASSES}{known}, {pace:.1f} s a pass")
        self.passes += 1
        with torch.no_grad(), self.session.assembly.attention, self.session.assembly.autocast:
            causal_model(model).base_model(**model_inputs(model, batch), use_cache=False)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Patch peft's hooks within the block: a bounded number of passes, float32, and fast comparison of inputs.

        Inputs are equal if they are the same tensor: peft's hash iterates over every number in Python, 25 s for 32
        modules of 4 x 2,048 x 1,024. Under autocast the decomposition's products would be half precision, which
        torch's QR supports on no device.
        """
        from peft.tuners.lora.eva import HashHook, SVDHook  # seconds to import

        numbers, seen = count(), WeakTensorKeyDictionary()
        decompose = torch.autocast(self.session.assembly.place.kind, enabled=False)(SVDHook.__call__)

        def number(hook: Any, module: nn.Module, given: Any, output: Any) -> None:
            tensor = given[0] if isinstance(given, tuple) else given
            hook.hashed_inputs.append(seen.setdefault(tensor, next(numbers)))  # type: ignore[no-untyped-call]

        def bounded(hook: Any, module: nn.Module, given: Any, output: Any) -> None:
            decompose(hook, module, given, output)
            if self.passes >= EVA_PASSES:
                self.unsettled += not bool(hook.converged.all())
                hook.converged = torch.ones_like(hook.converged)
            self.converged[hook.name] = hook.converged

        with patch.object(HashHook, "__call__", number), patch.object(SVDHook, "__call__", bounded):
            yield


def start_from_rows(session: Session) -> None:
    """Initialize the A matrices of a new run from its training rows, with `peft.lora_init: eva`.

    Raises RequestError if rows have too few supervised tokens, VerificationFailed if the matrices are not orthonormal.
    """
    config, adapter = session.config, session.assembly.adapter
    is_asked = config.peft.lora_init is LoraInit.EVA and "lora_init" in ADAPTERS[config.peft.peft_method].keys
    if adapter is None or not is_asked or session.step or config.peft.adapter_path is not None:
        return
    from peft.tuners.lora.config import EvaConfig
    from peft.tuners.lora.eva import initialize_lora_eva_weights

    from framework.build.adapters.first_adapter import drawn_for

    batches, began, search = _batches_for_start(session), time.perf_counter(), _Search(session)
    used = counted(len(batches), "micro-batch", "micro-batches")
    session.progress.say(f"start     eva uses {used} in at most {EVA_PASSES} passes, most often ten")
    own = adapter.model.peft_config["default"]
    own.init_lora_weights, own.eva_config = "eva", EvaConfig(rho=1.0)  # each module keeps its planned rank
    drawn = drawn_for("eva", config.training.seed, session.assembly.place)
    with activity.doing(WORK), drawn, torch.no_grad(), search.hooked():
        initialize_lora_eva_weights(
            adapter.model,
            dataloader=batches,
            forward_fn=search.forward,
            prepare_model_inputs_fn=lambda batch, _: _token_mask(batch).nonzero(),
            show_progress_bar=False,
        )
    matrices = [item.detach().float() for name, item in adapter.model.named_parameters() if ".lora_A." in name]
    _require_orthonormal(matrices)
    session.meter.observe("end")
    found = counted(len(matrices), "A matrix", "A matrices")
    passes = counted(search.passes, "pass", "passes")
    seconds = time.perf_counter() - began
    session.progress.say(f"start     {found} from the inputs of their modules: {passes} in {seconds:.1f} s")
    if search.unsettled:
        session.progress.say(
            f"warning   {KEY}: the components of {search.unsettled} of {len(search.converged)} inputs still moved "
            f"after {EVA_PASSES} passes, and are taken as they are"
        )


def _require_orthonormal(matrices: list[Tensor]) -> None:
    """Raise VerificationFailed if the rows of a matrix are not orthonormal."""
    distance = max(float((item @ item.T - torch.eye(len(item)).to(item)).abs().max()) for item in matrices)
    if distance > ORTHONORMAL:
        raise VerificationFailed(
            f"{KEY}: asked eva, in effect A matrices whose rows are not orthonormal ({distance:.2g})"
        )


def _batches_for_start(session: Session) -> list[Batch]:
    """Micro-batches of the first training rows with at least as many supervised tokens as the highest rank."""
    named = session.assembly.model.named_parameters()
    least = max(item.shape[0] for name, item in named if ".lora_A." in name)
    config = session.config
    made = eval_batches(
        session.inputs.data.train,
        config.batch.per_device,
        session.batches.pad_token_id,
        padding_free=config.data.padding_free,
        multiple=config.padded(1),
    )
    placed = (on_device(session.assembly.place.device, batch) for batch in made)
    wanted = (batch for batch in placed if int(_token_mask(batch).sum()) >= least)
    found: list[Batch] = list(islice(wanted, MOST_BATCHES))
    if not found:
        message = f"no micro-batch has as many supervised tokens as the rank ({least})"
        raise RequestError([Problem(KEY, message, expected="gaussian, more rows a micro-batch, or a lower rank")])
    return found


def _token_mask(batch: Batch) -> Tensor:
    """Tokens used for the components: the supervised ones, or all except padding; bool `[rows, tokens]`."""
    if "labels" in batch:
        return batch["labels"] != IGNORED
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["input_ids"]).bool()
