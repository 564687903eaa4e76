"""Plans made by hand, so that each shown figure is known."""

from dataclasses import replace

from framework.memory.ledger import BatchUse, Device, PeakUse, PhaseUse, Plan, StepCost, Terms

GIB = 2**30


def gib(**terms: float) -> Terms:
    """Terms given in GiB."""
    return Terms(**{name: int(count * GIB) for name, count in terms.items()})


def use(phase: str, upper: float, terms: Terms) -> PeakUse:
    """A peak whose device bytes are its terms."""
    reserved = terms.total - terms.overhead
    allocated = reserved - terms.fragmentation
    return PeakUse(phase, allocated, reserved, 0, terms.total, int(upper * GIB), terms)


def phase(name: str, terms: Terms) -> PhaseUse:
    return PhaseUse(name, terms.total - terms.overhead - terms.fragmentation, terms.total, terms)


LOAD = gib(weights=2, overhead=0.5)
BACKWARD = gib(
    weights=2, gradients=1, optimizer=4, activations=8, logits_and_loss=3, temporaries=0.5, fragmentation=1,
    overhead=0.5,
)  # fmt: skip
STEP = gib(weights=2, gradients=2, optimizer=4, temporaries=2, fragmentation=9.5, overhead=0.5)

PLAN = Plan(
    device=Device("rtx4090_24gb", 1, 25 * GIB, 24 * GIB),
    peak=use("backward", 21, BACKWARD),
    step_peak=use("backward", 21, BACKWARD),
    phases=(phase("load", LOAD), phase("backward", BACKWARD), phase("optimizer_step", STEP)),
    host_bytes=3 * GIB,
    disk_bytes=5 * GIB // 2,
    checkpoint_bytes=GIB,
    step=StepCost(0.5, 4096.0, 10**13, "compute"),
    run_hours=2.5,
    batch=BatchUse(2, 4, 1, 1024),
    total_parameters=1_000_000,
    trainable_parameters=250_000,
    assumptions=(
        "every row is 1024 tokens long, 2 rows a forward pass: nothing is padded",
        "rtx4090_24gb: mixed list 24gb, 40gb: equal shares, so 24gb is the limit, and other facts are the worst of all",
    ),
    warnings=("the purpose of 12 MiB at the peak is not known",),
)


def on(usable: float | None, name: str = "rtx4090_24gb") -> Plan:
    """The plan for a card with another amount of usable memory."""
    bytes_ = None if usable is None else int(usable * GIB)
    return replace(PLAN, device=Device(name, 1, bytes_, bytes_))
