"""The dtypes of weights and products."""

from framework.memory.levers.row import Lever, Setting

_PURE_BF16 = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}

PRECISION = (
    Lever(
        "model.torch_dtype_str",
        (
            Setting("float32"),
            Setting(
                "bfloat16",
                "+15 % tokens/s against float32 under bf16 autocast (1B); H100, 2026-11",
                "weights and states have 8 bits of precision: updates below half a last bit round away",
                beside={"training.mixed_precision_dtype": "none"},
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
                beside=_PURE_BF16,
            ),
            Setting(
                "rowwise",
                "-8.4 % tokens/s against compiled bfloat16 (1B); H200, 2026-11",
                "operands of products round to 3 bits, one scale a row",
                "cuda 8.9",
                "torchao",
                beside=_PURE_BF16,
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
