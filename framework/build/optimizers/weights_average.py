"""`training.ema_decay`: an exponential moving average of the trained weights, kept with the optimizer's states.

As a state it is saved, resumed and counted like the others. It is float32 (a step of 1 - decay would round away in half
precision), and starts from the weights before the first update.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from framework.build.levers.offload import pinning
from framework.build.place import Place
from framework.build.ranks import local_part
from framework.schema.choices import EmaDevice
from framework.schema.training import TrainingParams

AVERAGE = "weights_average"
"""Name of the state."""


@contextlib.contextmanager
def average_follows(
    training: TrainingParams,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    place: Place,
    found_inf: Tensor | None,
) -> Iterator[None]:
    """Context around an update, after which a = decay a + (1 - decay) w for every trained weight.

    `found_inf` is the device scalar by which the update is skipped; the average is then skipped as well.
    """
    if training.ema_decay is None:
        yield
        return
    on_card = any(parameter.device.type != "cpu" for parameter in parameters)
    on_host = training.ema_device is EmaDevice.HOST and place.kind != "cpu" and on_card
    known = [optimizer.state[parameter].get(AVERAGE) for parameter in parameters]
    averages = [
        _start(parameter, on_host, place) if average is None else average
        for parameter, average in zip(parameters, known, strict=True)
    ]
    yield
    share = torch.full((), 1 - training.ema_decay, device=place.device)
    if found_inf is not None:
        share = share * (1 - found_inf)
    if on_host:
        staging = _staging(parameters)
        share = share if place.rehearsed else share.cpu()
    for parameter, average in zip(parameters, averages, strict=True):
        # after the update, since optimizers create their states only if there are none
        optimizer.state[parameter][AVERAGE] = average
        weights, held = local_part(parameter.detach()), local_part(average)
        if on_host and place.rehearsed:
            continue  # a rehearsal holds one element of the average; plans add the time to the step
        if on_host:
            weights = staging[: weights.nbytes].view(weights.dtype).view(weights.shape).copy_(weights)
        held.lerp_(weights.to(held.dtype), share.to(held.device, held.dtype))


def _staging(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Pinned buffer of the largest weight, through which all are copied to the host at the link's full rate, without
    page faults for new memory."""
    size = max(local_part(parameter.detach()).nbytes for parameter in parameters)
    with pinning(size):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _start(parameter: nn.Parameter, on_host: bool, place: Place) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if not on_host:
        return parameter.detach().to(dtype, copy=True)
    if place.rehearsed:
        return torch.zeros((), dtype=dtype, device="cpu").expand(parameter.shape)
    return local_part(parameter.detach()).to("cpu", dtype, copy=True)
