"""Memory that runs out in a run with `training.on_oom: shrink`, at any operator of any phase."""

import dataclasses
import json
import random
from itertools import pairwise

import numpy
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed

from framework.build.assembly import assemble
from framework.build.data.batches import GlobalBatches
from framework.build.data.packing import on_device
from framework.build.levers import compiled
from framework.build.place import real_place
from framework.build.text.tokenizer import padding_id
from framework.errors import Interrupted, OutOfMemory
from framework.memory.cards import read_card
from framework.memory.explain import explain
from framework.memory.explain.causes import Repair
from framework.memory.planning import make_plan
from framework.memory.trace import Space
from framework.run import evaluate, trainer
from framework.run.inputs import read_inputs
from framework.run.oom.retry import next_size, shrunk
from framework.run.rehearsal.rehearse import record
from framework.run.step import launch_step, train_step
from framework.schema.config import Batch, TrainingConfig
from tests.grids import slow
from tests.run.test_trainer import config, corpus, final_weights, interrupt_after, metrics, same, train  # noqa: F401
from tests.tiny import GPT2, LLAMA, tiny_config

SHRINK = {"on_oom": "shrink", "per_device_train_batch_size": 4, "global_batch_size": 4, "weight_decay": 0.1}
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
MICRO = "training.per_device_train_batch_size"


class Failing(TorchDispatchMode):
    """Runs out of memory at operators number `points` of those that it sees."""

    def __init__(self, points=()):
        super().__init__()
        self.points, self.seen, self.failed, self.before_update = set(points), 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if self.seen in self.points:
            self.failed += 1
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **kwargs or {})


@pytest.fixture
def failing(monkeypatch):
    """Have operators fail in some steps: `failing({3: [17]})`; counted from 1 over all tries of a step. Returns the
    modes by step, which say how many operators there were."""

    def install(points):
        modes = {}

        def step_with(assembly, micro_batches, step, observe, before_update):
            mode = modes.setdefault(step, Failing(points.get(step, ())))

            def note():
                mode.before_update = mode.seen
                before_update()

            with mode:
                return launch_step(assembly, micro_batches, step, observe, note)

        monkeypatch.setattr(trainer, "launch_step", step_with)
        return modes

    return install


def run(corpus, folder, *, steps=3, training=None, **options):  # noqa: F811
    made = config(corpus, folder, training={**SHRINK, "max_steps": steps, **(training or {})}, **options)
    return train(made)


def weights_of(corpus, folder, micro, **options):  # noqa: F811
    """A run that starts at this micro-batch and never fails."""
    sizes = {"per_device_train_batch_size": micro, **options.pop("training", {})}
    run(corpus, folder, training=sizes, **options)
    return final_weights(folder)


POINTS = pytest.mark.parametrize("count", [2, slow(20)])


@pytest.mark.slow
@POINTS
def test_the_first_step_undone_at_random_operators_is_bitwise_that_of_a_run_at_the_final_micro_batch(
    count,
    corpus,  # noqa: F811
    tmp_path,
    failing,
):
    """Forward, loss, backward, clipping and the first update, with dropout: the same weights after three steps."""
    expected = weights_of(corpus, tmp_path / "two", 2)
    total = failing({})
    run(corpus, tmp_path / "counted")
    operators = total[1].seen
    points = random.Random(0).sample(range(1, operators + 1), count - 2)
    for point in [1, *points, operators - 30]:
        modes = failing({1: [point]})
        folder = tmp_path / f"at-{point}"
        run(corpus, folder)
        assert modes[1].failed == 1
        assert same(final_weights(folder), expected), f"operator {point} of {operators}"
        assert set(metrics(folder, "per_device_train_batch_size").values()) == {2}
        assert explain(folder).circumstances.repairs[0].after == 2


def test_halving_twice_ends_with_the_weights_of_a_run_at_one_row(corpus, tmp_path, failing):  # noqa: F811
    modes = failing({1: [40, 400]})
    run(corpus, tmp_path / "run")
    assert modes[1].failed == 2
    assert same(final_weights(tmp_path / "run"), weights_of(corpus, tmp_path / "one", 1))
    repairs = json.loads((tmp_path / "run" / "memory.json").read_text())["repairs"]
    assert [(repair["before"], repair["after"]) for repair in repairs] == [(4, 2), (2, 1)]


def switched(settings, at, micro):
    """Weights of an undisturbed run that continues with another micro-batch from step `at` on."""
    inputs = read_inputs(settings)
    made = inputs.config
    set_seed(made.training.seed)
    assembly = assemble(made, inputs.architecture, real_place(torch.device("cpu")), made.training.max_steps)
    smaller = Batch(micro, made.batch.global_size // micro, 1)
    for step in range(1, made.training.max_steps + 1):
        batch = made.batch if step < at else smaller
        batches = GlobalBatches(inputs.data.train, batch, made.training.seed, padding_id(inputs.tokenizer))
        micro_batches = [on_device(torch.device("cpu"), item) for item in next(batches.start(step - 1))]
        train_step(assembly, micro_batches, step)
    return {name: tensor.detach() for name, tensor in assembly.model.state_dict().items()}


@POINTS
def test_undone_at_random_operators_of_any_step_the_run_is_bitwise_one_switched_between_two_steps(
    count,
    corpus,  # noqa: F811
    tmp_path,
    failing,
):
    """Steps before the failure used the larger micro-batch, with other sums of floats and other dropout: the run is
    bitwise equal to one without a failure that changes its micro-batch before that step."""
    steps, drawn = 8 if count > 3 else 5, random.Random(1)
    counted = failing({})
    run(corpus, tmp_path / "counted", steps=steps)
    references = {}
    for number in range(count):
        step = drawn.randrange(2, steps + 1)
        modes = failing({step: [drawn.randrange(1, counted[step].before_update)]})
        folder = tmp_path / f"run-{number}"
        run(corpus, folder, steps=steps)
        assert modes[step].failed == 1
        if step not in references:
            settings = config(corpus, tmp_path / "unused", training={**SHRINK, "max_steps": steps})
            references[step] = switched(settings, step, 2)
        found = final_weights(folder)
        assert all(torch.equal(found[name], references[step][name]) for name in found)
        assert list(metrics(folder)) == list(range(1, steps + 1))


def test_without_dropout_a_later_failure_ends_close_to_a_run_at_the_final_micro_batch(
    corpus,  # noqa: F811
    tmp_path,
    failing,
):
    plain = {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    settings = {"optimizer": "sgd", "learning_rate": 0.1}
    failing({4: [100]})
    run(corpus, tmp_path / "run", steps=6, training=settings, architecture=plain)
    failing({})
    expected = weights_of(corpus, tmp_path / "two", 2, steps=6, training=settings, architecture=plain)
    for name, tensor in final_weights(tmp_path / "run").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


OPTIMIZERS = ["adamw_torch_fused", "galore_adamw"]
OPTIMIZERS += map(
    slow,
    [
        "muon",
        "anyprecision_adamw_8bit",
        "sgd",
        "adafactor",
        "lion",
        "sophia",
        "schedule_free_adamw",
        "anyprecision_adamw",
    ],
)
OPTIMIZERS += map(slow, ["apollo_adamw", "adamw_8bit"])
LOW_RANK = {"projection_rank": 4}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_update_of_every_optimizer_is_undone(optimizer, corpus, tmp_path, failing):  # noqa: F811
    """Failed at its last operators: some weights had changed and states were made."""
    more = {"sgd": {"sgd_momentum": 0.9}, "galore_adamw": LOW_RANK, "apollo_adamw": LOW_RANK}
    settings = {"optimizer": optimizer, **more.get(optimizer, {})}
    counted = failing({})
    expected = weights_of(corpus, tmp_path / "two", 2, steps=2, training=settings)
    counted = failing({})
    run(corpus, tmp_path / "counted", steps=1, training=settings)
    modes = failing({1: [counted[1].seen - 2]})
    run(corpus, tmp_path / "run", steps=2, training=settings)
    assert modes[1].failed == 1
    assert explain(tmp_path / "run").phase == "optimizer_step"
    assert same(final_weights(tmp_path / "run"), expected)


def test_a_later_update_cannot_be_undone_and_says_so(corpus, tmp_path, failing):  # noqa: F811
    counted = failing({})
    run(corpus, tmp_path / "counted", steps=3)
    failing({3: [counted[3].seen - 2]})
    with pytest.raises(OutOfMemory, match="an update in progress cannot be undone") as raised:
        run(corpus, tmp_path / "run", steps=3, training={"save_steps": 2})
    assert "the checkpoint of step 2 to resume from" in str(raised.value)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    failing({})
    made = config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 3, "save_steps": 2})
    train(made, resume=True)
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "counted"))


def test_at_one_row_the_state_is_saved_and_the_row_is_named(corpus, tmp_path, failing):  # noqa: F811
    one = {"per_device_train_batch_size": 1, "save_total_limit": 9}
    failing({3: [100]})
    with pytest.raises(OutOfMemory) as raised:
        run(corpus, tmp_path / "run", steps=4, training=one)
    message = str(raised.value)
    assert raised.value.exit_code == 4
    assert "nothing is left to halve: the micro-batch is 1 row (row [" in message
    assert "the longest of all has" in message
    assert "the state after step 2 is saved; continue with --resume" in message
    assert "overrides to paste" in message
    failing({})
    made = config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 4, **one})
    train(made, resume=True)
    run(corpus, tmp_path / "straight", steps=4, training=one)
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_stop_undoes_the_step_and_saves(corpus, tmp_path, failing):  # noqa: F811
    stop = {"on_oom": "stop"}
    failing({3: [100]})
    with pytest.raises(OutOfMemory, match="the state after step 2 is saved") as raised:
        run(corpus, tmp_path / "run", steps=4, training=stop)
    assert "training.on_oom=shrink would halve the micro-batch" in str(raised.value)
    failing({})
    train(config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 4, **stop}), resume=True)
    run(corpus, tmp_path / "straight", steps=4)
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


LEVERS = {
    "fp16": {"training": {"mixed_precision_dtype": "fp16"}},
    "checkpoints": {"training": {"mixed_precision_dtype": "bf16", "enable_gradient_checkpointing": True}},
    "packing": {"data": {"packing": True, "eval_fraction": 0.03}},
    "padding_free": {"data": {"padding_free": True, "eval_fraction": 0.03}, "model": {"attn_implementation": "eager"}},
    "workers": {"data": {"workers": 2, "group_by_length": True, "eval_fraction": 0.03}},
    "states": {"training": {"optimizer_offload": "host"}},
    "activations": {"training": {"activation_offload": True}, "model": {"model_max_length": 128}},
    "lora": {"training": {"use_peft": True}, "peft": {"lora_r": 4, "lora_dropout": 0.1}},
    "streamed": {"training": {"use_peft": True}, "peft": {"lora_r": 4}, "model": {"offload_frozen_base": True}},
}
SHARES = {"forward": 0.1, "backward": 0.5, "update": 0.97}
QUICK = [("packing", "backward"), ("streamed", "update")]


@pytest.mark.parametrize(
    ("lever", "at"),
    [*QUICK, *(slow(lever, at) for lever in LEVERS for at in SHARES if (lever, at) not in QUICK)],
)
def test_levers_compose_with_it(lever, at, corpus, tmp_path, failing):  # noqa: F811
    """In forward, in backward and in the update."""
    options = {**LEVERS[lever], "architecture": {**GPT2, **({"n_embd": 256} if lever == "activations" else {})}}
    counted = failing({})
    run(corpus, tmp_path / "counted", steps=1, **options)
    seen = counted[1].seen
    failing({})
    expected = _weights(tmp_path / "two", corpus, 2, options)
    modes = failing({1: [int(seen * SHARES[at])]})
    found = _weights(tmp_path / "failed", corpus, 4, options)
    assert modes[1].failed == 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert metrics(tmp_path / "failed") == metrics(tmp_path / "two")


def _weights(folder, corpus, micro, options):  # noqa: F811
    training = {**options.get("training", {}), "per_device_train_batch_size": micro}
    run(corpus, folder, **{**options, "steps": 2, "training": training})
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return load_file(checkpoint / "model.safetensors")


def test_a_resumed_run_keeps_the_size_and_the_trained_weights(corpus, tmp_path, failing, monkeypatch):  # noqa: F811
    failing({2: [100]})
    run(corpus, tmp_path / "straight", steps=5)
    failing({2: [100]})
    with monkeypatch.context() as patched:
        interrupt_after(3, patched)
        with pytest.raises(Interrupted):
            run(corpus, tmp_path / "run", steps=5)
    modes = failing({})
    train(config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 5}), resume=True)
    assert set(modes) == {4, 5}
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert list(metrics(tmp_path / "run", "per_device_train_batch_size").values()) == [4, 2, 2, 2, 2]
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_the_folder_of_a_shrunk_run_trains_again_as_it_ended(corpus, tmp_path, failing):  # noqa: F811
    failing({1: [100]})
    run(corpus, tmp_path / "run")
    written = TrainingConfig.model_validate(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    assert (written.batch.per_device, written.batch.accumulation) == (2, 2)


def test_an_evaluation_that_runs_out_comes_again_with_fewer_rows(corpus, tmp_path, monkeypatch):  # noqa: F811
    original, sizes = evaluate.eval_step, []

    def eval_step(assembly, batch, observe):
        sizes.append(len(batch["input_ids"]))
        if len(batch["input_ids"]) > 2:
            observe("eval")
            raise torch.OutOfMemoryError(MESSAGE)
        return original(assembly, batch, observe)

    run(corpus, tmp_path / "plain")
    monkeypatch.setattr(evaluate, "eval_step", eval_step)
    run(corpus, tmp_path / "run", training={"per_device_eval_batch_size": 4})
    assert max(sizes) == 4
    assert sizes.count(4) == 1
    assert metrics(tmp_path / "run", "eval_loss") == pytest.approx(metrics(tmp_path / "plain", "eval_loss"), rel=1e-5)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert explain(tmp_path / "run").phase == "eval"


def test_another_error_is_no_reason_to_shrink(corpus, tmp_path, monkeypatch):  # noqa: F811
    def fail(*_):
        raise ValueError("mine")

    monkeypatch.setattr(trainer, "launch_step", fail)
    with pytest.raises(ValueError, match="mine"):
        run(corpus, tmp_path / "run")


@pytest.mark.parametrize(
    ("micro", "accumulation", "expected"),
    [(8, 1, [4, 2, 1]), (6, 1, [3, 1]), (6, 2, [3, 1]), (8, 3, [4, 2, 1]), (5, 1, [1]), (5, 2, [2, 1]), (1, 4, [])],
)
def test_sizes_go_down_so_that_they_divide_the_global_batch(micro, accumulation, expected):
    made = tiny_config(
        training={
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "global_batch_size": None,
        }
    )
    found = []
    while (size := next_size(made, MICRO)) is not None:
        made = shrunk(made, Repair(MICRO, made.batch.per_device, size, 1, "forward"))
        assert made.batch.global_size == micro * accumulation
        found.append(size)
    assert found == expected


def test_every_generator_goes_back(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Random numbers that an attempt has drawn from torch, Python and numpy are drawn again by the next."""
    drawn, original = [], launch_step

    def step_with(*args):
        drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
        if len(drawn) == 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return original(*args)

    monkeypatch.setattr(trainer, "launch_step", step_with)
    run(corpus, tmp_path / "run", steps=1)
    assert drawn[0] == drawn[1]


def test_what_a_run_over_the_card_does_is_up_to_on_oom(corpus, tmp_path, capsys):  # noqa: F811
    """Refused with `stop` (tests/run/test_trainer.py); tried with `shrink`, with a warning."""
    settings = config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 1})
    plan = make_plan(record(settings))
    small = dataclasses.replace(plan, device=dataclasses.replace(plan.device, name="toaster", usable_bytes=1000))
    train(settings, planner=lambda _: small, quiet=False)
    assert "toaster has 0.00 GiB usable" in (output := capsys.readouterr().err)
    assert "training.on_oom=shrink tries it anyway" in output
    assert metrics(tmp_path / "run")


def test_a_run_that_has_shrunk_is_planned_again(corpus, tmp_path, failing):  # noqa: F811
    """So that memory.json compares like with like."""
    planned = []

    def planner(settings):
        planned.append(settings.batch.per_device)
        return make_plan(record(settings))

    failing({1: [100], 2: [100]})
    train(config(corpus, tmp_path / "run", training={**SHRINK, "max_steps": 3}), planner=planner)
    assert planned == [4, 2, 1]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["batch"]["per_device"] == 1
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert [repair["step"] for repair in memory["repairs"]] == [1, 2]
    explained = explain(tmp_path / "run").to_json()
    assert explained["repairs"] == memory["repairs"]


def test_the_way_back_is_in_the_plan():
    """The weights, float32, are in host memory during the first update; on the cpu that is the one memory."""
    for name in ("h100_80gb", "cpu"):
        card = read_card(name)
        stop, shrink = (record(tiny_config(gpu=card, training={"on_oom": word})) for word in ("stop", "shrink"))
        weights = 4 * stop.footprint.trainable_parameters
        space = Space.DEVICE if name == "cpu" else Space.HOST
        assert most(shrink, space, "optimizer_step") - most(stop, space, "optimizer_step") == weights
        if name != "cpu":
            assert most(shrink, Space.DEVICE, "optimizer_step") == most(stop, Space.DEVICE, "optimizer_step")


def most(rehearsal, space, phase):
    """Most bytes at once of a space in the first occurrence of a phase."""
    trace = rehearsal.trace
    bounds = [(mark.event, after.event) for mark, after in pairwise(trace.marks) if mark.phase == phase]
    held, peak = 0, 0
    for position, event in enumerate(trace.events):
        block = event if event >= 0 else ~event
        if trace.spaces[block] is space:
            held += trace.sizes[block] if event >= 0 else -trace.sizes[block]
        if bounds[0][0] <= position < bounds[0][1]:
            peak = max(peak, held)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("phase", [slow("loss"), "backward", slow("optimizer_step")])
def test_compiled_blocks_run_the_smaller_shape(phase, corpus, tmp_path, monkeypatch):  # noqa: F811
    """Compiled for it anew; the same losses and weights as a run that starts there."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "lower", aot_eager)
    options = {"architecture": {**LLAMA}, "training": {"compile": True}, "data": {"packing": True}}
    expected = _weights(tmp_path / "two", corpus, 2, options)
    failures = []

    def step_with(assembly, micro_batches, step, observe, before_update):
        def watch(name):
            observe(name)
            if name == phase and not failures:
                failures.append(name)
                raise torch.OutOfMemoryError(MESSAGE)

        return launch_step(assembly, micro_batches, step, watch, before_update)

    monkeypatch.setattr(trainer, "launch_step", step_with)
    found = _weights(tmp_path / "run", corpus, 4, options)
    assert failures == [phase]
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "two")
