"""AnyPrecisionAdamW: its numbers against float64, random rounding, its launches, and steps that it must not make."""

import json
import subprocess
import sys

import pytest
import torch

from framework.build.optimizers import codes
from framework.build.optimizers.any_precision import CHUNK, AnyPrecisionAdamW, Kernel, round_stochastically
from framework.build.seeds import random_bits
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.choices import Rounding
from framework.schema.config import TrainingConfig
from tests.optimizers import BF16, WIDE, training
from tests.run.reference import H100
from tests.tiny import tiny_assembly, tiny_config, unequal_rows

BETAS, EPSILON, RATE = (0.9, 0.999), 1e-8, 1e-3


def optimizer(parameters, *, rounding=Rounding.STOCHASTIC, bits=16, kernel=None, decay=0.0):
    made = AnyPrecisionAdamW(
        parameters,
        RATE,
        BETAS,
        EPSILON,
        rounding=rounding,
        state_bits=bits,
        seed=7,
        numbers={parameter: number for number, parameter in enumerate(parameters)},
        kernel=kernel,
    )
    made.param_groups[0]["weight_decay"] = decay
    return made


def parameter(*shape, dtype=torch.bfloat16, spread=0.02):
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter((torch.randn(*shape, generator=generator) * spread).to(dtype))


def gradients(like, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_first_step_of_float32_weights_is_torchs(scale):
    """The moments are rounded after the update has used them, so that only later steps differ."""
    ours, theirs = parameter(50, 30, dtype=torch.float32), parameter(50, 30, dtype=torch.float32)
    ours.grad, theirs.grad = gradients(ours, 0), gradients(ours, 0) / scale
    made = optimizer([ours], decay=0.1)
    made.grad_scale = torch.tensor(scale)
    made.step()
    torch.optim.AdamW([theirs], lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.1).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_the_mean_of_many_weights_follows_float64_where_plain_bfloat16_stands_still(rounding, bits):
    """30 steps of 1e-5 on weights of 1.0, whose last bit is 2^-8: rounded to the nearest, none would ever move."""
    count, steps, rate = 1 << 16, 30, 1e-5
    weights = torch.nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    plain = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    reference = torch.optim.AdamW([exact], lr=rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    nearest = torch.optim.AdamW([plain], lr=rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    made = optimizer([weights], rounding=rounding, bits=bits)
    made.param_groups[0]["lr"] = rate
    for _ in range(steps):
        for one in (weights, exact, plain):
            one.grad = torch.ones_like(one)
        made.step(), reference.step(), nearest.step()
    assert plain.tolist() == [1.0]
    moved = weights.detach().double().mean() - 1
    if rounding is Rounding.KAHAN:
        moved = moved + made.state[weights]["compensation"].double().mean()
    expected = exact.item() - 1
    # a weight is 1 or 1 - 2^-8: the standard error of the mean of `count` of them is 2^-8 sqrt(p / count), 4e-6
    assert float(moved) == pytest.approx(expected, abs=2e-5)
    assert expected == pytest.approx(-steps * rate, rel=1e-3)


@pytest.mark.parametrize("code", [codes.FIRST, codes.SECOND])
def test_codes_are_right_on_average_and_within_an_eighth(code):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator) * torch.logspace(-4, 0, 1000)
    values = values if code.signed else values.abs()
    decoded = []
    for seed in range(400):
        held, scales = codes.encode(code, values, random_bits(seed, 0, 1000, values.device) >> 12)
        decoded.append(codes.decode(code, held, scales))
    each = torch.stack(decoded)
    blocks = torch.arange(1000) // codes.BLOCK
    largest = torch.stack([values[blocks == block].abs().max() for block in range(4)])[blocks]
    smallest_normal = largest * 2.0 ** (2 - 2**code.exponent)
    step = torch.maximum(values.abs(), smallest_normal) / 8
    assert ((each - values).abs() <= 1.01 * step).all()
    # of 400 draws between two neighbours the mean has a standard error of at most a fortieth of their distance
    assert ((each.mean(0) - values).abs() <= 0.15 * step + 1e-12).float().mean() > 0.999
    assert (each[:, -1].sign() == values[-1].sign()).all()


def test_a_positive_second_moment_never_becomes_zero_and_nothing_stays_nothing():
    values = torch.zeros(2 * codes.BLOCK)
    values[0], values[1] = 1.0, 1e-20
    to_nearest = torch.full((len(values),), 1 << codes.DROPPED - 1, dtype=torch.int32)
    held, scales = codes.encode(codes.SECOND, values, to_nearest)
    decoded = codes.decode(codes.SECOND, held, scales)
    assert decoded[0] == pytest.approx(1.0)
    assert decoded[1] > 0
    assert not decoded[2:].any()
    signed, scales = codes.encode(codes.FIRST, -values, to_nearest)
    assert codes.decode(codes.FIRST, signed, scales)[0] == pytest.approx(-1.0)


def test_random_bits_are_even_and_differ_between_elements_and_seeds():
    bits = random_bits(5, 0, 1 << 16, torch.device("cpu"))
    ones = torch.stack([(bits >> place & 1).float().mean() for place in range(32)])
    assert (ones - 0.5).abs().max() < 0.01  # five standard errors of 65,536 coins
    assert len(bits.unique()) == len(bits)
    other = random_bits(6, 0, 1 << 16, torch.device("cpu"))
    assert ((bits ^ other) & 0xFFFF == 0).float().mean() < 1e-4
    assert torch.equal(bits[1000:1010], random_bits(5, 1000, 1010, torch.device("cpu")))


def test_rounding_up_is_as_likely_as_the_remainder_is_large():
    value = 1 + 2**-7 * 0.25
    rounded = round_stochastically(torch.full((1 << 16,), value), random_bits(3, 0, 1 << 16, torch.device("cpu")))
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.25, abs=0.01)


class Launched:
    """Stands for a card: remembers its launches."""

    def __init__(self):
        self.tables = []

    def __call__(self, table, chunks, update, numbers):
        self.tables.append((table, chunks, update, numbers))


def test_one_launch_updates_all_parameters_that_share_their_numbers():
    """Whatever the number of layers: a table of addresses, and chunks numbered through."""
    launched = Launched()
    parameters = [parameter(100, 300), parameter(7), parameter(3, 5, dtype=torch.float32), parameter(64, 64)]
    made = optimizer(parameters, bits=8, kernel=Kernel(launched, reaches_host=True))
    for one in parameters:
        one.grad = gradients(one, 0)
    made.step()
    coded, plain, wide = launched.tables
    table, chunks, update, numbers = coded
    assert [row[7:9].tolist() for row in table] == [[30000, 0], [4096, 2]]
    assert chunks == 2 + 1 == -(-30000 // CHUNK) + 1
    assert table[0, 0] == parameters[0].data_ptr()
    assert table[1, 1] == parameters[3].grad.data_ptr()
    assert table[0, 4] == 0, "stochastic rounding has no compensation"
    assert table[1, 6] == made.state[parameters[3]]["exp_avg_sq_scales"].data_ptr()
    assert (numbers.correction1, numbers.correction2) == (pytest.approx(0.1), pytest.approx(0.001))
    assert len({int(row[9]) for row in table}) == 2, "each has a seed of its own"
    assert update.first_scales is not None
    assert plain[2].first_scales is None
    assert wide[2].weight.dtype is torch.float32


def test_steps_that_the_device_skips_are_taken_out_of_the_counts():
    made = optimizer([one := parameter(8, 8)], kernel=Kernel(Launched(), reaches_host=True))
    one.grad = gradients(one, 0)
    for found in (0.0, 0.0, 1.0, 1.0):
        made.found_inf = torch.tensor(found)
        made.step()
    assert made.state[one]["step"] == 4
    for _ in range(2):
        made.take_back_skipped_steps()
        assert made.state[one]["step"] == 2


def test_without_a_kernel_a_step_that_is_not_finite_changes_nothing():
    made = optimizer([one := parameter(8, 8)])
    one.grad = gradients(one, 0)
    made.step()
    before = [one.clone(), *(value.clone() for value in made.state[one].values() if isinstance(value, torch.Tensor))]
    one.grad, made.found_inf = torch.full_like(one, torch.nan), torch.tensor(1.0)
    made.step()
    after = [one, *(value for value in made.state[one].values() if isinstance(value, torch.Tensor))]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert made.state[one]["step"] == 1
    one.grad, made.found_inf = gradients(one, 1), torch.tensor(0.0)
    made.step()
    assert not torch.equal(before[0], one)


def test_a_weight_whose_elements_lie_in_another_order_learns_the_same():
    plain, turned = parameter(20, 30), torch.nn.Parameter(parameter(20, 30).T.contiguous().T)
    assert not turned.is_contiguous()
    for one in (plain, turned):
        one.grad = gradients(plain, 0)
        optimizer([one]).step()
    assert torch.equal(plain, turned)


def test_the_kernel_computes_what_plain_torch_does():
    """On triton's interpreter, which cuts bfloat16 off where a card rounds: two last bits in three steps."""
    pytest.importorskip("triton", reason="there are wheels for Linux alone, and torch for the CPU brings none")
    command = [sys.executable, "-m", "tests.build.optimizers.interpreted_any_precision"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 6
    for case in cases:
        assert case["weights"] <= 2**-7, case
        assert case["states"] <= 2**-6, case
        assert case["codes_that_differ"] <= 0.002, case
        assert case["skipped"] is True, case


@pytest.mark.parametrize("name", ["anyprecision_adamw", "anyprecision_adamw_8bit"])
def test_a_plan_holds_the_states_to_the_byte_and_times_the_launch(name):
    """Bytes that cross the bus: of a weight 2 read and written, of its gradient 2 read, the moments read and written.
    The rehearsal has three steps."""
    settings = {"training": training(name), "model": {"torch_dtype_str": "bfloat16"}}
    built = tiny_assembly(tiny_config(WIDE, **settings))
    train_step(built, [unequal_rows()], 1)
    states = [value for state in built.optimizer.state.values() for value in state.values()]
    expected = sum(state.nbytes for state in states if isinstance(state, torch.Tensor))
    config: TrainingConfig = tiny_config(WIDE, **settings, gpu=H100.model_dump())
    rehearsal = record(config)
    count = sum(one.numel() for one in built.trained)
    assert sum(rehearsal.footprint.state_sizes) == expected
    launches = [operation for operation in rehearsal.trace.operations if operation.name == "anyprecision_adamw"]
    steps = {operation.phase for operation in launches}
    assert steps == {"optimizer_step"}
    assert sum(operation.bytes for operation in launches) == 3 * (6 * count + 2 * expected)


@pytest.mark.parametrize("name", ["anyprecision_adamw", "anyprecision_adamw_8bit"])
def test_gradients_are_clipped_as_they_are_read(name):
    """The gradients stay as they are, and the weights move as if those had been scaled down before."""
    clipped = tiny_assembly(tiny_config(WIDE, training=training(name, max_grad_norm=0.1), model=BF16))
    result = train_step(clipped, [unequal_rows()], 1)
    assert result.grad_norm > 0.5
    [scale] = {float(part.grad_scale) for part in [clipped.optimizer]}
    assert scale == pytest.approx(result.grad_norm / 0.1, rel=1e-4)
