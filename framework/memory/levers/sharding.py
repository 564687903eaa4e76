"""What several devices share."""

from framework.memory.levers.row import Axis, Lever, Setting

_SHARED = {"model.attn_implementation": "ring_attention"}

SHARDING = (
    Lever(
        "fsdp.enable_fsdp",
        (Setting(False), Setting(True, "within 3 % of copies (1B, two cards, of two calls); H200, 2026-11")),
        ("weights", "gradients", "optimizer"),
        "sharding",
        "Weights, gradients and states are split over the devices; each block is gathered when it runs.",
        search=Axis((False, True)),
    ),
    Lever(
        "fsdp.sharding_strategy",
        (
            Setting("SHARD_GRAD_OP"),
            Setting("FULL_SHARD", "-5 % tokens/s (1B, two cards): gathers again; H200, 2026-11"),
            Setting("HYBRID_SHARD", "as FULL_SHARD within a machine, one more sum between them"),
        ),
        ("communication", "weights"),
        "sharding",
        "SHARD_GRAD_OP keeps gathered weights from forward to backward; the hybrid ones split within a machine only.",
        search=Axis(("SHARD_GRAD_OP", "FULL_SHARD")),
    ),
    Lever(
        "fsdp.cpu_offload",
        (
            Setting(False),
            Setting(True, "-80 % tokens/s (1B, two cards, two threads a rank); H200, 2026-11", "", "cuda"),
        ),
        ("weights", "gradients", "optimizer"),
        "offloaded_shards",
        "Each device's part stays in pinned host memory, where the optimizer steps; the device holds gathered blocks.",
        search=Axis((False, True), on_host=True),
    ),
    Lever(
        "fsdp.forward_prefetch",
        (Setting(True), Setting(False, "+1.7 % tokens/s (1B, two cards); H200, 2026-11")),
        ("communication",),
        "prefetch",
        "Gathers the next block while one computes. Helps where the host is slow; holds one more gathered block.",
    ),
    Lever(
        "fsdp.backward_prefetch",
        (
            Setting("BACKWARD_PRE"),
            Setting("BACKWARD_POST", "+2.3 % tokens/s (1B, two cards); H200, 2026-11"),
            Setting("NONE", "-2.9 % tokens/s (1B, two cards); H200, 2026-11"),
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
        proposed=False,
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
        proposed=False,
    ),
)
