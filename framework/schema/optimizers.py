"""Facts of the optimizers, one row each; a row names the module in `framework.build.optimizers` that builds it.

The rows determine the settings of the lever `training.optimizer`, the keys without effect, what may be sharded, and
which rules apply. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from framework.schema.choices import Choice
from framework.schema.params import Auto


class Optimizer(Choice):
    """Optimizers, by Hugging Face's names where it has them."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    ADAMW_8BIT = "adamw_8bit"
    PAGED_ADAMW_32BIT = "paged_adamw_32bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"
    ADAMW_TORCHAO_8BIT = "adamw_torchao_8bit"
    ADAMW_TORCHAO_4BIT = "adamw_torchao_4bit"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    LION = "lion"
    LION_8BIT = "lion_8bit"
    PAGED_LION_8BIT = "paged_lion_8bit"
    SOPHIA = "sophia"
    ANYPRECISION_ADAMW = "anyprecision_adamw"
    ANYPRECISION_ADAMW_8BIT = "anyprecision_adamw_8bit"
    MUON = "muon"
    GALORE_ADAMW = "galore_adamw"
    APOLLO_ADAMW = "apollo_adamw"
    SCHEDULE_FREE_ADAMW = "schedule_free_adamw"

    @classmethod
    def other_spellings(cls) -> dict[str, str]:
        return {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw": "paged_adamw_32bit", "adamw": "adamw_torch"}


class Shards(Enum):
    """How the weights of an optimizer may be split over devices (tests/run/ranks tests each)."""

    ELEMENTS = "an element's update does not depend on others: FSDP and tensor parallel"
    GATHERED = "FSDP, with weights gathered for the update"
    WHOLE = "needs sums or projections over the full weight"
    CODED = "quantized states cannot be split with the weights"

    @property
    def is_sharded(self) -> bool:
        return self in (Shards.ELEMENTS, Shards.GATHERED)


_BETAS = ("adam_beta1", "adam_beta2")
_ADAM = (*_BETAS, "adam_epsilon")
_PROJECTED = (*_ADAM, "projection_rank", "projection_update_steps", "projection_scale")


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts of one optimizer."""

    module: str
    """Module of `framework.build.optimizers` whose `ROWS` build it."""
    keys: tuple[str, ...] = _ADAM
    """Keys of `training` that it uses, except those of all optimizers."""
    time: str = ""
    """Its cost in time, with the source of the figure; empty for the baseline."""
    changes: str = ""
    """How its trajectory differs from AdamW's; empty: only by rounding."""
    hardware: str = ""
    package: str = ""
    """The distribution that it comes from, with quantized or paged states; empty: torch or ours."""
    shards: Shards = Shards.ELEMENTS
    of_matrices: bool = False
    """Whether it treats matrices of the blocks separately, and other weights as AdamW."""
    rule: str = "adamw"
    """Update rule; optimizers with the same one differ in dtype and location of their states."""

    @property
    def projects(self) -> bool:
        return "projection_rank" in self.keys

    @property
    def keeps_small_updates(self) -> bool:
        """Whether it is for bfloat16 weights and does not round small updates away."""
        return "rounding" in self.keys


def _low_bit(package: str, time: str, changes: str, hardware: str) -> OptimizerFacts:
    return OptimizerFacts("low_bit", _ADAM, time, changes, hardware, package, Shards.CODED)


def _lion_8bit(time: str, hardware: str) -> OptimizerFacts:
    changes = "another optimizer: signs of 8-bit codes"
    return replace(_low_bit("bitsandbytes", time, changes, hardware), keys=_BETAS, rule="lion")


FACTS: Mapping[Optimizer, OptimizerFacts] = {
    Optimizer.ADAMW_TORCH_FUSED: OptimizerFacts("of_torch"),
    Optimizer.ADAMW_TORCH: OptimizerFacts("of_torch", time="-3.8 % tokens/s (1B); H100, 2026-11"),
    Optimizer.SGD: OptimizerFacts(
        "of_torch",
        ("sgd_momentum",),
        "+4.0 % tokens/s (1B); H100, 2026-11",
        "another optimizer: no momentum",
        rule="sgd",
    ),
    Optimizer.ADAFACTOR: OptimizerFacts(
        "of_torch",
        (),
        "-19.6 % tokens/s (1B); H100, 2026-11",
        "another optimizer: factored",
        shards=Shards.WHOLE,
        rule="adafactor",
    ),
    Optimizer.SCHEDULE_FREE_ADAMW: OptimizerFacts(
        "schedule_free",
        _ADAM,
        "-5.5 % tokens/s (1B); H200, 2026-11",
        "another optimizer: averaged weights",
        rule="schedule_free",
    ),
    Optimizer.SOPHIA: OptimizerFacts(
        "sophia",
        (*_BETAS, "sophia_rho", "sophia_hessian_steps"),
        "-1.8 % tokens/s (1B); H200, 2026-11",
        "another optimizer: clipped by curvature",
        rule="sophia",
    ),
    Optimizer.MUON: OptimizerFacts(
        "muon",
        (*_ADAM, "muon_momentum"),
        "-35 % tokens/s (1B, 8,192 tokens a step); H200, 2026-11",
        "another optimizer: orthogonal updates of matrices",
        shards=Shards.GATHERED,
        of_matrices=True,
        rule="muon",
    ),
    Optimizer.GALORE_ADAMW: OptimizerFacts(
        "low_rank",
        _PROJECTED,
        "-13 % tokens/s between projections (1B); H200, 2026-11",
        "another optimizer: low-rank moments",
        shards=Shards.WHOLE,
        of_matrices=True,
        rule="galore",
    ),
    Optimizer.APOLLO_ADAMW: OptimizerFacts(
        "low_rank",
        _PROJECTED,
        "-21.5 % tokens/s (1B); H200, 2026-11",
        "another optimizer: scaled by low-rank moments",
        shards=Shards.WHOLE,
        of_matrices=True,
        rule="apollo",
    ),
    Optimizer.LION: OptimizerFacts(
        "lion", _BETAS, "-0.2 % tokens/s (1B); H200, 2026-11", "another optimizer: signs", rule="lion"
    ),
    Optimizer.LION_8BIT: _lion_8bit("-12.3 % tokens/s (1B); H200, 2026-11", ""),
    Optimizer.PAGED_LION_8BIT: _lion_8bit("-14.9 % tokens/s (1B); H200, 2026-11", "cuda"),
    Optimizer.ANYPRECISION_ADAMW: OptimizerFacts(
        "any_precision_rows",
        (*_ADAM, "rounding"),
        "+3.8 % tokens/s (1B); H200, 2026-11",
        "bfloat16 states, rounded stochastically",
        "cpu, cuda 8.0",
    ),
    Optimizer.ANYPRECISION_ADAMW_8BIT: OptimizerFacts(
        "any_precision_rows",
        (*_ADAM, "rounding"),
        "+2.5 % tokens/s (1B); H200, 2026-11",
        "8-bit states, all rounded stochastically",
        "cpu, cuda 8.0",
        shards=Shards.CODED,
    ),
    Optimizer.ADAMW_8BIT: _low_bit("bitsandbytes", "-20 % tokens/s (1B); H200, 2026-11", "states are 8-bit codes", ""),
    Optimizer.PAGED_ADAMW_32BIT: _low_bit("bitsandbytes", "-16 % tokens/s (1B); H200, 2026-11", "", "cuda"),
    Optimizer.PAGED_ADAMW_8BIT: _low_bit(
        "bitsandbytes", "-27 % tokens/s (1B); H200, 2026-11", "states are 8-bit codes", "cuda"
    ),
    Optimizer.ADAMW_TORCHAO_8BIT: _low_bit(
        "torchao", "-28 % tokens/s (1B); H200, 2026-11", "states are 8-bit codes", "cuda"
    ),
    Optimizer.ADAMW_TORCHAO_4BIT: _low_bit(
        "torchao", "-30 % tokens/s (1B); H200, 2026-11", "states are 4-bit codes", "cuda"
    ),
}
"""The baseline first, then in the order of the levers table. bitsandbytes' kernels do not work on a shard of a tensor
(tested on two processes), torchao's states are not tested, and our scales, one per 256 elements, are not split."""


def serves_states_of(choice: Optimizer, other: Optimizer) -> bool:
    """Whether an optimizer can resume with the states of another, equal up to rounding: unquantized states work for
    every optimizer of their rule, quantized ones for those of their package."""
    one, two = FACTS[choice], FACTS[other]
    return (one.rule, one.changes) == (two.rule, two.changes) and (not one.changes or one.package == two.package)


def facts_of(choice: Optimizer | Auto) -> OptimizerFacts:
    """The facts of a choice; for an undecided `auto` those of the baseline."""
    return FACTS[Optimizer.ADAMW_TORCH_FUSED if choice == "auto" else choice]
