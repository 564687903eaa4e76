"""Requested options, read back from the objects that were built; a mismatch stops the run.

`READERS` has one function a lever (`framework.memory.levers` names it): it takes the assembly and yields Readings.
`FIRST_STEP_READERS` look again at what exists only after the first optimizer step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from framework.build.assembly import Assembly
from framework.build.optimizers.parameter_wise import ParameterWise
from framework.build.verify import activations, batch, frozen_models, loss, optimizer, sharding, weights
from framework.build.verify.frozen_models import Fingerprints
from framework.build.verify.reading import FirstStep, Reading, table
from framework.errors import VerificationFailed

__all__ = [
    "FIRST_STEP_READERS",
    "READERS",
    "FirstStep",
    "Reading",
    "missing_gradients",
    "table",
    "verify",
    "verify_emptied_cache",
    "verify_first_step",
    "verify_unmoved",
]


def _of_adapter(name: str) -> Callable[[Assembly], Iterable[Reading]]:
    """A reader of `framework.build.verify.adapter`, which applies only to runs with an adapter."""

    def read(assembly: Assembly) -> Iterable[Reading]:
        if not assembly.config.training.use_peft and assembly.adapter is None:
            return ()
        from framework.build.verify import adapter  # peft takes seconds to import

        found: Iterable[Reading] = getattr(adapter, name)(assembly)
        return found

    return read


READERS: Mapping[str, Callable[[Assembly], Iterable[Reading]]] = {
    "allocator_settings": batch.read_allocator_settings,
    "head": weights.read_head,
    "vocabulary": weights.read_vocabulary,
    "parameters": weights.read_parameters,
    "weight_dtypes": weights.read_weight_dtypes,
    "autocast": weights.read_autocast,
    "float32_products": weights.read_float32_products,
    "float8_products": weights.read_float8_products,
    "optimizer": optimizer.read_optimizer,
    "parameter_groups": optimizer.read_parameter_groups,
    "rounding": optimizer.read_rounding,
    "optimizer_in_backward": optimizer.read_optimizer_in_backward,
    "checkpointed_blocks": activations.read_checkpointed_blocks,
    "compiled_regions": activations.read_compiled_regions,
    "keeping_blocks": activations.read_keeping_blocks,
    "attention_kernel": activations.read_attention_kernel,
    "sdpa_kernel": activations.read_sdpa_kernel,
    "context": sharding.read_context,
    "shared_matrices": sharding.read_shared_matrices,
    "liger_kernels": activations.read_liger_kernels,
    "chunked_loss": loss.read_chunked_loss,
    "loss_terms": loss.read_loss_terms,
    "embedding_noise": loss.read_embedding_noise,
    "router_loss": loss.read_router_loss,
    "own_loss": loss.read_own_loss,
    "rope_scaling": weights.read_rope_scaling,
    "isolation": batch.read_isolation,
    "reference": frozen_models.read_reference,
    "teacher": frozen_models.read_teacher,
    "frozen_modules": weights.read_frozen_modules,
    "offloaded_base": sharding.read_offloaded_base,
    "adapter": _of_adapter("read_adapter"),
    "first_adapter": _of_adapter("read_first_adapter"),
    "trained_tokens": weights.read_trained_tokens,
    "adapter_rank": _of_adapter("read_adapter_rank"),
    "adapter_targets": _of_adapter("read_adapter_targets"),
    "adapter_dropout": _of_adapter("read_adapter_dropout"),
    "adapter_dtype": _of_adapter("read_adapter_dtype"),
    "adapter_start": _of_adapter("read_adapter_start"),
    "frozen_factors": _of_adapter("read_frozen_factors"),
    "rotated_blocks": _of_adapter("read_rotated_blocks"),
    "faster_matrices": _of_adapter("read_faster_matrices"),
    "quantized": _of_adapter("read_quantized"),
    "sharding": sharding.read_sharding,
    "offloaded_shards": sharding.read_offloaded_shards,
    "prefetch": sharding.read_prefetch,
    "adapter_saved_modules": _of_adapter("read_adapter_saved_modules"),
}
"""Readers before step 1, in the order of the printed table. Those without a row of the levers table apply to every run
with their feature; `isolation` belongs to all levers that put several documents in a row."""

FIRST_STEP_READERS: Mapping[str, Callable[[Assembly, FirstStep], Iterable[Reading]]] = {
    "optimizer_states": optimizer.read_optimizer_states,
    "offloaded_states": optimizer.read_offloaded_states,
    "weights_average": optimizer.read_weights_average,
    "offloaded_activations": activations.read_offloaded_activations,
    "micro_batches": batch.read_micro_batches,
    "eval_batches": batch.read_eval_batches,
    "longest_row": batch.read_longest_row,
    "padded_lengths": batch.read_padded_lengths,
    "emptied_cache": batch.read_emptied_cache,
    "compiled_runs": activations.read_compiled_runs,
    "recorded_graphs": activations.read_recorded_graphs,
    "memory_budget": activations.read_memory_budget,
    "packed_rows": batch.read_packed_rows,
    "rows_end_to_end": batch.read_rows_end_to_end,
    "grouped_rows": batch.read_grouped_rows,
    "offloaded_base": sharding.read_offloaded_base_again,
    "known_reference": frozen_models.read_known_reference,
}
"""Readers after step 1: optimizers create their states then, and batches are known only when they are used."""


def verify(assembly: Assembly) -> tuple[Reading, ...]:
    """Every requested option with the one in effect. Raises VerificationFailed with all differences."""
    return _holding([reading for read in READERS.values() for reading in read(assembly)])


def verify_first_step(assembly: Assembly, step: FirstStep) -> tuple[Reading, ...]:
    """The same for the states and batches of the first optimizer step. Raises VerificationFailed."""
    return _holding([reading for read in FIRST_STEP_READERS.values() for reading in read(assembly, step)])


def verify_emptied_cache(assembly: Assembly, began: int, step: int) -> tuple[Reading, ...]:
    """Check that the cache was emptied as often as required in the steps `began` to `step`. Raises
    VerificationFailed."""
    return _holding(list(batch.emptied_cache(assembly, began, step)))


def verify_unmoved(assembly: Assembly, before: Fingerprints | None) -> tuple[Reading, ...]:
    """Check that training has not changed the reference. Raises VerificationFailed."""
    return _holding(list(frozen_models.read_moved(assembly, before)))


def _holding(readings: Sequence[Reading]) -> tuple[Reading, ...]:
    broken = [reading for reading in readings if not reading.holds]
    if broken:
        lines = [f"{item.key}: asked {item.asked}, in effect {item.found} ({item.source})" for item in broken]
        raise VerificationFailed("requested but not in effect:\n" + "\n".join(lines))
    return tuple(readings)


def missing_gradients(assembly: Assembly) -> list[str]:
    """Names of trained tensors without a gradient after backward. Call between backward and zero_grad.

    Tensors updated in backward have had their gradients.
    """
    updated = assembly.optimizer.stepped if isinstance(assembly.optimizer, ParameterWise) else frozenset()
    reached = getattr(assembly.parallel, "reached", None)  # of copies, whose gradients are there before
    return [
        name
        for name, parameter in assembly.model.named_parameters()
        if parameter.requires_grad
        and parameter not in updated
        and (parameter.grad is None if reached is None else parameter not in reached)
    ]
