"""The global gradient norm, and clipping to it."""

import pytest
import torch

from framework.build.optimizers.clipping import clip_gradients, gradient_norms
from framework.build.optimizers.parameter_wise import ParameterWise
from tests.build.optimizers.test_any_precision import optimizer


def trained(dtype, shapes=((300, 40), (70,), (5, 5))):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


def exact(parameters):
    return float(torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_is_float64s_in_any_dtype(dtype):
    parameters = [*trained(dtype), torch.nn.Parameter(torch.zeros(3))]  # the last has no gradient
    norm = gradient_norms(parameters)[0]
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(exact(parameters[:-1]), rel=1e-5)


def test_gradients_of_several_dtypes_make_one_norm():
    parameters = [*trained(torch.bfloat16), *trained(torch.float32)]
    assert float(gradient_norms(parameters)[0]) == pytest.approx(exact(parameters), rel=1e-5)
    assert float(gradient_norms([torch.nn.Parameter(torch.zeros(3))])[0]) == 0


def test_gradients_above_the_limit_are_scaled_and_others_left():
    for limit, expected in ((1.0, 1.0), (1e6, None)):
        parameters = trained(torch.float32)
        before = exact(parameters)
        clip_gradients(torch.optim.SGD(parameters, lr=1.0), parameters, limit, gradient_norms(parameters)[0])
        assert exact(parameters) == pytest.approx(expected or before, rel=1e-5)


def test_an_optimizer_that_scales_as_it_reads_moves_as_with_gradients_clipped_before():
    moved = []
    for scales_itself in (True, False):
        parameters = trained(torch.float32)
        made = optimizer(parameters)
        norm = gradient_norms(parameters)[0]
        clip_gradients(made if scales_itself else torch.optim.SGD(parameters), parameters, 0.5, norm)
        assert exact(parameters) == pytest.approx(float(norm) if scales_itself else 0.5, rel=1e-5)
        made.step()
        moved.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-9)


def test_each_part_of_an_optimizer_of_parts_is_given_the_scale():
    parameters = trained(torch.float32)
    parts = ParameterWise([optimizer([parameter]) for parameter in parameters], None)
    clip_gradients(parts, parameters, 1.0, gradient_norms(parameters)[0])
    scales = [float(part.grad_scale) for part in parts.parts.values()]
    assert scales == pytest.approx([float(gradient_norms(parameters)[0])] * 3, rel=1e-5)
