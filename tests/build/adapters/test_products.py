"""Products of float32 adapters on a base in half precision, and DoRA's norms."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from framework.build.adapters.products import DoraByRows, InInputDtype, Together, norm_by_rows, row_norms
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Products(TorchDispatchMode):
    """Dtypes of the matrix products, by how often each was seen, and elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()
        self.largest = self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in PRODUCTS:
            self.dtypes.add(args[0].dtype)
            self.count += 1
        is_view = func._schema.returns and func._schema.returns[0].alias_info is not None
        if isinstance(result, torch.Tensor) and not is_view:
            self.largest = max(self.largest, result.numel())
        return result


def adapted(method="lora", architecture=LLAMA, dtype="bfloat16", autocast="none", training=None, **peft):
    training = {"use_peft": True, "mixed_precision_dtype": autocast, "learning_rate": 1e-2, **(training or {})}
    peft = {"peft_method": method, "lora_target_modules": ["all-linear"], **peft}
    return tiny_assembly(tiny_config(architecture, training=training, model={"torch_dtype_str": dtype}, peft=peft))


@pytest.mark.parametrize("autocast", ["none", "bf16"])
@pytest.mark.parametrize("method", ["lora", "rslora"])
def test_products_of_a_float32_adapter_are_in_the_bases_dtype(method, autocast):
    assembly = adapted(method, autocast=autocast)
    assert {parameter.dtype for parameter in assembly.trained} == {torch.float32}
    with Products() as seen:
        train_step(assembly, [unequal_rows()], 1)
    # attention's own scores and the rotary angles are float32 on the CPU
    factors = [module for module in assembly.model.modules() if isinstance(module, InInputDtype)]
    assert len(factors) == 2 * 14
    assert torch.bfloat16 in seen.dtypes
    layer = factors[0]
    assert layer(torch.ones(2, layer.in_features, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer(torch.ones(2, layer.in_features)).dtype is torch.float32


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_on_half_precision_learns_what_float32_does(method):
    narrow, wide = adapted(method), adapted(method, dtype="float32")
    wide.model.load_state_dict({name: value.float() for name, value in narrow.model.state_dict().items()})
    losses = [
        [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 8)] for assembly in (narrow, wide)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[1][-1] < losses[1][0] - 0.05


def apart(assembly):
    """The assembly with each factor's product computed separately."""
    for module in assembly.model.modules():
        if isinstance(module, InInputDtype):
            module.together = None
    return assembly


@pytest.mark.parametrize(("method", "checkpoints"), thinned(["lora", "dora"], [False, True]))
def test_layers_that_read_the_same_input_train_together_as_they_do_separately(method, checkpoints):
    training = {"enable_gradient_checkpointing": checkpoints}
    both = (
        adapted(method, dtype="float32", training=training),
        apart(adapted(method, dtype="float32", training=training)),
    )
    losses = [[train_step(assembly, [unequal_rows()], step).loss for step in range(1, 5)] for assembly in both]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    for (name, one), other in zip(both[0].model.named_parameters(), both[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, rtol=1e-4, atol=1e-5)
    assert all(module.together.input is None for module in both[0].model.modules() if getattr(module, "together", None))


def test_one_product_reads_the_input_of_queries_keys_and_values():
    """The 7 first factors in each of 2 blocks become 4 products in forward, and in backward as many for each side."""
    counts = []
    for assembly in (adapted(dtype="float32"), apart(adapted(dtype="float32"))):
        with Products() as seen:
            train_step(assembly, [unequal_rows()], 1)
        counts.append(seen.count)
    assert counts[1] - counts[0] == 2 * 3 * 3 - 2  # the first block's input has no gradient: q, k, v less one


@pytest.mark.parametrize(("dropout", "count"), [(0.0, 2 * 5), (0.1, 0)])
def test_dropout_gives_every_layer_an_input_of_its_own(dropout, count):
    model = adapted(dtype="float32", lora_dropout=dropout).model
    assert sum(getattr(module, "together", None) is not None for module in model.modules()) == count


def test_a_layer_called_again_or_with_another_tensor_has_its_own_product():
    layers = [InInputDtype(8, size, bias=False) for size in (2, 3)]
    Together(layers)
    first, second = torch.randn(2, 5, 8).unbind()
    for layer, given in ((layers[0], first), (layers[0], first), (layers[1], second), (layers[0], second)):
        torch.testing.assert_close(layer(given), given @ layer.weight.T)
    with torch.no_grad():
        layers[0].weight.zero_()
    assert not layers[0](second).any()


def test_row_norms_are_those_of_the_sum():
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(shape, generator=generator) for shape in ((50, 40), (4, 40), (50, 4)))
    exact = torch.linalg.norm(weight.double() + 2.5 * up.double() @ down.double(), dim=1)
    torch.testing.assert_close(row_norms(weight, down, up, 2.5).double(), exact, rtol=1e-6, atol=0)


def test_a_row_that_the_adapter_cancels_has_a_norm_of_zero_and_not_of_nothing():
    weight, down, up = torch.eye(3), torch.eye(3), -torch.eye(3)
    assert row_norms(weight, down, up, 1.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("architecture", [LLAMA, GPT2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dora_is_pefts_to_the_last_digits(architecture, dropout):
    losses = []
    for is_ours in (True, False):
        assembly = adapted("dora", architecture, "float32", lora_dropout=dropout)
        vectors = [module for module in assembly.model.modules() if isinstance(module, DoraByRows)]
        assert vectors
        for vector in () if is_ours else vectors:
            vector.__class__ = DoraLinearLayer
        torch.manual_seed(3)
        losses.append([train_step(assembly, [unequal_rows()], step).loss for step in range(1, 6)])
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


def test_dora_makes_nothing_as_large_as_a_weight():
    """peft makes an identity of the input's width and a copy of the weight, here 512 x 512 and 512 x 32."""
    wide = {**LLAMA, "intermediate_size": 512}
    assembly = adapted("dora", wide)
    layer = next(module for module in assembly.model.modules() if isinstance(module, DoraByRows))
    base = torch.nn.Linear(512, 32, bias=False, dtype=torch.bfloat16)
    down, up = InInputDtype(512, 8, bias=False), InInputDtype(8, 32, bias=False)
    layer.weight = torch.nn.Parameter(torch.ones(32))
    with Products() as seen:
        layer(torch.ones(4, 512, dtype=torch.bfloat16), lora_A=down, lora_B=up, scaling=1.0, base_layer=base)
    assert seen.largest <= 512 * 8


def test_dora_over_4_bits_is_one_graph() -> None:
    """peft's own look at the class of a 4-bit weight splits each block of a compiled model."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    adapted = get_peft_model(nn.Sequential(layer), LoraConfig(r=4, target_modules=["0"], use_dora=True))
    norm_by_rows(adapted)
    assert isinstance(adapted.base_model.model[0].lora_magnitude_vector["default"], DoraByRows)
    found = torch._dynamo.explain(adapted.base_model.model[0])(torch.randn(2, 64))
    assert (found.graph_count, found.graph_break_count) == (1, 0)
