"""Levers of precision, optimizers, adapters, quantization and frozen parts."""

from framework.memory.levers.row import Axis, Better, Lever, Setting
from framework.schema.optimizers import FACTS, Optimizer, OptimizerFacts

_UNCLIPPED = {"training.max_grad_norm": 0.0, "training.global_batch_size": None}
_PURE_BF16 = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}


def _setting(choice: Optimizer, facts: OptimizerFacts) -> Setting:
    needs = _PURE_BF16 if facts.keeps_small_updates else {}
    return Setting(str(choice), facts.time, facts.changes, facts.hardware, facts.package, needs)


OPTIMIZERS = (
    Lever(
        "training.optimizer",
        tuple(_setting(choice, facts) for choice, facts in FACTS.items()),
        ("optimizer", "temporaries"),
        "optimizer",
        "Bytes of state a parameter: docs/optimizers.md. AdamW holds two copies of the trained weights; `adamw_torch` "
        "temporaries of their size too. Paged states leave torch's counters, not the card, until it is full.",
        search=Axis(better=Better("adamw_torch", "adamw_torch_fused", "cuda")),
    ),
    Lever(
        "training.rounding",
        (
            Setting("kahan", requires=_PURE_BF16),
            Setting(
                "stochastic",
                "+1.2 % tokens/s (1B); H200, 2026-11",
                "rounds at random instead of carrying the rest",
                requires=_PURE_BF16,
            ),
        ),
        ("optimizer",),
        "rounding",
        "How `anyprecision_adamw` keeps updates below half a last bit: a compensation of 2 bytes each, or chance.",
    ),
    Lever(
        "training.optimizer_in_backward",
        (
            Setting(False, requires=_UNCLIPPED),
            Setting(True, "-3.3 % tokens/s (1B); H200, 2026-11", requires=_UNCLIPPED),
        ),
        ("gradients", "temporaries"),
        "optimizer_in_backward",
        "Update each weight when its gradient is ready and free it: no gradients outlive backward.",
    ),
    Lever(
        "training.optimizer_offload",
        (
            Setting("none"),
            Setting(
                "host",
                "-52 % tokens/s (1B, 8,192 tokens a step): two copies of the states over the link; H200, 2026-11",
            ),
            Setting(
                "nvme",
                "-86 % tokens/s (1B, 8,192 tokens a step): two copies over link and disk; H200, 2026-11",
                requires={"training.optimizer_offload_folder": "/tmp"},
            ),
        ),
        ("optimizer",),
        "offloaded_states",
        "Optimizer states stay in host memory or in a file; one weight's states at a time come to the device.",
        search=Axis(("none", "host"), on_host=True),
    ),
)


PRECISION = (
    Lever(
        "model.torch_dtype_str",
        (
            Setting("float32"),
            Setting(
                "bfloat16",
                "+15 % tokens/s against float32 under bf16 autocast (1B); H100, 2026-11",
                "weights and states have 8 bits of precision: updates below half a last bit round away",
                requires={"training.mixed_precision_dtype": "none"},
            ),
        ),
        ("weights", "gradients", "optimizer", "activations", "autocast_copies"),
        "weight_dtypes",
        "dtype of the weights, and so of gradients and states: 16 bytes a parameter in float32, 8 in bfloat16 (AdamW).",
    ),
    Lever(
        "training.mixed_precision_dtype",
        (
            Setting("none"),
            Setting(
                "bf16",
                "8 times the tokens/s of float32 without tf32 (1B); H200, 2026-11",
                "matrix products round to bfloat16",
            ),
            Setting(
                "fp16",
                "8 times the tokens/s of float32 without tf32, 3 % less than bf16 (1B); H200, 2026-11",
                "matrix products round to float16; steps whose gradients overflow are skipped",
            ),
        ),
        ("activations",),
        "autocast",
        "Matrix products in half precision next to float32 weights, the masters; adds a half-precision copy of them.",
        proposed=False,
    ),
    Lever(
        "training.tf32",
        (
            Setting(False),
            Setting(
                True,
                "3.3 times the tokens/s of float32 without (1B); H200, 2026-11",
                "float32 products round their operands to 10 bits",
                hardware="cuda 8.0",
            ),
        ),
        (),
        "float32_products",
        "Speed of the products that stay in float32; memory is the same.",
    ),
)

FP8 = (
    Lever(
        "training.fp8",
        (
            Setting("none"),
            Setting(
                "tensorwise",
                "+11 % tokens/s against compiled bfloat16 (1B); H200, 2026-11",
                "operands of products round to 3 bits (gradients to 2), one scale each",
                "cuda 8.9",
                "torchao",
                requires=_PURE_BF16,
            ),
            Setting(
                "rowwise",
                "-8.4 % tokens/s against compiled bfloat16 (1B); H200, 2026-11",
                "operands of products round to 3 bits, one scale a row",
                "cuda 8.9",
                "torchao",
                requires=_PURE_BF16,
            ),
        ),
        (),
        "float8_products",
        "Linear layers of the blocks multiply in 8-bit floats; embeddings, head, norms and attention do not. Without "
        "`training.compile` the casts are kernels of their own and cost more than the products save. The frozen base "
        "of an adapter is held in 8 bits, without torchao: -6.5 GiB and +8.3 % tokens/s of an 8B with `rowwise` "
        "(compiled, 2,048 tokens a step; H200, 2026-11). Loss after 200 steps: docs/evidence/speed.md.",
    ),
)


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
            Setting("vera", "-0.6 % tokens/s (1B); H200, 2026-11", "trains only vectors"),
            Setting("ia3", "-5.8 % tokens/s (1B); H200, 2026-11", "trains only vectors"),
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
