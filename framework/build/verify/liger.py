"""Which modules run Liger's kernels."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.levers.liger import KEY, liger_kernels
from framework.build.model.parts import transformer_blocks
from framework.build.verify.reading import Reading
from framework.schema.plural import counted


def read_liger_kernels(assembly: Assembly) -> Iterator[Reading]:
    """n/n blocks have a kernel of Liger's; none when it was not asked for, as after a patch of the whole process."""
    blocks = transformer_blocks(assembly.model) or [assembly.model]
    with_kernels = sum(bool(liger_kernels(block)) for block in blocks)
    asked = len(blocks) if assembly.config.model.enable_liger_kernel is True else 0
    if not asked and not with_kernels:
        return
    kernels = sorted(liger_kernels(assembly.model).items())
    source = ", ".join(f"{count} {name}" for name, count in kernels) or "no forward is Liger's"
    yield Reading(
        KEY, f"{asked}/{counted(len(blocks), 'block')}", f"{with_kernels}/{counted(len(blocks), 'block')}", source
    )
