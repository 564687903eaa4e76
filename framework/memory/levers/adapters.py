"""What is trained: adapters, a packed base, frozen parts."""

from framework.memory.levers.row import Lever, Setting

ADAPTERS = (
    Lever(
        "training.use_peft",
        (Setting(False), Setting(True, "faster: frozen weights get no gradient (not measured)", "trains an adapter")),
        ("gradients", "optimizer", "temporaries"),
        "adapter",
        "Train a small adapter; the base gets neither gradients nor optimizer states. Activations do not shrink.",
    ),
    Lever(
        "peft.lora_r",
        (Setting(8), Setting(4, "none (not measured)", "an adapter of lower rank")),
        ("gradients", "optimizer"),
        "adapter_rank",
        "Rank of the adapter: its trained parameters grow in proportion.",
    ),
    Lever(
        "peft.lora_target_modules",
        (
            Setting(("all-linear",)),
            Setting(("q_proj", "v_proj"), "+53 % tokens/s (8B); H200, 2026-11", "fewer matrices are adapted"),
        ),
        ("activations", "gradients", "optimizer"),
        "adapter_targets",
        "Which matrices are adapted; each keeps its input for backward.",
        proposed=False,
    ),
    Lever(
        "peft.lora_dropout",
        (Setting(0.1), Setting(0.0, "+5.5 % tokens/s (8B); H200, 2026-11", "less regularisation")),
        ("activations",),
        "adapter_dropout",
        "Above 0 it keeps a mask and one more copy of each adapted input.",
    ),
    Lever(
        "peft.peft_method",
        (
            Setting("lora"),
            Setting("rslora", "none", "the update is scaled by alpha / root of rank"),
            Setting("pissa", "a decomposition of each matrix at the start", "another start"),
            Setting(
                "olora",
                "-1.7 % tokens/s (1B); a decomposition of each matrix at the start; H200, 2026-11",
                "another start",
            ),
            Setting("vera", "-0.6 % tokens/s (1B); H200, 2026-11", "trains vectors alone"),
            Setting("ia3", "-5.8 % tokens/s (1B); H200, 2026-11", "trains vectors alone"),
            Setting("oft", "not measured", "rotates the inputs of the adapted matrices"),
            Setting("prompt", "+6.3 % tokens/s (1B); H200, 2026-11", "trains tokens before the row"),
            Setting("prefix", "-8.7 % tokens/s (1B); H200, 2026-11", "trains tokens before the row"),
            Setting("dora", "-9.9 % tokens/s (1B); H200, 2026-11", "learns lengths"),
        ),
        ("gradients", "optimizer", "activations"),
        "adapter",
        "Kind of adapter. `vera` and `ia3` train the fewest weights; `dora` builds each adapted matrix in forward.",
        proposed=False,
    ),
    Lever(
        "peft.adapter_dtype",
        (Setting("float32"), Setting("bfloat16", "+18 % tokens/s (8B); H200, 2026-11", "small updates round away")),
        ("weights", "gradients", "optimizer"),
        "adapter_dtype",
        "dtype of the adapter's weights, and so of their gradients and states.",
    ),
    Lever(
        "peft.q_lora",
        (
            Setting(False),
            Setting(
                True,
                "-8.1 % tokens/s (8B, 4 bits); H200, 2026-11",
                "the base is rounded to 4 or 8 bits",
                package="bitsandbytes",
            ),
        ),
        ("weights",),
        "quantized",
        "Linear layers of the frozen base in 4 or 8 bits; embeddings, head, norms and experts stay as they are.",
    ),
    Lever(
        "peft.q_lora_bits",
        (
            Setting(8),
            Setting(4, "1.9 times the tokens/s of 8 bits (8B); H200, 2026-11", "the base is rounded to 4 bits"),
        ),
        ("weights",),
        "quantized",
        "Bits a frozen weight. Of sharded ones 4.",
    ),
    Lever(
        "peft.bnb_4bit_quant_type",
        (Setting("nf4"), Setting("fp4", "none", "another rounding")),
        (),
        "quantized",
        "Code of the 4-bit numbers. Moves no memory.",
    ),
    Lever(
        "peft.use_bnb_nested_quant",
        (Setting(False), Setting(True, "+2.3 % tokens/s (8B); H200, 2026-11", "the scales are rounded too")),
        ("weights",),
        "quantized",
        "Scales of the 4-bit blocks in 8 bits: 0.37 bits a weight less.",
    ),
    Lever(
        "peft.lora_freeze_a",
        (Setting(False), Setting(True, "not measured", "the A matrices are not trained")),
        ("activations", "gradients", "optimizer"),
        "frozen_factors",
        "LoRA-FA: the A matrices stay as drawn, without gradients and states, and keep no inputs for backward.",
    ),
    Lever(
        "peft.lora_plus_lr_ratio",
        (Setting(None), Setting(16.0, "none", "B matrices learn faster")),
        (),
        "faster_matrices",
        "LoRA+: a higher rate for the B matrices. Moves no memory.",
    ),
    Lever(
        "peft.lora_modules_to_save",
        (Setting(("lm_head",)), Setting((), "+6 % tokens/s (1B); H200, 2026-11", "the module is not trained")),
        ("weights", "gradients", "optimizer"),
        "adapter_saved_modules",
        "Modules trained in full next to the adapter: a copy, gradients and states of each.",
        proposed=False,
    ),
)

FREEZING = (
    Lever(
        "model.freeze_first_blocks",
        (Setting(0), Setting(1, "faster (not measured)", "the blocks are not trained")),
        ("gradients", "optimizer", "temporaries", "activations"),
        "frozen_modules",
        "The first n blocks are not trained; with frozen embeddings before them they keep no activations either.",
    ),
    Lever(
        "model.freeze_layers",
        (
            Setting(()),
            Setting(("embed_tokens", "layers.0"), "+10 % tokens/s (1B); H200, 2026-11", "the layers are not trained"),
        ),
        ("gradients", "optimizer", "temporaries", "activations"),
        "frozen_modules",
        "Modules that are not trained, by dotted name or glob: no gradients and no states.",
        proposed=False,
    ),
)
