"""On a card the host is a step ahead, and non-finite values reach neither weights nor states."""

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.errors import NonFinite
from framework.run.step import launch_step
from tests.tiny import tiny_config, unequal_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [("float32", "bf16"), ("bfloat16", "none")])
def test_a_step_that_is_not_finite_and_the_next_change_nothing(precision):
    dtype, autocast = precision
    training = {"optimizer": "adamw_torch_fused", "learning_rate": 1e-2, "mixed_precision_dtype": autocast}
    config, architecture = settle(
        tiny_config(training=training, model={"torch_dtype_str": dtype, "chunked_loss": True})
    )
    assembly = assemble(config, architecture, real_place(torch.device("cuda", 0)), 10)
    batch = {name: tensor.cuda() for name, tensor in unequal_rows().items()}
    assert launch_step(assembly, [batch], 1).result().loss > 0
    tensors = [*assembly.trained, *(value for part in assembly.optimizer.state.values() for value in part.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    factors = iter([float("inf"), 1.0, 1.0])
    assembly.trained[3].register_hook(lambda gradient: gradient * next(factors))
    second, third = (launch_step(assembly, [batch], step) for step in (2, 3))
    assert not second.is_known
    with pytest.raises(NonFinite, match=r"step 2: loss \d.*gradient norm inf"):
        second.result()
    assert third.result().loss > 0
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    launch_step(assembly, [batch], 3).result()
    assert not any(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
