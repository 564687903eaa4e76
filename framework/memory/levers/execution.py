"""Levers of kernels, allocator and cache, offloading, and parallelism."""

from framework.memory.levers.row import Axis, Better, Lever, Setting

KERNELS = (
    Lever(
        "model.attn_implementation",
        (
            Setting("eager"),
            Setting("sdpa", "+51 % tokens/s (1B, 1024 tokens); H200, 2026-11"),
            Setting(
                "flex_attention",
                "+45 % tokens/s (1B, 1024 tokens), compiled at the first step; H200, 2026-11",
                hardware="cuda",
                package="triton",
            ),
            Setting("flash_attention_2", "as `sdpa` (not measured)", hardware="cuda 8.0", package="flash-attn"),
            Setting("flash_attention_3", "not measured", hardware="cuda 9.0 to 9.0", package="flash-attn-3"),
            Setting("flash_attention_4", "not measured", hardware="cuda 9.0 to 10.3", package="flash-attn-4"),
        ),
        ("activations",),
        "attention_kernel",
        "`eager` keeps sequence x sequence scores of every head; fused kernels keep none.",
        search=Axis(better=Better("eager", None)),
    ),
    Lever(
        "model.sdpa_backend",
        (
            Setting("math"),
            Setting("efficient", "faster (not measured)", hardware="cuda"),
            Setting("flash", "+85 % tokens/s (1B, 1024 tokens); H200, 2026-11", hardware="cpu, cuda 8.0"),
            Setting(
                "cudnn",
                "+84 % tokens/s (1B, 1024 tokens); torch's own choice on Hopper; H200, 2026-11",
                hardware="cuda 8.0",
            ),
        ),
        ("activations",),
        "sdpa_kernel",
        "Which kernel `sdpa` must take; unset, torch picks by card, dtype and head width. `math` keeps all scores.",
    ),
    Lever(
        "model.enable_liger_kernel",
        (
            Setting(False),
            Setting(
                True,
                "+24 % tokens/s in full fine-tuning (1B), +11 % with LoRA (8B); H200, 2026-11",
                hardware="cuda 7.0",
                package="liger-kernel, triton",
            ),
        ),
        ("activations", "temporaries"),
        "liger_kernels",
        "Norms, MLPs and rotary positions as one Triton kernel each, which keep less for backward. Not the loss: "
        "`model.chunked_loss` never builds the logits, faster than Liger's own.",
    ),
    Lever(
        "model.chunked_loss",
        (
            Setting(False),
            Setting(1024, "+5.5 % tokens/s (1B), the same with LoRA (8B); H200, 2026-11"),
            Setting(256, "+0.9 % tokens/s (1B); H200, 2026-11"),
        ),
        ("logits_and_loss",),
        "chunked_loss",
        "Head and cross entropy over this many tokens at a time, so that the logits never exist in full. Unset: 1024 "
        "where the model's head is known to be one linear layer.",
        search=Axis((False, 1024, 256), slower=False),
    ),
)


_ADAPTED = {"training.use_peft": True}

TASKS = (
    Lever(
        "training.preference.precompute_reference",
        (
            Setting(False),
            Setting(True, "+34 % tokens/s (1B), and an evaluation of all rows before the first step; H200, 2026-11"),
        ),
        ("weights",),
        "known_reference",
        "What a preference's reference says of every row is asked once and kept: no frozen copy of the weights.",
    ),
)

CACHES = (
    Lever(
        "model.offload_frozen_base",
        (
            Setting(False, requires=_ADAPTED),
            Setting(
                True,
                "-0.5 % tokens/s with LoRA (1B, 4 x 2048 tokens), -51 % (8B, 1 x 2048); H200, 2026-11",
                requires=_ADAPTED,
            ),
        ),
        ("weights",),
        "offloaded_base",
        "Frozen weights of the blocks stay in host memory; the device holds two blocks of them at a time.",
        search=Axis((False, True), on_host=True),
    ),
    Lever(
        "training.allocator.expandable_segments",
        (Setting(False), Setting(True, "-0.4 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "One growing segment a pool instead of many of fixed sizes: less is reserved beyond what is allocated.",
        bitwise=True,
        search=Axis((None, True)),
    ),
    Lever(
        "training.allocator.max_split_size_mb",
        (Setting(None), Setting(512, "-0.3 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "Blocks from this size on are not split. Helps where small tensors pin large blocks, else reserves more.",
        bitwise=True,
    ),
    Lever(
        "training.allocator.garbage_collection_threshold",
        (Setting(None), Setting(0.8, "-0.7 % tokens/s (1B); H200, 2026-11", hardware="cuda")),
        ("fragmentation",),
        "allocator_settings",
        "Above this share of the card, cached blocks that were not used lately are returned. Planned as without it.",
        bitwise=True,
    ),
    Lever(
        "training.empty_device_cache_steps",
        (
            Setting(None),
            Setting(10, "-0.1 % tokens/s (1B); H200, 2026-11"),
            Setting(1, "-30 % tokens/s (1B): all of it is asked for again; H200, 2026-11"),
        ),
        ("fragmentation",),
        "emptied_cache",
        "Returns blocks that nothing uses, between steps. The allocated peak is the same; reserved may even rise.",
        bitwise=True,
    ),
)


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
            Setting(2, "keys and values cross the link in each layer, twice (not measured)", "", requires=_SHARED),
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
