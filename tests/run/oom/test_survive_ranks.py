"""Memory that runs out on one of two ranks (gloo, on the CPU) at any operator: both undo the step and make it again."""

import contextlib
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch

from framework.build.ranks import Ranks
from framework.cli import complain
from framework.errors import TunesmithError
from framework.memory.explain import explain
from framework.memory.planning import make_plan
from framework.run import evaluate, trainer
from framework.run.rehearsal.rehearse import record
from framework.run.setup import first_passes as trial
from framework.run.step import launch_step
from tests.run.oom.test_retry import MESSAGE, Failing
from tests.run.several import ended, start
from tests.run.test_trainer import config, corpus, final_weights, metrics, same, train  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
SHRINK = {"on_oom": "shrink", "per_device_train_batch_size": 4, "global_batch_size": 8, "weight_decay": 0.1}
STEPS = 3
LATER = 2
"""A step whose failures are undone up to its update."""
WHO = {"first": (0,), "second": (1,), "both": (0, 1)}


class FailingAlone(Failing):
    """Counts, and fails at, what a rank does by itself: not where ranks exchange something."""

    def __init__(self, points=()):
        super().__init__(points)
        self.is_meeting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_meeting or func.namespace == "c10d":
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def failing(step=None, point=0):
    """Have operator number `point` of a step fail on this rank. Yields the modes by step, which count them."""
    modes = {}
    check_in = Ranks.check_in

    def step_with(assembly, micro_batches, number, observe, before_update):
        mode = modes.setdefault(number, FailingAlone([point] if number == step else []))

        def process_group(ranks, has_failed=False):
            mode.is_meeting = True
            try:
                check_in(ranks, has_failed)
            finally:
                mode.is_meeting = False

        def note():
            mode.before_update = mode.seen
            before_update()

        Ranks.check_in = process_group
        try:
            with mode:
                return launch_step(assembly, micro_batches, number, observe, note)
        finally:
            Ranks.check_in = check_in

    trainer.launch_step = step_with
    try:
        yield modes
    finally:
        trainer.launch_step = launch_step


def settings(corpus, folder, **training):  # noqa: F811
    """A run of two ranks, with dropout."""
    made = config(corpus, folder, training={**SHRINK, "max_steps": STEPS, **training})
    return made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})


def points(modes, drawn):
    """The operator, step and rank of each failure: any of the first step, before the update of a later one."""
    first, later = modes[1], modes[LATER]
    return {
        "first step, its first operator": (1, 1, "second"),
        "first step, its last before the update": (1, first.before_update, "first"),
        "first step, drawn 1": (1, drawn.randrange(2, first.before_update), "first"),
        "first step, drawn 2": (1, drawn.randrange(2, first.before_update), "second"),
        "first step, drawn 3": (1, drawn.randrange(2, first.before_update), "both"),
        "update": (1, first.seen - 10, "second"),
        "update, drawn": (1, drawn.randrange(first.before_update, first.seen), "first"),
        "later step, begun": (LATER, 1, "both"),
        "later step, drawn 1": (LATER, drawn.randrange(2, later.before_update), "first"),
        "later step, drawn 2": (LATER, drawn.randrange(2, later.before_update), "second"),
    }


def runs_as_rank(corpus, folder):  # noqa: F811
    """All runs, in one process; what failed on this rank as JSON on stdout."""
    folder, rank = Path(folder), int(os.environ["RANK"])
    gc.freeze()  # else each step that is undone goes through all that was imported
    train(settings(corpus, folder / "two", per_device_train_batch_size=2))
    with failing() as modes:
        train(settings(corpus, folder / "counted"))
    drawn, record = random.Random(0), {}
    for name, (step, point, who) in points(modes, drawn).items():
        at = max(1, point - 5 * rank * (who == "both"))  # not at the same operator
        with failing(step if rank in WHO[who] else None, at) as failed:
            train(settings(corpus, folder / name))
        record[name] = [who, failed[step].failed]
    record |= elsewhere(corpus, folder, rank)
    train(one_row(corpus, folder / "ended"), resume=True)
    train(one_row(corpus, folder / "straight"))
    print(json.dumps(record))


def one_row(corpus, folder):  # noqa: F811
    """Nothing is left to halve."""
    return settings(corpus, folder, per_device_train_batch_size=1)


def ending_as_rank(corpus, folder):  # noqa: F811
    """Rank 1 runs out of memory in step 3, at one row."""
    with failing(3 if os.environ["RANK"] == "1" else None, 100):
        ending(one_row(corpus, Path(folder) / "ended"))


def sharded_as_rank(corpus, folder):  # noqa: F811
    """The same where ranks hold parts of the weights, so that rank 0 waits in the middle of the step."""
    made = settings(corpus, Path(folder) / "sharded", on_oom="stop", save_steps=1)
    fsdp = made.fsdp.model_copy(update={"enable_fsdp": True})
    with failing(3 if os.environ["RANK"] == "1" else None, 100):
        ending(made.model_copy(update={"fsdp": fsdp}))


def ending(made):
    """A run as the command ends it."""
    try:
        train(made)
    except TunesmithError as error:
        complain(str(error), False)
        sys.exit(error.exit_code)


def elsewhere(corpus, folder, rank):  # noqa: F811
    """Memory that runs out on rank 1 alone: in the trial, and in an evaluation."""
    trial_step, eval_step, sizes = trial.trial_step, evaluate.eval_step, []

    def tried(assembly, batches, observe):
        if rank == 1 and len(batches[0]["input_ids"]) > 2:
            raise torch.OutOfMemoryError(MESSAGE)
        trial_step(assembly, batches, observe)

    def evaluated(assembly, batch, observe):
        sizes.append(len(batch["input_ids"]))
        if rank == 1 and sizes[-1] > 1:
            observe("eval")
            raise torch.OutOfMemoryError(MESSAGE)
        return eval_step(assembly, batch, observe)

    trial.trial_step, evaluate.eval_step = tried, evaluated
    train(
        settings(corpus, folder / "elsewhere", per_device_eval_batch_size=2),
        planner=lambda made: make_plan(record(made)),
    )
    trial.trial_step, evaluate.eval_step = trial_step, eval_step
    return {"eval sizes": sizes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def gone(corpus, folder):  # noqa: F811
    return as_ranks("ending_as_rank", corpus, folder)


@pytest.fixture(scope="module")
def outcomes(corpus, folder, gone):  # noqa: F811
    """Who failed where, as both ranks say."""
    both = as_ranks("runs_as_rank", corpus, folder)
    assert [rank.code for rank in both] == [0, 0], both[0].err + both[1].err
    return [json.loads(rank.out) for rank in both]


def as_ranks(name, *arguments):
    script = f"import sys; from tests.run.oom.test_survive_ranks import {name}; {name}(*sys.argv[1:])"
    return ended(start(script, *map(str, arguments)))


def failed_as_intended(outcomes, beginning):
    """Names of the runs, after seeing that operators failed on the ranks that they were to fail on."""
    names = [name for name in outcomes[0] if name.startswith(beginning)]
    for name in names:
        who, _ = outcomes[0][name]
        assert [rank[name][1] for rank in outcomes] == [int(number in WHO[who]) for number in (0, 1)], name
    return names


@pytest.mark.slow
def test_a_first_step_undone_on_any_rank_is_bitwise_that_of_a_run_at_the_final_micro_batch(folder, outcomes):
    names, expected = failed_as_intended(outcomes, ("first", "update")), final_weights(folder / "two")
    assert len(names) == 7
    for name in names:
        assert same(final_weights(folder / name), expected), name
        assert metrics(folder / name) == metrics(folder / "two")
        assert set(metrics(folder / name, "per_device_train_batch_size").values()) == {2}


@pytest.mark.slow
def test_a_later_step_undone_half_way_is_bitwise_one_undone_before_it_began(folder, outcomes):
    begun, *names = failed_as_intended(outcomes, "later")
    assert len(names) == 2
    for name in names:
        assert same(final_weights(folder / name), final_weights(folder / begun)), name
        assert list(metrics(folder / name, "per_device_train_batch_size").values()) == [4, 2, 2]
    assert not same(final_weights(folder / begun), final_weights(folder / "two")), "dropout of step 1 was another"


@pytest.mark.slow
def test_the_repair_is_written(folder, outcomes):
    repairs = json.loads((folder / "update" / "memory.json").read_text())["repairs"]
    assert [(repair["before"], repair["after"], repair["phase"]) for repair in repairs] == [(4, 2, "optimizer_step")]
    explained = explain(folder / "update")
    assert explained.phase == "optimizer_step"
    assert [repair.after for repair in explained.circumstances.repairs] == [2]


@pytest.mark.slow
def test_the_trial_and_an_evaluation_come_again_on_both(folder, outcomes):
    assert same(final_weights(folder / "elsewhere"), final_weights(folder / "two"))
    assert outcomes[0]["eval sizes"][-1] == outcomes[1]["eval sizes"][-1] == 1
    plan = json.loads((folder / "elsewhere" / "plan.json").read_text())
    assert plan["batch"]["per_device"] == 2, "planned again, by the first rank for both"
    assert metrics(folder / "elsewhere", "eval_loss") == pytest.approx(metrics(folder / "two", "eval_loss"), rel=1e-5)


def test_at_one_row_all_save_and_one_speaks(folder, gone):
    assert [rank.code for rank in gone] == [4, 4], gone
    first, second = (rank.err for rank in gone)
    assert "memory ran out on rank 1 of 2" in first
    assert "nothing is left to halve: the micro-batch is 1 row (row [" in first
    assert "the state after step 2 is saved; continue with --resume" in first
    assert "overrides to paste" in first
    assert "memory" not in second
    [report] = (folder / "ended").glob("oom*.txt")  # named by its step once the run has gone on
    assert "step: 3\n" in report.read_text()


@pytest.mark.slow
def test_and_the_run_resumes_from_there(folder, outcomes):
    assert metrics(folder / "ended") == metrics(folder / "straight")
    assert same(final_weights(folder / "ended"), final_weights(folder / "straight"))


@pytest.mark.slow
def test_ranks_that_hold_parts_all_stop_and_say_so(corpus, folder):  # noqa: F811
    begun = time.monotonic()
    both = as_ranks("sharded_as_rank", corpus, folder)
    assert [rank.code for rank in both] == [4, 4], both
    assert time.monotonic() - begun < 200
    assert "rank 1 of 2" in both[1].err
    assert "the ranks communicate in every layer" in both[1].err
    assert "there is the checkpoint of step 2 to resume from" in both[1].err
    assert "on_oom=shrink" not in both[1].err
    assert "error" not in both[0].err
