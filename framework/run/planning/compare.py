"""`doctor --compare`: a few steps planned and measured on this machine's card, and one line that sums them up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from framework.errors import OutOfMemory, Problem, RequestError
from framework.memory.cards import card_names, card_of_size, read_card
from framework.memory.installed import installed_cards
from framework.memory.requirements import is_installed
from framework.run.planning.host_probe import probe_host, shares_of
from framework.run.planning.measure import measure_in_subprocess
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.schema.config import TrainingConfig

MODEL: Mapping[str, Any] = {
    "load_pretrained_weights": False,
    "architecture": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
"""A quarter of a billion weights: every step below fits into 8 GB."""

STEPS: Mapping[str, Mapping[str, Any]] = {
    "full": {"training": {"per_device_train_batch_size": 2}, "model": {"model_max_length": 1024}},
    "checkpointed": {
        "training": {"per_device_train_batch_size": 4, "enable_gradient_checkpointing": True},
        "model": {"model_max_length": 1024},
    },
    "few tokens": {"training": {"per_device_train_batch_size": 1}, "model": {"model_max_length": 128}},
    "adapter": {"training": {"per_device_train_batch_size": 4, "use_peft": True}, "model": {"model_max_length": 1024}},
    "compiled": {
        "training": {"per_device_train_batch_size": 4, "compile": True},
        "model": {"model_max_length": 1024},
    },
}


@dataclass(frozen=True)
class Compared:
    """One step: planned over measured, less one. None of it is known of a step that did not fit."""

    name: str
    fits: bool = False
    allocated: float | None = None
    used: float | None = None
    seconds: float | None = None
    """None also where the card's rates are not known."""

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        known = (self.allocated, self.used, self.seconds)
        return (self.name, *("did not fit" if not self.fits else _share(error) for error in known))


def compare() -> tuple[str, list[Compared]]:
    """The card's name, and its steps planned and measured, in about three minutes.

    Raises RequestError without a card, or with one that is too old for a plan.
    """
    cards = installed_cards()
    if not cards or not torch.cuda.is_available() or (name := cards[0].name) is None:
        raise RequestError([Problem("--compare", "this machine has no CUDA card that plans are made for")])
    facts = read_card(name) if name in card_names() else card_of_size(name)
    card = {**(facts or {}), "host": shares_of(probe_host()).model_dump()}
    return cards[0].product, [_compared(step, config) for step, config in _configs(card).items()]


def _configs(card: Mapping[str, Any]) -> dict[str, TrainingConfig]:
    compiles = is_installed("triton")
    return {
        name: TrainingConfig.model_validate(
            {
                "gpu": card,
                "training": {"mixed_precision_dtype": "bf16", "max_steps": 10, **step["training"]},
                "model": {**MODEL, **step["model"]},
            }
        )
        for name, step in STEPS.items()
        if compiles or name != "compiled"
    }


def _compared(name: str, config: TrainingConfig) -> Compared:
    plan = plan_in_subprocess(config)
    try:
        measured = measure_in_subprocess(config)
    except OutOfMemory:
        return Compared(name)
    seconds = None if plan.step is None else plan.step.seconds / measured.step_seconds - 1
    use = plan.step_peak
    return Compared(
        name,
        True,
        use.allocated_bytes / measured.allocated_bytes - 1,
        use.device_bytes / measured.device_bytes - 1,
        seconds,
    )


def summary(rows: Sequence[Compared], device_name: str) -> str:
    """One line: card, versions, and planned over measured of each step (allocated, used, seconds)."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    steps = "; ".join(f"{row.name} {' '.join(row.cells()[1:])}" for row in rows)
    return f"{device_name}, {packages}: {steps}"


def _share(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
