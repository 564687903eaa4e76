"""The blocks as they run: recomputation, attention, and kernels of Liger."""

from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.attention.ring_attention import NAME as RING_ATTENTION
from framework.build.levers.activations import keeps, offloading, recomputing
from framework.build.levers.liger import KEY, liger_kernels
from framework.build.levers.offload import LEAST_BYTES
from framework.build.model.convolutions import CONVOLUTIONAL
from framework.build.model.parts import causal_model, transformer_blocks
from framework.build.verify.probe import PROBE_TOKENS, probe
from framework.build.verify.reading import FirstStep, Reading
from framework.schema.choices import CheckpointingPolicy
from framework.schema.plural import counted


def read_checkpointed_blocks(assembly: Assembly) -> Iterator[Reading]:
    """The blocks that recompute: asked for, in train mode, and seen to go through their checkpoint."""
    training, blocks = assembly.config.training, transformer_blocks(assembly.model)
    key, every = "training.enable_gradient_checkpointing", int(training.gradient_checkpointing_every)
    asks = training.enable_gradient_checkpointing is True
    done = {id(block): runner for block, runner in recomputing(assembly.model)}
    if not asks:
        yield Reading(key, f"0/{len(blocks)}", f"{len(done)}/{len(blocks)}", "blocks in train mode")
        return
    seen = probe(assembly)
    ran = [block for index, block in enumerate(blocks) if id(block) in done and index in seen.checkpointed]
    source = seen.failure or f"blocks in train mode, {PROBE_TOKENS} tokens forward"
    yield Reading(key, f"{len(blocks[::every])}/{len(blocks)}", f"{len(ran)}/{len(blocks)}", source)
    policy = CheckpointingPolicy(training.gradient_checkpointing_policy)
    found = {str(runner.policy) for runner in done.values()}
    if policy is not CheckpointingPolicy.FULL and not any(keeps(policy, operator) for operator in seen.operators):
        found = {"nothing to keep: no operator of this policy ran"}
    yield Reading("training.gradient_checkpointing_policy", str(policy), ", ".join(sorted(found)), source)


def read_keeping_blocks(assembly: Assembly) -> Iterator[Reading]:
    """How many blocks keep anything for backward: none of those that run before the first trained weight."""
    if all(parameter.requires_grad for parameter in assembly.model.parameters()):
        return
    blocks, seen = transformer_blocks(assembly.model), probe(assembly)
    if blocks and seen.failure is None:
        found, source = f"{len(seen.keeping)}/{len(blocks)}", f"requires_grad of their outputs, {PROBE_TOKENS} tokens"
        yield Reading("blocks that keep activations", None, found, source)


def read_offloaded_activations(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """The blocks that send what they keep to the host, and what has gone there until after the first step."""
    asks, blocks = assembly.config.training.activation_offload is True, transformer_blocks(assembly.model)
    offloads = offloading(assembly.model)
    moved = sum(offload.moved_bytes for offload in set(offloads))
    source = f"{moved / 2**20:,.1f} MiB moved in the first step"
    if asks and not moved:
        source += f": no tensor of a block has {LEAST_BYTES / 2**20:g} MiB"
    asked, found = (f"{count}/{counted(len(blocks), 'block')}" for count in (len(blocks) if asks else 0, len(offloads)))
    if asks or offloads:
        yield Reading("training.activation_offload", asked, found, source)


_KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_safe_softmax": "math",
}
"""The operator that tells each kernel of scaled_dot_product_attention."""


def read_sdpa_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that really ran behind `sdpa`, or for parts of rows, when a few tokens went forward as in training."""
    asked = assembly.config.model.sdpa_backend
    if causal_model(assembly.model).config._attn_implementation not in ("sdpa", RING_ATTENTION):
        if asked is not None:
            yield Reading("model.sdpa_backend", str(asked), "none: this model does not use sdpa", "model.config")
        return
    seen = probe(assembly)
    names = {operator.rpartition("::")[2].partition(".")[0] for operator in seen.operators}
    found = f"none ({seen.failure})" if seen.failure else ", ".join(sorted({_KERNELS[n] for n in names & {*_KERNELS}}))
    source = f"operators of {PROBE_TOKENS} tokens forward"
    yield Reading("model.sdpa_backend", str(asked) if asked else None, found or "none", source)


def read_attention_kernel(assembly: Assembly) -> Iterator[Reading]:
    """The kernel that the model's own config dispatches to; whatever it chose is said when none was asked for."""
    config = causal_model(assembly.model).config
    found = "none: convolutions" if type(config) in CONVOLUTIONAL else config._attn_implementation
    asked = assembly.config.model.attn_implementation
    yield Reading("model.attn_implementation", str(asked) if asked else None, str(found), "model.config")


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
