"""Levers of batch size and batching, activations saved for backward, and compilation."""

from framework.memory.levers.row import Axis, Lever, Setting

BATCH = (
    Lever(
        "training.per_device_train_batch_size",
        (
            Setting(8),
            Setting(4, "-1.5 % tokens/s (1B); H200, 2026-11", requires={"training.global_batch_size": 8}),
            Setting(2, "not measured", requires={"training.global_batch_size": 8}),
            Setting(
                1, "-30 % tokens/s (1B, 2048 tokens a row); H200, 2026-11", requires={"training.global_batch_size": 8}
            ),
        ),
        ("activations", "logits_and_loss"),
        "micro_batches",
        "Rows per forward pass. With the same global batch the loss is the same mean over the same tokens.",
        search=Axis(),
        moment="training",
    ),
    Lever(
        "training.gradient_accumulation_steps",
        (
            Setting(1),
            Setting(4, "+3 % tokens/s, for the update is shared (1B); H200, 2026-11", "a larger global batch"),
        ),
        (),
        "micro_batches",
        "Micro-batches per optimizer step: a larger global batch at the memory of one micro-batch.",
        search=Axis(),
    ),
    Lever(
        "training.per_device_eval_batch_size",
        (Setting(None), Setting(1, "only evaluation is slower (not measured)")),
        ("logits_and_loss", "temporaries"),
        "eval_batches",
        "Rows per forward pass of evaluation, which keeps no activations but builds one batch's logits. Unset: those "
        "of training, at most 8.",
        bitwise=True,
        search=Axis(),
        moment="eval",
    ),
    Lever(
        "model.model_max_length",
        (
            Setting(2048),
            Setting(1024, "none: fewer tokens", "longer rows are cut or dropped (`data.truncation`)"),
            Setting(512, "none: fewer tokens", "longer rows are cut or dropped (`data.truncation`)"),
        ),
        ("activations", "logits_and_loss"),
        "longest_row",
        "Longest row in tokens. Activations grow in proportion to it (eager attention with its square).",
        least=128,
    ),
)

ROWS = (
    Lever(
        "data.packing",
        (
            Setting(False),
            Setting(
                True,
                "no padding is computed; sdpa with a mask is slower than without (not measured)",
                "a row of the batch is a pack of rows: more tokens a step, fewer steps",
            ),
        ),
        (),
        "packed_rows",
        "Rows end to end in packs of full length. Moves no memory of the worst batch but adds the mask of `eager` and "
        "`sdpa`, rows x length x length.",
    ),
    Lever(
        "data.padding_free",
        (
            Setting(False),
            Setting(True, "no padding is computed; slower in `sdpa`, whose mask is of all tokens (not measured)"),
        ),
        (),
        "rows_end_to_end",
        "Rows of a micro-batch end to end in one. The worst batch has no padding to save; the mask of `eager` and "
        "`sdpa` grows with the square of all its tokens.",
    ),
    Lever(
        "data.pad_to_multiple_of",
        (Setting(None), Setting(64, "the padding; under `compile` fewer compilations (not measured)")),
        (),
        "padded_lengths",
        "Widths of micro-batches in few sizes. Moves no memory of the worst batch where it divides the longest row.",
    ),
    Lever(
        "data.group_by_length",
        (Setting(False), Setting(True, "less padding is computed (not measured)", "which rows meet in a step")),
        (),
        "grouped_rows",
        "Steps of rows of about the same length. Moves no memory of the worst batch.",
    ),
)


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
        "Keep only each block's input and compute the block again in backward.",
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
            Setting(1.0, requires=_COMPILED),
            Setting(0.5, "-4.6 % tokens/s (1B); H100, h100_truth2.jsonl, 2026-11", requires=_COMPILED),
            Setting(0.3, "-9.4 % tokens/s (1B); H200, 2026-11", requires=_COMPILED),
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
                requires={"data.pad_to_multiple_of": 64},
            ),
        ),
        (),
        "recorded_graphs",
        "Replay the recorded kernels of compiled blocks instead of launching each.",
    ),
)
