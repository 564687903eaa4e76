"""Rotary positions as the built model computes them."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.loading.rope import FULL, rope_of
from framework.build.model.parts import causal_model
from framework.build.verify.reading import Reading
from framework.schema.plural import counted


def read_rope_scaling(assembly: Assembly) -> Iterator[Reading]:
    """The kind that the rotary modules have, and the factor and positions in the config that they read."""
    scaling = assembly.config.model.rope_scaling
    if scaling is None:
        return
    model = causal_model(assembly.model)
    modules = [module for module in model.modules() if hasattr(module, "rope_type")]
    kinds = {kind.get(FULL) if isinstance(kind := module.rope_type, dict) else kind for module in modules}
    text = model.config.get_text_config()
    rope = rope_of(text.to_dict()) or {}
    found = f"{', '.join(sorted(map(str, kinds)))} x {rope.get('factor', 1):g}"
    positions = f"{text.max_position_embeddings:,} positions"
    source = f"{counted(len(modules), 'rotary module')}, {positions} in model.config"
    yield Reading("model.rope_scaling", f"{scaling.rope_type} x {scaling.factor:g}", found, source)
