"""What a structure needs at any micro batch, from few plans of it with few layers. Arithmetic; no torch.

Within a phase, allocated bytes are linear in layers and in the micro batch, and so is a step's time in layers and in
the number of micro batches (the largest of several linear functions, strictly: a larger batch than any that was
planned needs at least what the line says). So a structure is planned with two depths at a few micro batches; where it
matters the whole model is planned, which corrects what the lines say of its structure.
"""

import math
from dataclasses import dataclass, field

from framework.memory.ledger import Plan
from framework.schema.architecture import language_part
from framework.schema.config import TrainingConfig

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Lists of an architecture with one entry a layer."""
CACHED_SHARE = 1.01
"""Upper end of device bytes over allocated bytes until a plan of the structure tells its own: the least of any band."""


@dataclass(frozen=True)
class Figures:
    """One plan, in short: bytes allocated in each phase, the upper end of bytes on the device, seconds of a step."""

    allocated: dict[str, float]
    others: float
    """Bytes that are no part of torch's cache: context and managed memory."""
    upper: float
    seconds: float

    @classmethod
    def of(cls, plan: Plan) -> "Figures":
        phases = {phase.name: float(phase.allocated_bytes) for phase in plan.phases}
        others = float(plan.peak.terms.overhead + plan.peak.managed_bytes)
        seconds = plan.step.seconds if plan.step is not None else 0.0
        return cls(phases, others, float(plan.peak.device_bytes_upper), seconds)


@dataclass(frozen=True)
class Depths:
    """Two numbers of layers to plan with, and the model's own."""

    few: int
    more: int
    all: int


@dataclass
class Estimate:
    """What is known of one structure: `shallow` (micro batch -> figures of the whole model, from two depths), and
    `planned` (micro batch -> the plan of the whole model). `lender` is one like it, whose plans correct it until it has
    its own."""

    shallow: dict[int, Figures] = field(default_factory=dict)
    planned: dict[int, Plan] = field(default_factory=dict)
    lender: "Estimate | None" = None

    def upper(self, micro: int) -> float:
        """Upper end of device bytes at a micro batch."""
        if micro in self.planned:
            return float(self.planned[micro].peak.device_bytes_upper)
        return self._line(micro) * self._correction(micro)

    def told(self, micro: int, correction: float) -> float:
        """The same as a person is told it: by a correction of others, where no plan of a kin corrects the line, which
        without one is what is needed at least."""
        is_corrected = bool(self.planned) or (self.lender is not None and bool(self.lender.planned))
        return self.upper(micro) if is_corrected else self.upper(micro) * correction

    @property
    def corrections(self) -> list[float]:
        """Upper end of device bytes of each plan of the whole model over what the line says there."""
        return [plan.peak.device_bytes_upper / self._line(micro) for micro, plan in self.planned.items()]

    def seconds(self, micro: int) -> float:
        """Seconds of a step at a micro batch."""
        if micro in self.planned:
            return Figures.of(self.planned[micro]).seconds
        return self._line_seconds(micro) * self._slowness(micro)

    def grown(self, micro: int) -> float:
        """Bytes that a micro batch adds to none, at least: what is left when nothing else is on the card."""
        a, b = self._nearest(micro)
        low, high = self.shallow[a].allocated, self.shallow[b].allocated
        return max(micro * _through(a, low[name], b, high[name])[1] for name in low)

    def _nearest(self, micro: int) -> tuple[int, int]:
        """The two planned micro batches whose line is used at `micro`."""
        known = sorted(self.shallow)
        position = next((index for index, size in enumerate(known) if size >= micro), len(known) - 1)
        position = max(1, position) if len(known) > 1 else 0
        return known[max(position - 1, 0)], known[position]

    def _line(self, micro: int) -> float:
        a, b = self._nearest(micro)
        low, high = self.shallow[a], self.shallow[b]
        peak = max(_between(a, low.allocated[name], b, high.allocated[name], micro) for name in low.allocated)
        return peak * CACHED_SHARE + _between(a, low.others, b, high.others, micro)

    def _line_seconds(self, micro: int) -> float:
        a, b = self._nearest(micro)
        return _between(1 / a, self.shallow[a].seconds, 1 / b, self.shallow[b].seconds, 1 / micro)

    def _correction(self, micro: int) -> float:
        near = self._nearest_plan(micro)
        if not near and self.lender is not None:
            return self.lender._correction(micro)
        return self.planned[near].peak.device_bytes_upper / self._line(near) if near else 1.0

    def _slowness(self, micro: int) -> float:
        near = self._nearest_plan(micro)
        if not near and self.lender is not None:
            return self.lender._slowness(micro)
        said = self._line_seconds(near) if near else 0.0
        return Figures.of(self.planned[near]).seconds / said if near and said else 1.0

    def _nearest_plan(self, micro: int) -> int | None:
        return min(self.planned, key=lambda size: abs(size - micro), default=None)


def _through(x: float, y: float, other_x: float, other_y: float) -> tuple[float, float]:
    """Value at zero and slope of the line through two points; flat where they are one."""
    slope = (other_y - y) / (other_x - x) if other_x != x else 0.0
    return y - slope * x, slope


def _between(x: float, y: float, other_x: float, other_y: float, at: float) -> float:
    constant, slope = _through(x, y, other_x, other_y)
    return constant + slope * at


def deepened(few: Plan, more: Plan, depths: Depths | None) -> Figures:
    """Figures of the whole model, from plans of it with few layers and with more; `few` is of all without `depths`."""
    a, b = Figures.of(few), Figures.of(more)
    if depths is None:
        return a

    def whole(low: float, high: float) -> float:
        return _between(depths.few, low, depths.more, high, depths.all)

    phases = {name: whole(a.allocated[name], b.allocated[name]) for name in a.allocated}
    return Figures(phases, whole(a.others, b.others), whole(a.upper, b.upper), whole(a.seconds, b.seconds))


def depths_of(config: TrainingConfig) -> Depths | None:
    """Depths to plan a model with instead of its own; None where few layers do not stand for all of them.

    Layers may alternate (`layer_types`), and every n-th may be checkpointed: the depths hold whole rounds of both.
    """
    model = config.model
    if model.architecture is None or model.freeze_first_blocks or model.freeze_layers:
        return None
    part = language_part(model.architecture)
    layers = next((part[key] for key in DEPTH_KEYS if isinstance(part.get(key), int)), 0)
    kinds = part.get("layer_types") or ()
    repeats = (n for n in range(1, layers) if all(kinds[i] == kinds[i - n] for i in range(n, len(kinds))))
    unit = next(repeats, layers) if kinds else 1
    every = config.training.gradient_checkpointing_every
    if config.training.enable_gradient_checkpointing is True and isinstance(every, int):
        unit = math.lcm(unit, every)
    few = max(unit, 2)
    more = few + unit
    return Depths(few, more, layers) if 2 * more <= layers else None


def with_depth(config: TrainingConfig, layers: int) -> TrainingConfig:
    """The config with a model of so many layers. Raises ValueError without a written architecture."""
    if config.model.architecture is None:
        raise ValueError("the architecture is not written out")
    settings = config.model.architecture.thaw()
    part = settings["text_config"] if isinstance(settings.get("text_config"), dict) else settings
    for key in DEPTH_KEYS:
        if key in part:
            part[key] = layers
    for key in PER_LAYER:
        if isinstance(part.get(key), list):
            part[key] = part[key][:layers]
    document = config.model_dump()
    document["model"]["architecture"] = settings
    return TrainingConfig.model_validate(document)
