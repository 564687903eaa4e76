"""AdamW whose weights and states are bfloat16 or 8-bit floats, without losing updates smaller than their last bit.

Plain bfloat16 rounds an update away when it is below half the last bit of the weight (2^-9 of it). Two remedies:
stochastic rounding, unbiased on average (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192), and Kahan
summation, which keeps the rounding error in a compensation of two bytes. The second moment moves by less than its last
bit in almost every step (beta2 0.999), so it is rounded stochastically in both.

Each update is one pass over a parameter's memory, including gradient clipping. On a card one kernel launch updates all
parameters with equal settings; elsewhere plain torch computes the same, with the same random bits.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.build.launches import note_launch
from framework.build.optimizers import codes
from framework.build.ranks import local_part, shard_number
from framework.build.seeds import mixed, random_bits
from framework.schema.choices import Rounding

PIECE = 1 << 24
"""Elements computed at once without a kernel: float32 temporaries stay below 0.5 GiB for any embedding."""
CHUNK = 16384
"""Elements per program of the kernel: enough that the lookup of its tensor is cheap compared with the update."""
UNKNOWN_STEPS = 8
"""Maximum steps launched before the host knows whether the first of them was skipped."""
PARTS_APART = 1_000_003
"""Offset between the seeds of the parts of a sharded weight, which must draw different bits."""


class Update(NamedTuple):
    """One parameter with its gradient and states, as this rank's contiguous parts, and its own seed."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    compensation: Tensor | None
    first_scales: Tensor | None
    second_scales: Tensor | None
    seed: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it, in the order of the kernel's table."""
        return self[:-1]

    @property
    def moved(self) -> int:
        """Bytes that an update reads and writes; the gradient is only read."""
        sizes = [tensor.nbytes for tensor in self.tensors if tensor is not None]
        return 2 * sum(sizes) - self.gradient.nbytes


@dataclass(frozen=True)
class Numbers:
    """The settings of one step shared by the updates of a launch."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    correction1: float
    correction2: float
    grad_scale: Tensor | None
    found_inf: Tensor | None


class Kernel(NamedTuple):
    """A launch over `(table, chunks, one of the updates, numbers)`: int64 `[updates, 10]` has the addresses of each
    update's tensors (0 for none), its number of elements, the number of its first chunk, and its seed."""

    launch: Callable[[Tensor, int, Update, Numbers], None]
    reaches_host: bool = False
    """Whether it also supports tensors in host memory, as triton's interpreter does."""


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with small states and compensated or stochastic rounding.

    Bytes a bfloat16 parameter: weight 2, gradient 2, moments 2 and 2; `kahan` adds 2. With `state_bits` of 8 the
    moments are 1 and 1, and a float32 scale each for 256 elements (`codes`); parameters below `codes.SMALLEST` elements
    keep bfloat16. Float32 parameters keep float32 weights, which need no rounding. `numbers` gives each parameter its
    position in the model: random bits depend on (`seed`, step, position), so that a resumed run draws the same. Without
    a `kernel` plain torch updates in pieces.

    `grad_scale` and `found_inf` are torch's names of two scalars on the device (torch.amp.GradScaler and the fused
    optimizers): gradients are divided by the first, and if the second is 1 a step changes nothing. The host need not
    wait for either; once it knows of such steps, `take_back_skipped_steps` subtracts them from the counts.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        rounding: Rounding,
        state_bits: int,
        seed: int,
        numbers: Mapping[Tensor, int],
        kernel: Kernel | None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.rounding, self.state_bits = rounding, state_bits
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._seed, self._numbers, self._kernel = seed, numbers, kernel
        self._counted: deque[list[dict[str, Any]]] = deque(maxlen=UNKNOWN_STEPS)
        self._skipped: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        on_host = local_part(self.param_groups[0]["params"][0]).device.type == "cpu"  # where a card's weights may be
        kernel = self._kernel if not on_host or (self._kernel and self._kernel.reaches_host) else None
        # asked as a number that is not 0 in a rehearsal either, where no value is known
        if kernel is None and self.found_inf is not None and not float(1 - self.found_inf):
            return
        if kernel is not None and self.found_inf is not None:
            self._skipped = self.found_inf.clone() if self._skipped is None else self._skipped.add_(self.found_inf)
        self._counted.append([])
        launches: dict[Any, list[tuple[Tensor, Update]]] = defaultdict(list)
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, update = self._update(parameter)
                count = self.state[parameter]["step"]
                if not weight.numel():
                    continue  # fewer rows than ranks
                if kernel is None:
                    _update_plainly(update, self._shared(group, count))
                    _put_back(weight, update)
                else:
                    kind = tuple(None if tensor is None else tensor.dtype for tensor in update.tensors)
                    launches[place, count, kind].append((weight, update))
        for (place, count, _), parts in launches.items():
            updates = [update for _, update in parts]
            _launch(kernel, updates, self._shared(self.param_groups[place], count))
            for weight, update in parts:
                _put_back(weight, update)

    def take_back_skipped_steps(self) -> None:
        """Subtract the last steps with `found_inf` 1 from the counts, since they changed nothing. Waits for the
        device."""
        skipped, self._skipped = 0 if self._skipped is None else int(self._skipped), None
        for _ in range(min(skipped, len(self._counted))):
            for state in self._counted.pop():
                state["step"] -= 1

    def _update(self, parameter: Tensor) -> tuple[Tensor, Update]:
        """This rank's part of a parameter and its update, with the step count incremented."""
        state = self.state[parameter]
        if not state:
            self._make_states(state, parameter)
        state["step"] += 1
        self._counted[-1].append(state)
        seed = self._seed + shard_number(parameter) * PARTS_APART
        names = ("exp_avg", "exp_avg_sq", "compensation", "exp_avg_scales", "exp_avg_sq_scales")
        states = [local_part(state[name]) if name in state else None for name in names]
        weight, gradient = local_part(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
        own = mixed(seed, state["step"], self._numbers[parameter])
        return weight, Update(weight.contiguous(), gradient.contiguous(), *states, own)  # type: ignore[arg-type,call-arg]

    def _make_states(self, state: dict[str, Any], parameter: Tensor) -> None:
        state["step"] = 0
        is_coded = self.state_bits == 8 and parameter.numel() >= codes.SMALLEST
        dtype, flat = torch.uint8 if is_coded else torch.bfloat16, torch.contiguous_format
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=flat)
        if self.rounding is Rounding.KAHAN and parameter.dtype is torch.bfloat16:
            state["compensation"] = torch.zeros_like(parameter, dtype=torch.bfloat16, memory_format=flat)
        for name in ("exp_avg_scales", "exp_avg_sq_scales") if is_coded else ():
            state[name] = torch.zeros(-(-parameter.numel() // codes.BLOCK), device=parameter.device)

    def _shared(self, group: Mapping[str, Any], count: int) -> Numbers:
        beta1, beta2 = group["betas"]
        return Numbers(
            group["lr"],
            group["weight_decay"],
            beta1,
            beta2,
            group["eps"],
            1 - beta1**count,
            1 - beta2**count,
            self.grad_scale,
            self.found_inf,
        )


def note_only(table: Tensor, chunks: int, update: Update, numbers: Numbers) -> None:
    """Placeholder for a launch in a rehearsal: the table exists, and `_launch` has recorded the bytes."""


def _launch(kernel: Kernel | None, updates: Sequence[Update], numbers: Numbers) -> None:
    assert kernel is not None
    rows, chunks = [], 0
    for update in updates:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in update.tensors]
        count = update.weight.numel()
        rows.append([*addresses, count, chunks, update.seed])
        chunks += -(-count // CHUNK)
    note_launch("anyprecision_adamw", sum(update.moved for update in updates), tensors=len(updates))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(updates[0].weight.device, non_blocking=True)
    kernel.launch(table, chunks, updates[0], numbers)


def _put_back(weight: Tensor, update: Update) -> None:
    """Write the new weights of a parameter whose memory order differs from its elements' order."""
    if update.weight is not weight and not weight.is_contiguous():
        weight.copy_(update.weight)


def _update_plainly(update: Update, numbers: Numbers) -> None:
    """The kernel's update in plain torch, PIECE elements at a time."""
    count = update.weight.numel()
    for begin in range(0, count, PIECE):
        piece = slice(begin, min(begin + PIECE, count))
        blocks = slice(begin // codes.BLOCK, -(-piece.stop // codes.BLOCK))
        parts = [None if tensor is None else tensor.view(-1)[piece] for tensor in update.tensors[:5]]
        scales = [None if tensor is None else tensor[blocks] for tensor in update.tensors[5:]]
        noise = random_bits(update.seed, begin, piece.stop, update.weight.device)
        _update_piece(Update(*parts, *scales, update.seed), numbers, noise)  # type: ignore[arg-type,call-arg]


def _update_piece(update: Update, numbers: Numbers, noise: Tensor) -> None:
    gradient = update.gradient.float()
    if numbers.grad_scale is not None:
        gradient = gradient * (1 / numbers.grad_scale)
    first, second = _decoded(update)
    first.mul_(numbers.beta1).add_(gradient, alpha=1 - numbers.beta1)
    second.mul_(numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
    del gradient
    moved = first * (-numbers.rate / numbers.correction1)
    moved.div_((second / numbers.correction2).sqrt_().add_(numbers.epsilon))
    _keep(update, first, second, noise)
    del first, second
    weight = update.weight.float()
    moved.add_(weight, alpha=-numbers.rate * numbers.decay)
    if update.compensation is not None:
        moved.add_(update.compensation)
        update.weight.copy_(weight + moved)
        update.compensation.copy_(moved.sub_(update.weight.float().sub_(weight)))
    elif update.weight.dtype is torch.bfloat16:
        update.weight.copy_(round_stochastically(moved.add_(weight), noise))
    else:
        update.weight.copy_(moved.add_(weight))


def _decoded(update: Update) -> Iterator[Tensor]:
    """Both moments in float32, as copies."""
    if update.first_scales is None or update.second_scales is None:
        yield from (tensor.to(torch.float32, copy=True) for tensor in (update.first, update.second))
        return
    yield codes.decode(codes.FIRST, update.first, update.first_scales)
    yield codes.decode(codes.SECOND, update.second, update.second_scales)


def _keep(update: Update, first: Tensor, second: Tensor, noise: Tensor) -> None:
    """Store both moments in their formats. Changes `second`."""
    if update.first_scales is None or update.second_scales is None:
        update.first.copy_(first)
        update.second.copy_(round_stochastically(second, noise >> 16))
        return
    dropped = 32 - codes.DROPPED
    for code, values, drawn, held, scales in (
        (codes.FIRST, first, noise * FIRST_NOISE, update.first, update.first_scales),
        (codes.SECOND, second, noise, update.second, update.second_scales),
    ):
        coded, scale = codes.encode(code, values, drawn >> dropped)
        held.copy_(coded)
        scales.copy_(scale)


FIRST_NOISE = 0x2C1B3C6D
"""An odd factor for different random bits of the first and second moment (the lower half of a bit mixer)."""


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """float32 `value`, rounded in place to numbers that bfloat16 represents exactly: up or down with the probability
    that preserves the mean. The 16 bits that bfloat16 lacks are added to at random, from the lower bits of the int32
    `noise`, then cut off.
    """
    bits = value.view(torch.int32)
    bits.add_(noise & 0xFFFF).bitwise_and_(-(1 << 16))
    return value
