"""Estimates of a structure's memory and time at any micro-batch, from few plans with few layers. Arithmetic; no torch.

Within a phase, allocated bytes are linear in layers and micro-batch, and a step's time is linear in layers and number
of micro-batches. (Strictly it is the maximum of several linear functions: a batch larger than all planned ones needs at
least the extrapolated value.) So a structure is planned with two depths at a few micro-batches; where it matters the
whole model is planned, which corrects the extrapolations for its structure.
"""

import math
from dataclasses import dataclass, field

from framework.memory.ledger import Plan
from framework.schema.architecture import language_part
from framework.schema.config import TrainingConfig

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Lists in an architecture with one entry per layer."""
CACHED_SHARE = 1.01
"""Ratio of upper bound to allocated bytes before the structure has a full plan: the smallest of all bands."""


@dataclass(frozen=True)
class Figures:
    """Summary of a plan: bytes allocated in each phase, upper bound of device bytes, seconds per step."""

    allocated: dict[str, float]
    others: float
    """Bytes outside torch's cache: context and managed memory."""
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
    """Two numbers of layers to plan with, and the model's number."""

    few: int
    more: int
    all: int


@dataclass
class Estimate:
    """Knowledge about one structure: `shallow` (micro-batch -> figures of the whole model, extrapolated from two
    depths) and `planned` (micro-batch -> the plan of the whole model). `lender` is a similar structure whose plans
    correct it until it has its own."""

    shallow: dict[int, Figures] = field(default_factory=dict)
    planned: dict[int, Plan] = field(default_factory=dict)
    lender: "Estimate | None" = None

    def upper(self, micro: int) -> float:
        """Upper bound of device bytes at a micro-batch."""
        if micro in self.planned:
            return float(self.planned[micro].peak.device_bytes_upper)
        return self._line(micro) * self._correction(micro)

    def reported(self, micro: int, correction: float) -> float:
        """Upper bound to report: with the `correction` of other structures if no plan of a related one corrects the
        line, which by itself is only a lower estimate."""
        is_corrected = bool(self.planned) or (self.lender is not None and bool(self.lender.planned))
        return self.upper(micro) if is_corrected else self.upper(micro) * correction

    @property
    def corrections(self) -> list[float]:
        """Ratio of planned to extrapolated upper bound for each plan of the whole model."""
        return [plan.peak.device_bytes_upper / self._line(micro) for micro, plan in self.planned.items()]

    def seconds(self, micro: int) -> float:
        """Seconds per step at a micro-batch."""
        if micro in self.planned:
            return Figures.of(self.planned[micro]).seconds
        return self._line_seconds(micro) * self._slowness(micro)

    def grown(self, micro: int) -> float:
        """Lower estimate of the bytes that grow with the micro-batch."""
        a, b = self._nearest(micro)
        low, high = self.shallow[a].allocated, self.shallow[b].allocated
        return max(micro * _through(a, low[name], b, high[name])[1] for name in low)

    def _nearest(self, micro: int) -> tuple[int, int]:
        """The two planned micro-batches whose line is used at `micro`."""
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
        extrapolated = self._line_seconds(near) if near else 0.0
        return Figures.of(self.planned[near]).seconds / extrapolated if near and extrapolated else 1.0

    def _nearest_plan(self, micro: int) -> int | None:
        return min(self.planned, key=lambda size: abs(size - micro), default=None)


def _through(x: float, y: float, other_x: float, other_y: float) -> tuple[float, float]:
    """Intercept and slope of the line through two points; flat if they coincide."""
    slope = (other_y - y) / (other_x - x) if other_x != x else 0.0
    return y - slope * x, slope


def _between(x: float, y: float, other_x: float, other_y: float, at: float) -> float:
    constant, slope = _through(x, y, other_x, other_y)
    return constant + slope * at


def deepened(few: Plan, more: Plan, depths: Depths | None) -> Figures:
    """Figures of the whole model, extrapolated from plans with few and with more layers; without `depths`, `few` is the
    plan of the whole model."""
    a, b = Figures.of(few), Figures.of(more)
    if depths is None:
        return a

    def whole(low: float, high: float) -> float:
        return _between(depths.few, low, depths.more, high, depths.all)

    phases = {name: whole(a.allocated[name], b.allocated[name]) for name in a.allocated}
    return Figures(phases, whole(a.others, b.others), whole(a.upper, b.upper), whole(a.seconds, b.seconds))


def depths_of(config: TrainingConfig) -> Depths | None:
    """Reduced depths to plan a model with; None if few layers do not represent all of them.

    Layers may alternate (`layer_types`), and every n-th may be checkpointed: the depths contain full periods of both.
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
    """The config with a model of that many layers. Raises ValueError without a written architecture."""
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
