"""The optimizer, its states, and when it updates."""

from framework.memory.levers.row import Lever, Setting

_UNCLIPPED = {"training.max_grad_norm": 0.0, "training.global_batch_size": None}
_PURE_BF16 = {"model.torch_dtype_str": "bfloat16", "training.mixed_precision_dtype": "none"}
_ROUNDED = {"training.optimizer": "anyprecision_adamw", **_PURE_BF16}

OPTIMIZERS = (
    Lever(
        "training.optimizer",
        (
            Setting("adamw_torch_fused"),
            Setting("adamw_torch", "-3.8 % tokens/s (1B); H100, 2026-11"),
            Setting("sgd", "+4.0 % tokens/s (1B); H100, 2026-11", "another optimizer: no momentum"),
            Setting("adafactor", "-19.6 % tokens/s (1B); H100, 2026-11", "another optimizer: factored"),
            Setting(
                "schedule_free_adamw",
                "-5.5 % tokens/s (1B); H200, 2026-11",
                "another optimizer: averaged weights",
            ),
            Setting(
                "sophia",
                "-1.8 % tokens/s (1B); H200, 2026-11",
                "another optimizer: clipped by curvature",
            ),
            Setting(
                "muon",
                "-35 % tokens/s (1B, 8,192 tokens a step); H200, 2026-11",
                "another optimizer: orthogonal updates of matrices",
            ),
            Setting(
                "galore_adamw",
                "-13 % tokens/s between projections (1B); H200, 2026-11",
                "another optimizer: low-rank moments",
            ),
            Setting(
                "apollo_adamw",
                "-21.5 % tokens/s (1B); H200, 2026-11",
                "another optimizer: scaled by low-rank moments",
            ),
            Setting("lion", "-0.2 % tokens/s (1B); H200, 2026-11", "another optimizer: signs"),
            Setting(
                "lion_8bit",
                "-12.3 % tokens/s (1B); H200, 2026-11",
                "another optimizer: signs of 8-bit codes",
                "",
                "bitsandbytes",
            ),
            Setting(
                "paged_lion_8bit",
                "-14.9 % tokens/s (1B); H200, 2026-11",
                "another optimizer: signs of codes",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "anyprecision_adamw",
                "+3.8 % tokens/s (1B); H200, 2026-11",
                "bfloat16 states, rounded stochastically",
                "cpu, cuda 8.0",
                beside=_PURE_BF16,
            ),
            Setting(
                "anyprecision_adamw_8bit",
                "+2.5 % tokens/s (1B); H200, 2026-11",
                "8-bit states, all rounded stochastically",
                "cpu, cuda 8.0",
                beside=_PURE_BF16,
            ),
            Setting(
                "adamw_8bit",
                "-20 % tokens/s (1B); H200, 2026-11",
                "states are 8-bit codes",
                "",
                "bitsandbytes",
            ),
            Setting(
                "paged_adamw_32bit",
                "-16 % tokens/s (1B); H200, 2026-11",
                "",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "paged_adamw_8bit",
                "-27 % tokens/s (1B); H200, 2026-11",
                "states are 8-bit codes",
                "cuda",
                "bitsandbytes",
            ),
            Setting(
                "adamw_torchao_8bit", "-28 % tokens/s (1B); H200, 2026-11", "states are 8-bit codes", "cuda", "torchao"
            ),
            Setting(
                "adamw_torchao_4bit", "-30 % tokens/s (1B); H200, 2026-11", "states are 4-bit codes", "cuda", "torchao"
            ),
        ),
        ("optimizer", "temporaries"),
        "optimizer",
        "Bytes of state a parameter: docs/optimizers.md. AdamW holds two copies of the trained weights; `adamw_torch` "
        "temporaries of their size too. Paged states leave torch's counters, not the card, until it is full.",
    ),
    Lever(
        "training.rounding",
        (
            Setting("kahan", beside=_ROUNDED),
            Setting(
                "stochastic",
                "+1.2 % tokens/s (1B); H200, 2026-11",
                "rounds at random instead of carrying the rest",
                beside=_ROUNDED,
            ),
        ),
        ("optimizer",),
        "rounding",
        "How `anyprecision_adamw` keeps updates below half a last bit: a compensation of 2 bytes each, or chance.",
    ),
    Lever(
        "training.optimizer_in_backward",
        (
            Setting(False, beside=_UNCLIPPED),
            Setting(True, "-3.3 % tokens/s (1B); H200, 2026-11", beside=_UNCLIPPED),
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
                beside={"training.optimizer_offload_folder": "/tmp"},
            ),
        ),
        ("optimizer",),
        "offloaded_states",
        "Optimizer states stay in host memory or in a file; one weight's states at a time come to the device.",
    ),
)
