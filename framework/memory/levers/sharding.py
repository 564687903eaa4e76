"""What several devices share."""

from framework.memory.levers.row import Lever, Setting

_SHARED = {"model.attn_implementation": "ring_attention"}
_SHARDED = {"fsdp.enable_fsdp": True}

SHARDING = (
    Lever(
        "fsdp.enable_fsdp",
        (Setting(False), Setting(True, "within 3 % of copies (1B, two cards, of two calls); H200, 2026-11")),
        ("weights", "gradients", "optimizer"),
        "sharding",
        "Weights, gradients and states are split over the devices; each block is gathered when it runs.",
    ),
    Lever(
        "fsdp.sharding_strategy",
        (
            Setting("SHARD_GRAD_OP", beside=_SHARDED),
            Setting("FULL_SHARD", "-5 % tokens/s (1B, two cards): gathers again; H200, 2026-11", beside=_SHARDED),
            Setting("HYBRID_SHARD", "as FULL_SHARD within a machine, one more sum between them", beside=_SHARDED),
        ),
        ("communication", "weights"),
        "sharding",
        "SHARD_GRAD_OP keeps gathered weights from forward to backward; the hybrid ones split within a machine only.",
    ),
    Lever(
        "fsdp.cpu_offload",
        (
            Setting(False, beside=_SHARDED),
            Setting(
                True, "-80 % tokens/s (1B, two cards, two threads a rank); H200, 2026-11", "", "cuda", "", _SHARDED
            ),
        ),
        ("weights", "gradients", "optimizer"),
        "offloaded_shards",
        "Each device's part stays in pinned host memory, where the optimizer steps; the device holds gathered blocks.",
    ),
    Lever(
        "fsdp.forward_prefetch",
        (
            Setting(True, beside=_SHARDED),
            Setting(False, "+1.7 % tokens/s (1B, two cards); H200, 2026-11", "", beside=_SHARDED),
        ),
        ("communication",),
        "prefetch",
        "Gathers the next block while one computes. Helps where the host is slow; holds one more gathered block.",
    ),
    Lever(
        "fsdp.backward_prefetch",
        (
            Setting("BACKWARD_PRE", beside=_SHARDED),
            Setting("BACKWARD_POST", "+2.3 % tokens/s (1B, two cards); H200, 2026-11", beside=_SHARDED),
            Setting("NONE", "-2.9 % tokens/s (1B, two cards); H200, 2026-11", beside=_SHARDED),
        ),
        ("communication",),
        "prefetch",
        "When backward gathers the next block: before the gradients of this one, after them, or when it is needed.",
    ),
    Lever(
        "fsdp.context_parallel_size",
        (
            Setting(1),
            Setting(2, "keys and values cross the link in each layer, twice (not measured)", "", beside=_SHARED),
        ),
        ("activations", "logits_and_loss"),
        "context",
        "Devices that share each row: each computes its tokens, and attention goes over all of them.",
    ),
    Lever(
        "fsdp.tensor_parallel_size",
        (
            Setting(1),
            Setting(2, "two sums over the devices in each block, in each pass, are waited for (not measured)"),
        ),
        ("weights", "gradients", "optimizer", "activations"),
        "shared_matrices",
        "Devices that share the matrices of each block, as transformers' plan says: each has a part of the heads.",
    ),
)
