"""What a task measures the trained model against: that it is there, frozen, apart, and stays where it was."""

from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer

from framework.build.assembly import Assembly
from framework.build.fingerprints import Fingerprints, take_fingerprints
from framework.build.tasks import Precomputed, WithoutAdapter, reference_of
from framework.build.verify.reading import FirstStep, Reading

KEY = "training.preference.loss_type"


def read_reference(assembly: Assembly) -> Iterator[Reading]:
    """Which reference a preference has, read from the objects that answer for it."""
    training = assembly.config.training
    if not training.has_reference:
        return
    asked, found, source = "", "", "the objective"
    reference = reference_of(assembly.objective)
    if training.preference.precompute_reference:
        asked, found = "asked once", "asked once" if isinstance(reference, Precomputed) else "asked in each step"
    elif training.use_peft:
        asked, (found, source) = "the model without its adapter", _without_adapter(assembly, reference)
    else:
        asked, found, source = "a frozen copy", _frozen(assembly), "its parameters, their addresses, the optimizer's"
    yield Reading(f"{KEY} = {training.preference.loss_type}, reference", asked, found, source)


def read_known_reference(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Whether the batches carried what the reference had said."""
    asked = assembly.config.training.asks_reference_once
    if asked or step.has_reference:
        key = "training.preference.precompute_reference"
        yield Reading(key, str(asked).lower(), str(step.has_reference).lower(), "micro batches of the first step")


def _without_adapter(assembly: Assembly, reference: object) -> tuple[str, str]:
    """Whether the reference takes the adapter away, and whether that reaches all of its layers."""
    if not isinstance(reference, WithoutAdapter) or assembly.adapter is None:
        return "something else", "the objective"
    model = assembly.adapter.model
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    with model.disable_adapter():
        off = sum(layer.disable_adapters for layer in layers)
    on = sum(not layer.disable_adapters for layer in layers)
    is_switched = off == on == len(layers)
    found = "the model without its adapter" if is_switched else f"{off} of {len(layers)} layers without it"
    return found, f"{off} of {len(layers)} layers off for the reference, {on} on again"


def _frozen(assembly: Assembly) -> str:
    """`a frozen copy`, or what is wrong with it."""
    companion = assembly.companion
    if companion is None:
        return "none"
    own = list(companion.parameters())
    trained = {id(p) for group in assembly.optimizer.param_groups for p in group["params"]}
    shared = {p.data_ptr() for p in assembly.model.parameters() if p.numel()}
    faults = {
        "with gradients": any(p.requires_grad for p in own),
        "in the optimizer": any(id(p) in trained for p in own),
        "sharing weights with the model": any(p.data_ptr() in shared for p in own if p.numel()),
        "in training mode": any(module.training for module in companion.modules()),
    }
    wrong = [fault for fault, holds in faults.items() if holds]
    return f"a copy {', '.join(wrong)}" if wrong else "a frozen copy"


def read_moved(assembly: Assembly, before: Fingerprints | None) -> Iterator[Reading]:
    """After training: the companion, or the base that is one, is bit for bit where it was, and the model is not."""
    if before is None:
        return
    now = take_fingerprints(assembly)
    assert now is not None
    said = "unmoved" if now.fixed == before.fixed else "moved"
    what = "companion" if assembly.companion is not None else "base under the adapter"
    moved = "moved" if now.trained != before.trained else "has not moved"
    yield Reading(
        f"reference ({what})", "unmoved", said, f"sum of its bits {now.fixed:016x}; the trained model {moved}"
    )
