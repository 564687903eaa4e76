"""What computes attention, elementwise work and the loss."""

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
