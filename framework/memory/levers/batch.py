"""How many rows there are at a time, and how they are put together."""

from framework.memory.levers.row import Axis, Lever, Setting

BATCH = (
    Lever(
        "training.per_device_train_batch_size",
        (
            Setting(8),
            Setting(4, "-1.5 % tokens/s (1B); H200, 2026-11", beside={"training.global_batch_size": 8}),
            Setting(2, "not measured", beside={"training.global_batch_size": 8}),
            Setting(
                1, "-30 % tokens/s (1B, 2048 tokens a row); H200, 2026-11", beside={"training.global_batch_size": 8}
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
        "Micro batches per optimizer step: a larger global batch at the memory of one micro batch.",
        search=Axis(),
    ),
    Lever(
        "training.per_device_eval_batch_size",
        (Setting(None), Setting(1, "evaluation alone is slower (not measured)")),
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
        "Rows of a micro batch end to end in one. The worst batch has no padding to save; the mask of `eager` and "
        "`sdpa` grows with the square of all its tokens.",
    ),
    Lever(
        "data.pad_to_multiple_of",
        (Setting(None), Setting(64, "the padding; under `compile` fewer compilations (not measured)")),
        (),
        "padded_lengths",
        "Widths of micro batches in few sizes. Moves no memory of the worst batch where it divides the longest row.",
    ),
    Lever(
        "data.group_by_length",
        (Setting(False), Setting(True, "less padding is computed (not measured)", "which rows meet in a step")),
        (),
        "grouped_rows",
        "Steps of rows of about the same length. Moves no memory of the worst batch.",
    ),
)
