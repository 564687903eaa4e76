"""Whether quantising a base saves what it is done for: its plan next to that of the same run without. No torch."""

from dataclasses import fields

from framework.memory.ledger import Plan, Terms
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig


def unquantized(config: TrainingConfig) -> TrainingConfig | None:
    """The same run on a base that is not quantised; None where none is."""
    if not (config.training.use_peft and config.peft.q_lora):
        return None
    changes: dict[str, object] = {"q_lora": False}
    if config.peft.peft_method is PeftMethod.LOFTQ:  # which starts from what quantising loses
        changes["peft_method"] = PeftMethod.LORA
    return config.model_copy(update={"peft": config.peft.model_copy(update=changes)})


def without_gain(quantized: Plan, plain: Plan) -> str | None:
    """A sentence when the quantised run needs no less at its peak, with the term that took back what weights gave."""
    ours, theirs = quantized.peak, plain.peak
    if ours.device_bytes < theirs.device_bytes:
        return None
    grown = {term.name: getattr(ours.terms, term.name) - getattr(theirs.terms, term.name) for term in fields(Terms)}
    worst = max(grown, key=lambda name: grown[name])
    sizes = f"{_gib(ours.device_bytes)} with a quantised base, {_gib(theirs.device_bytes)} without"
    return f"peft.q_lora saves nothing here: {sizes}; {worst.replace('_', ' ')} grew by {_gib(grown[worst])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
