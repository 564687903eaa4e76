"""The train step and the eval step. The plan rehearses these same functions.

This is the only module that calls `.backward(` or an optimizer's `.step(`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.build.assembly import Assembly
from framework.build.levers.compiled import forget_recorded
from framework.build.losses.loss import Batch, Observe, ignore_phases
from framework.build.optimizers.build import RATE_FACTOR
from framework.build.optimizers.clipping import clip_gradients, gradient_norms
from framework.build.optimizers.parameter_wise import ParameterWise
from framework.build.optimizers.weights_average import average_follows
from framework.build.scaler import forget_skipped_steps, found_inf_of, takes_found_inf
from framework.build.tasks import reference_of
from framework.build.tasks.reference import Precomputed
from framework.errors import NonFinite
from framework.schema.plural import counted


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step: mean loss over its terms, gradient norm before clipping, counts.

    `terms` counts what the loss is averaged over: supervised tokens, pairs or rows.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    terms: int
    busiest_expert: float | None = None
    """Share of router assignments that went to the busiest expert; None without a mixture of experts."""
    skipped: bool = False
    """Whether float16 gradients overflowed: the weights were kept and the loss scale was lowered."""


def keep_nothing() -> None:
    """Save no state before the update: the step cannot be undone."""


class LaunchedStep:
    """An optimizer step that was submitted to the device, whose figures are still being copied to the host."""

    def __init__(
        self, assembly: Assembly, figures: Tensor, step: int, learning_rate: float, known: StepResult | None
    ) -> None:
        """`figures` are those of `_figures`; `known` is the result if the host has already waited for it."""
        self._assembly, self._figures, self._step = assembly, figures, step
        self._learning_rate, self._known = learning_rate, known
        self._arrived: torch.cuda.Event | None = None
        if known is None and assembly.place.kind == "cuda" and not assembly.place.rehearsed:
            on_host = torch.empty(figures.shape, dtype=figures.dtype, device="cpu", pin_memory=True)
            self._figures = on_host.copy_(figures, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def is_known(self) -> bool:
        """Whether `result` returns without waiting for the device."""
        return self._arrived is None

    def result(self) -> StepResult:
        """Wait for the device and return the step's results. Raises NonFinite; neither this step nor a later one has
        changed anything then."""
        if self._known is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            try:
                self._known = _read(self._assembly, self._figures, self._step, self._learning_rate)
            except NonFinite:
                forget_skipped_steps(self._assembly.optimizer)
                raise
        return self._known


def train_step(
    assembly: Assembly,
    micro_batches: Sequence[Batch],
    step: int,
    observe: Observe = ignore_phases,
    before_update: Callable[[], None] = keep_nothing,
) -> StepResult:
    """Run `launch_step` and wait for its result. Raises NonFinite as `LaunchedStep.result` does."""
    return launch_step(assembly, micro_batches, step, observe, before_update).result()


def launch_step(
    assembly: Assembly,
    micro_batches: Sequence[Batch],
    step: int,
    observe: Observe = ignore_phases,
    before_update: Callable[[], None] = keep_nothing,
) -> LaunchedStep:
    """Run one optimizer step over the micro-batches of a global batch. `step` counts from 1.

    The loss is the mean over the terms (supervised tokens, pairs) of the whole global batch, however it is split.
    `observe` is called when each phase begins: forward, loss, backward, optimizer_step, end; `before_update` is called
    right before weights change. A loss or gradient norm that is not finite reaches neither weights nor optimizer
    states. If the optimizer reads that from the device (`takes_found_inf`), the host does not wait for it, and later
    steps change nothing until the host has raised NonFinite; otherwise NonFinite is raised here. If gradients overflow
    only because float16 autocast scaled the loss, the step is skipped. With `optimizer_in_backward` a weight is updated
    before the norm of all gradients is known.
    """
    micro_batches = [assembly.part_of(batch) for batch in micro_batches]
    terms = _terms(assembly, micro_batches)
    training, learning_rate = assembly.config.training, assembly.schedule.rate(step)
    for group in assembly.optimizer.param_groups:  # torchao keeps it in a tensor, which its compiled code reads
        own = learning_rate * group.get(RATE_FACTOR, 1.0)
        group["lr"] = group["lr"].fill_(own) if isinstance(group["lr"], Tensor) else own
    in_backward = training.optimizer_in_backward is True
    if assembly.experts is not None:
        assembly.experts.forget()
    if in_backward:
        before_update()
    updates = _updates_in_backward(assembly) if in_backward else contextlib.nullcontext()
    with assembly.attention, updates as squares:
        total = _make_gradients(assembly, micro_batches, terms, step, observe)
    if assembly.buckets is not None:
        assembly.buckets.add_up()
    observe("optimizer_step")
    assembly.loss_scale.scaler.unscale_(assembly.optimizer)
    norms = [squares.sqrt()] if squares is not None else _clip(assembly, training.max_grad_norm)
    figures = _figures(assembly, micro_batches, total, terms, norms)
    del norms
    known = _read(assembly, figures, step, learning_rate) if in_backward or waits_for_figures(assembly) else None
    found_inf = None
    if known is None:
        found_inf = found_inf_of(assembly.optimizer, assembly.place.device)
        torch.maximum(found_inf, figures.isfinite().all().logical_not(), out=found_inf)
    if not in_backward and not (known is not None and known.skipped):
        before_update()  # the scaler's own step would wait for the device again for the same answer
        with average_follows(training, assembly.optimizer, assembly.trained, assembly.place, found_inf):
            assembly.optimizer.step()
        assembly.loss_scale.scaler.update()
    assembly.drop_gradients()
    observe("end")
    assembly.cache.after_step(step)
    return LaunchedStep(assembly, figures, step, learning_rate, known)


def waits_for_figures(assembly: Assembly) -> bool:
    """Whether the host has to know that a step is finite before it can launch the update.

    With float16 the host decides whether the loss scale caused an overflow. The update of sharded or offloaded weights
    cannot read `found_inf` from this device.
    """
    elsewhere = assembly.is_in_parts or assembly.config.fsdp.is_on_host
    return assembly.loss_scale.enabled or elsewhere or not takes_found_inf(assembly.optimizer)


def _figures(
    assembly: Assembly, micro_batches: Sequence[Batch], total: Tensor, terms: Tensor, norms: Sequence[Tensor]
) -> Tensor:
    """Loss, tokens and terms of all ranks, the share of the busiest expert (0 without experts), and `norms`, as a
    float64 vector on the device. Does not wait for the device."""
    tokens = torch.full((), sum(batch["input_ids"].numel() for batch in micro_batches), device=total.device)
    busiest = torch.zeros_like(total) if assembly.experts is None else assembly.experts.busiest_share(assembly.ranks)
    known = torch.stack([part.double() for part in (total, tokens, terms, busiest)])
    figures = torch.cat([known, torch.stack(list(norms)).to(known)])  # offloaded gradients are on the host
    assembly.ranks.sum(figures[:2])
    return figures


def _read(assembly: Assembly, figures: Tensor, step: int, learning_rate: float) -> StepResult:
    """Wait for the figures of a step. Raises NonFinite unless they are finite or float16's scaler skips the step."""
    loss, tokens, terms, busiest, norm, *each = figures.tolist()
    skipped = _finite(loss) and not _finite(norm) and assembly.loss_scale.skip()
    if not skipped and not (_finite(loss) and _finite(norm)):
        raise NonFinite(_non_finite_report(assembly, loss, norm, step, terms, each))
    return StepResult(loss, norm, learning_rate, int(tokens), int(terms), busiest or None, skipped)


def trial_step(assembly: Assembly, micro_batches: Sequence[Batch], observe: Observe = ignore_phases) -> None:
    """Run forward and backward and drop the gradients: a test of their memory before training begins.

    With `optimizer_in_backward` each gradient is dropped where the optimizer would consume it.
    """
    micro_batches = [assembly.part_of(batch) for batch in micro_batches]
    terms = _terms(assembly, micro_batches).clamp(min=1)
    in_backward = assembly.config.training.optimizer_in_backward is True
    dropping = _gradients_dropped(assembly) if in_backward else contextlib.nullcontext()
    with assembly.attention, dropping:
        _make_gradients(assembly, micro_batches, terms, 0, observe)
    assembly.drop_gradients()
    observe("end")


def _terms(assembly: Assembly, micro_batches: Sequence[Batch]) -> Tensor:
    """Number of terms in the whole global batch, over all ranks: an int64 scalar on the device."""
    return assembly.ranks.sum(torch.stack([assembly.objective.terms(batch) for batch in micro_batches]).sum())


def _make_gradients(
    assembly: Assembly, micro_batches: Sequence[Batch], terms: Tensor, step: int, observe: Observe
) -> Tensor:
    """Run forward and backward of every micro-batch. Returns this rank's part of the mean loss, a scalar on the
    device."""
    if not assembly.place.rehearsed:
        forget_recorded(assembly.config.training)
    total = torch.zeros((), device=assembly.place.device)
    in_backward = assembly.config.training.optimizer_in_backward is True
    for number, batch in enumerate(micro_batches, 1):
        observe("forward")
        with assembly.keeping_gradients(is_last=number == len(micro_batches)):
            with assembly.autocast:
                loss = assembly.loss_of(batch, observe) / terms
            if in_backward and not _finite(known := float(loss.detach())):
                raise NonFinite(_non_finite_report(assembly, known, 0.0, step, float(terms)))
            observe("backward")
            assembly.loss_scale.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
        del loss
    if assembly.tensor is not None:
        assembly.tensor.complete_gradients(assembly.model)
    return total


def eval_step(assembly: Assembly, batch: Batch, observe: Observe = ignore_phases) -> Mapping[str, Tensor]:
    """The objective's sums for one batch of an evaluation, on the device. Keeps no logits."""
    observe("eval")
    with torch.no_grad(), assembly.attention, assembly.autocast:
        return assembly.sums_of(assembly.part_of(batch))


def reference_step(assembly: Assembly, batch: Batch, observe: Observe = ignore_phases) -> Tensor:
    """Log-probabilities of the batch's answers under a reference model evaluated before training, `[sequences]`."""
    reference = reference_of(assembly.objective)
    assert isinstance(reference, Precomputed), "only such a reference is evaluated outside the step"
    observe("eval")
    with torch.no_grad(), assembly.attention, assembly.autocast:
        answers: Tensor = assembly.through(reference.source, batch)
        return answers


@contextlib.contextmanager
def _updates_in_backward(assembly: Assembly) -> Iterator[Tensor]:
    """Update each weight within the block as soon as backward has computed its gradient, and free the gradient.

    Yields the sum of the squares of all gradients, float32 on the device.
    """
    optimizer = assembly.optimizer
    assert isinstance(optimizer, ParameterWise), "build_optimizer() makes one for updates in backward"
    squares = torch.zeros((), device=assembly.place.device)

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares.add_(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) ** 2)
        optimizer.step_parameter(parameter)
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        for parameter in assembly.trained
    ]
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _gradients_dropped(assembly: Assembly) -> Iterator[None]:
    """Free each gradient within the block as soon as it is complete."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in assembly.trained
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _clip(assembly: Assembly, limit: float) -> list[Tensor]:
    """Clip the gradients to `limit` unless it is 0. Returns the global norm before clipping, over all ranks, and the
    norm of each parameter's gradient where it is known."""
    parameters, each = assembly.trained, list[Tensor]()
    if assembly.tensor is None:
        norm, each = gradient_norms(parameters)
    else:
        norm = assembly.tensor.gradient_norm(assembly.model)
    if limit:
        clip_gradients(assembly.optimizer, parameters, limit, norm)
    return [norm, *each]


def _finite(value: float) -> bool:
    return value - value == 0


def _non_finite_report(
    assembly: Assembly, loss: float, norm: float, step: int, terms: float, norms: Sequence[float] = ()
) -> str:
    """The error message for a step that is not finite. `norms` are those of the gradients, if still available."""
    names = [name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad]
    if len(norms) != len(names):  # some had no gradient, and it is no longer known which
        norms = ()
    bad = next((name for name, own in zip(names, norms, strict=False) if not _finite(own)), None)
    weights = assembly.config.model.torch_dtype_str
    in_backward = assembly.config.training.optimizer_in_backward is True
    changed = "not changed" if not in_backward else "perhaps changed, since they are updated in backward"
    autocast = assembly.config.training.mixed_precision_dtype
    first = f"; first gradient that is not finite: {bad}" if bad else ""
    scale = assembly.loss_scale
    scaled = (
        f", loss scale {scale.scaler.get_scale():g}, {counted(scale.skipped, 'step')} skipped" if scale.enabled else ""
    )
    return (
        f"step {step}: loss {loss}, gradient norm {norm} over {int(terms)} {assembly.objective.unit} "
        f"(weights {weights}, autocast {autocast}{scaled}){first}. The weights were {changed}."
    )
