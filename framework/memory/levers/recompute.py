"""What is kept for backward, computed again or fused."""

from framework.memory.levers.row import Axis, Lever, Setting

_COMPILED = {"training.compile": True}

RECOMPUTE = (
    Lever(
        "training.enable_gradient_checkpointing",
        (
            Setting(False),
            Setting(True, "-17.5 % tokens/s in full fine-tuning (1B), -42 % with LoRA (8B); H200, 2026-11"),
        ),
        ("activations",),
        "checkpointed_blocks",
        "Keep each block's input alone and compute the block again in backward.",
        search=Axis((False, True)),
    ),
    Lever(
        "training.gradient_checkpointing_every",
        (
            Setting(4),
            Setting(2, "-10 % tokens/s in full fine-tuning (1B), -28 % with LoRA (8B); H200, 2026-11"),
            Setting(1, "-17.5 % tokens/s in full fine-tuning (1B), -42 % with LoRA (8B); H200, 2026-11"),
        ),
        ("activations",),
        "checkpointed_blocks",
        "Checkpoint each n-th block only; the others keep their activations.",
        search=Axis((4, 2, 1)),
    ),
    Lever(
        "training.gradient_checkpointing_policy",
        (
            Setting("save_matmuls"),
            Setting(
                "save_attention",
                "against `full`: -12 % tokens/s (1B), -47 % with LoRA (8B): Python at each operator; H200, 2026-11",
            ),
            Setting("full", "+3.4 % tokens/s against `save_matmuls` (1B); H200, 2026-11"),
        ),
        ("activations",),
        "checkpointed_blocks",
        "What a checkpointed block keeps besides its input: results of its products and attention, or of attention.",
    ),
    Lever(
        "training.activation_offload",
        (
            Setting(False),
            Setting(
                True, "-70 % tokens/s (1B), -66 % with LoRA (8B): copies outlast the pass next to them; H200, 2026-11"
            ),
        ),
        ("activations",),
        "offloaded_activations",
        "What blocks keep goes to pinned host memory and comes back for backward; with checkpointing, their inputs.",
        bitwise=True,
        search=Axis((False, True)),
    ),
)

COMPILATION = (
    Lever(
        "training.compile",
        (
            Setting(False),
            Setting(
                True,
                "+27 % tokens/s (1B), +46 % with LoRA (8B); H200, 2026-11; the first step is longer by 8 s and more",
                hardware="cpu, cuda 7.0",
            ),
        ),
        ("activations", "temporaries"),
        "compiled_runs",
        "Fuse the elementwise work of the blocks: fewer kernels, and fewer activations to keep.",
        search=Axis((False, True), slower=False, smaller=False),
    ),
    Lever(
        "training.activation_memory_budget",
        (
            Setting(1.0, beside=_COMPILED),
            Setting(0.5, "-4.6 % tokens/s (1B); H100, h100_truth2.jsonl, 2026-11", beside=_COMPILED),
            Setting(0.3, "-9.4 % tokens/s (1B); H200, 2026-11", beside=_COMPILED),
        ),
        ("activations",),
        "memory_budget",
        "Share of a compiled block's activations that are kept; what is cheapest to compute again goes first.",
        search=Axis((None, 0.5, 0.3)),
    ),
    Lever(
        "training.compile_scope",
        (Setting("block"), Setting("model", "-13.6 % tokens/s against blocks (1B); H200, 2026-11")),
        ("activations", "temporaries"),
        "compiled_regions",
        "What is compiled at once: a block, whose code all equal blocks share, or the whole model.",
    ),
    Lever(
        "training.cuda_graphs",
        (
            Setting(False),
            Setting(
                True,
                "2.1 x the tokens/s of a 360M over 4,096 tokens a step, which else waits for the host; H200, 2026-11",
                hardware="cuda 7.0",
                beside={"data.pad_to_multiple_of": 64},
            ),
        ),
        (),
        "recorded_graphs",
        "Replay the recorded kernels of compiled blocks instead of launching each.",
    ),
)
