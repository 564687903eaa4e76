"""What is held during training, or given back: a reference, a streamed base, unused blocks."""

from framework.memory.levers.row import Axis, Lever, Setting

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
            Setting(False, beside=_ADAPTED),
            Setting(
                True,
                "-0.5 % tokens/s with LoRA (1B, 4 x 2048 tokens), -51 % (8B, 1 x 2048); H200, 2026-11",
                beside=_ADAPTED,
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
