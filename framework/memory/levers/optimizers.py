"""The optimizer, its states, and when it updates."""

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
            Setting("kahan", beside=_PURE_BF16),
            Setting(
                "stochastic",
                "+1.2 % tokens/s (1B); H200, 2026-11",
                "rounds at random instead of carrying the rest",
                beside=_PURE_BF16,
            ),
        ),
        ("optimizer",),
        "rounding",
        "How `anyprecision_adamw` keeps updates below half a last bit: a compensation of 2 bytes each, or chance.",
    ),
    Lever(
        "training.optimizer_in_backward",
        (Setting(False, beside=_UNCLIPPED), Setting(True, "-3.3 % tokens/s (1B); H200, 2026-11", beside=_UNCLIPPED)),
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
        search=Axis(("none", "host"), on_host=True),
    ),
)
