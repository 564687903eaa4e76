"""Resolution of a config with the model's own config, and the checks that need it."""

from transformers import PretrainedConfig

from framework.build.levers.liger import refuse_unknown_to_liger
from framework.build.loading.bases import read_teacher
from framework.build.loading.document_isolation import refuse_leaks, refuse_mixing
from framework.build.loading.model import read_architecture
from framework.build.loading.vocabulary import fit_vocabulary
from framework.build.losses.router_loss import refuse_other_terms
from framework.build.model.heads import refuse_without_attention
from framework.errors import Problem, RequestError
from framework.memory.resolve import resolve
from framework.schema.architecture import has_limit, position_count, scales_positions
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import find_derived_conflicts
from framework.schema.rules.model import too_long


def settle(config: TrainingConfig) -> tuple[TrainingConfig, PretrainedConfig]:
    """The config with all derived values filled in, and the model's own config that they come from.

    Raises RequestError as `read_architecture` does, for rows longer than the model's positions, for a checkpoint dtype
    that cannot be trained or not on this card, if packed documents would see each other, if tensor parallel does not
    fit the model, for terms of the model's own loss that are not implemented, and for a teacher that does not fit the
    model.
    """
    architecture = read_architecture(config)
    settings = architecture.get_text_config().to_dict()
    resolved = fit_vocabulary(resolve(config, settings), architecture)
    length, positions = resolved.model.model_max_length, position_count(settings)
    found = find_derived_conflicts(resolved)
    is_limit = not scales_positions(settings) or has_limit(resolved.model.rope_scaling)
    if isinstance(length, int) and positions is not None and is_limit:
        found = list(too_long(resolved, length, positions)) or found
    derived = [Problem(item.keys[0], item.message, expected=item.expected) for item in found]
    if derived:
        raise RequestError(derived)
    refuse_without_attention(resolved, architecture)
    refuse_other_terms(resolved, architecture)
    refuse_unknown_to_liger(resolved.model, architecture)
    refuse_leaks(resolved, architecture)
    refuse_mixing(resolved, architecture)
    if resolved.fsdp.tensor_parallel_size > 1:
        from framework.build.parallel.tensor_parallel import (
            refuse_unplanned,  # torch's DTensor takes seconds to import
        )

        refuse_unplanned(resolved, architecture)
    if resolved.training.task.facts.has_teacher:
        read_teacher(resolved, architecture)
    return resolved, architecture
