"""Updates of AnyPrecisionAdamW by its kernel, which triton's interpreter runs on the CPU, and by plain torch.

Prints a line of JSON a case. A process of its own (`test_any_precision.py` starts it): TRITON_INTERPRET must be set
before the kernels are defined.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from framework.build.optimizers.any_precision import AnyPrecisionAdamW, Kernel
from framework.build.optimizers.any_precision_kernel import launch
from framework.schema.choices import Rounding


def _as_tensor(arg):
    """The interpreter hands floats to kernels as they are, a card as float32."""
    if isinstance(arg, float):
        return tl.tensor(interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
    return _convert(arg)


_convert = interpreter._implicit_cvt
interpreter._implicit_cvt = _as_tensor


def trained(dtype, rounding, bits, kernel, skipped=None):
    """Parameters and optimizer after three steps: of two chunks, one block, odd rows, an odd address, another order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(20480,), (64,), (97, 53)]
    parameters = [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.ones(5000, dtype=dtype)[3:4999]))
    parameters.append(torch.nn.Parameter((torch.randn(40, 30, generator=generator) * 0.02).to(dtype).T))
    optimizer = AnyPrecisionAdamW(
        parameters,
        1e-3,
        (0.9, 0.999),
        1e-8,
        rounding=rounding,
        state_bits=bits,
        seed=1,
        numbers={parameter: number for number, parameter in enumerate(parameters)},
        kernel=kernel,
    )
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.grad_scale = torch.tensor(3.0)
    for step in range(3):
        for parameter in parameters:
            spread = torch.logspace(-6, 0, parameter.shape[-1])
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * spread).to(dtype)
        optimizer.found_inf = torch.tensor(float(step == skipped))
        optimizer.step()
    return parameters, optimizer


def largest(one, other):
    """The largest difference, relative to the largest element."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-30))


def compare(dtype, rounding, bits):
    kernel = Kernel(launch, reaches_host=True)
    (ours, made), (plain, expected) = trained(dtype, rounding, bits, kernel), trained(dtype, rounding, bits, None)
    found = {"case": f"{dtype} {rounding} {bits}", "weights": 0.0, "states": 0.0, "codes_that_differ": 0.0}
    for one, other in zip(ours, plain, strict=True):
        found["weights"] = max(found["weights"], largest(one, other))
        for name, state in expected.state[other].items():
            if name in ("step", "compensation"):  # a compensation is itself what the interpreter cuts off
                continue
            if state.dtype is torch.uint8:
                share = float((made.state[one][name] != state).float().mean())
                found["codes_that_differ"] = max(found["codes_that_differ"], share)
            else:
                found["states"] = max(found["states"], largest(made.state[one][name], state))
    twice, _ = trained(dtype, rounding, bits, kernel, skipped=2)
    made.found_inf = torch.tensor(1.0)
    before = [parameter.clone() for parameter in twice]
    optimizer_of = trained(dtype, rounding, bits, kernel, skipped=2)[1]
    for parameter in optimizer_of.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer_of.found_inf = torch.tensor(1.0)
    optimizer_of.step()
    after = optimizer_of.param_groups[0]["params"]
    found["skipped"] = all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        for rounding, bits in ((Rounding.STOCHASTIC, 16), (Rounding.STOCHASTIC, 8), (Rounding.KAHAN, 8)):
            print(json.dumps(compare(dtype, rounding, bits)), flush=True)
