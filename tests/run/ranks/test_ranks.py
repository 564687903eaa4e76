"""Two processes on the CPU (gloo) train one model together: the same as one process on its own."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from framework.build.data.batches import GlobalBatches, eval_batches, shares
from framework.build.data.rows import Rows
from framework.build.loading.model import read_architecture
from framework.build.verify import verify
from framework.errors import NonFinite, TunesmithError
from framework.run import session as session_module
from framework.run.checkpoints import saver as saving
from framework.run.checkpoints.checkpoint import checkpoints
from framework.run.evaluate import evaluate
from framework.run.ranks import coordinator as coordinator
from framework.run.step import train_step
from tests.grids import slow
from tests.run.several import ROOT, ended, start
from tests.run.test_trainer import config, corpus, metrics, same, train  # noqa: F401
from tests.tiny import LLAMA, tiny_assembly, tiny_config, unequal_rows

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
STEPS, ROWS = 4, 19
CASES = {
    "full": {},
    "chunked": {"model": {"chunked_loss": 16}},
    "adapter": {
        "training": {"use_peft": True, "enable_gradient_checkpointing": True},
        "model": {"freeze_layers": ["model.embed_tokens"]},
    },
    "bf16": {"training": {"mixed_precision_dtype": "bf16"}},
    "fp16": {"training": {"mixed_precision_dtype": "fp16"}},
    "after backward": {"training": {"on_oom": "shrink"}},
    "adapter after backward": {
        "training": {"on_oom": "shrink", "mixed_precision_dtype": "fp16", "use_peft": True},
        "model": {"freeze_layers": ["model.embed_tokens"]},
    },
}


def rows_of_many_lengths() -> Rows:
    """19 rows: with 8 a step the last step of an epoch has 3, so that some rank runs out."""
    lengths = [4 + 7 * index % 29 for index in range(ROWS)]
    tokens = (np.arange(sum(lengths)) * 37 % 128).astype(np.int32)
    return Rows(tokens, tokens.copy(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def curve(case: str, per_device: int, world: int = 1, assemble=tiny_assembly) -> dict:
    """Losses, norms, counts and evaluation of some steps on this rank, and a sum over its weights."""
    sections = json.loads(json.dumps(CASES[case]))
    sizes = {"per_device_train_batch_size": per_device, "global_batch_size": 8}
    sections["training"] = {**sections.get("training", {}), **sizes}
    made = tiny_config(LLAMA, gpu={"count": world}, **sections)
    assembly = assemble(made)
    verify(assembly)  # its forward passes must not be taken by DDP for the first half of a step
    rank = assembly.ranks.rank
    batches = GlobalBatches(rows_of_many_lengths(), made.batch, seed=0, pad_token_id=0, rank=rank).start(0)
    results = [dataclasses.asdict(train_step(assembly, next(batches), step)) for step in range(1, STEPS + 1)]
    rows = rows_of_many_lengths()
    found = evaluate(assembly, eval_batches(rows, 2, 0, rank, assembly.ranks.world), lambda phase: None)
    names = [name for name, _ in assembly.model.named_parameters()]
    total = float(sum(parameter.detach().double().abs().sum() for parameter in assembly.model.parameters()))
    return {"steps": results, "eval": found, "names": names, "weights": total}


def curves_as_rank(*cases: str) -> None:
    """Entry point of each of two ranks: runs the cases and prints their results as JSON."""
    from framework.build.assembly import assemble
    from framework.build.place import real_place
    from framework.run.ranks.coordinator import process_group

    with process_group() as coordinator:
        coordinator.start(tiny_config(LLAMA))

        def together(made):
            torch.manual_seed(made.training.seed)
            cpu = real_place(torch.device("cpu"))
            return assemble(made, read_architecture(made), cpu, 10, coordinator.ranks)

        print(json.dumps({**{case: curve(case, 2, 2, together) for case in cases}, "nan": poisoned(together)}))


def poisoned(assemble) -> str:
    """The error of a step whose loss is not a number only on rank 1."""
    assembly = assemble(tiny_config(LLAMA, training={"per_device_train_batch_size": 4}, gpu={"count": 2}))

    def spoilt(model, batch, observe):
        return assembly.objective(model, batch, observe) * (torch.nan if assembly.ranks.rank == 1 else 1.0)

    spoiling = dataclasses.replace(assembly, objective=Spoilt(assembly.objective, spoilt))
    with pytest.raises(NonFinite) as caught:
        train_step(spoiling, [unequal_rows(4)], 1)
    return str(caught.value)


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """An objective with another loss."""

    objective: object
    loss: object

    def __call__(self, *arguments):
        return self.loss(*arguments)

    def __getattr__(self, name):
        return getattr(self.objective, name)


QUICK = ("full", "chunked", "after backward", "adapter after backward")


@pytest.mark.parametrize("cases", [QUICK, slow(tuple(case for case in CASES if case not in QUICK))], ids=str)
def test_two_ranks_learn_what_one_does(cases):
    """Losses, norms, counts and evaluation are of the whole global batch, and equal on both ranks; with a last step of
    an epoch in which one rank has nothing to do, accumulation, adapters, checkpoints and half precision."""
    both = ended(start(f"from tests.run.ranks.test_ranks import curves_as_rank; curves_as_rank(*{cases!r})"))
    assert [rank.code for rank in both] == [0, 0], both[0].err + both[1].err
    first, second = (json.loads(rank.out) for rank in both)
    assert first == second
    assert first.pop("nan").startswith("step 1: loss nan")
    for case, found in first.items():
        alone = curve(case, 4)
        exact = 2e-3 if "mixed_precision_dtype" in CASES[case].get("training", {}) else 1e-5
        assert found["names"] == alone["names"]
        for key in ("loss", "grad_norm", "learning_rate"):
            values = [step[key] for step in found["steps"]]
            assert values == pytest.approx([step[key] for step in alone["steps"]], rel=exact), (case, key)
        assert [step["terms"] for step in found["steps"]] == [step["terms"] for step in alone["steps"]]
        assert found["eval"]["eval_loss"] == pytest.approx(alone["eval"]["eval_loss"], rel=exact)
        assert found["weights"] == pytest.approx(alone["weights"], rel=exact)


@pytest.mark.parametrize(("per_device", "world"), [(8, 1), (4, 2), (2, 4), (1, 8), (2, 1)])
def test_a_step_has_the_same_rows_however_many_share_it(per_device, world):
    """1x8, 2x4, 4x2 and 8x1 see the same rows in the same order; counts agree on every rank."""
    order = list(range(100, 119))
    for start_at in range(0, len(order), 8):
        step = order[start_at : start_at + 8]
        of_ranks = [shares(step, per_device, world, rank) for rank in range(world)]
        assert len({len(made) for made in of_ranks}) == 1
        counted = [row for micro in zip(*of_ranks, strict=True) for rows, counts in micro if counts for row in rows]
        assert counted == step


def plain(corpus, folder, world, **training):  # noqa: F811
    """A run without dropout, so that it does not matter which rank a row is on."""
    made = config(corpus, folder, architecture=LLAMA, training={"save_steps": 6, **training})
    return made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": world})})


def dropping(corpus, folder):  # noqa: F811
    """A run with dropout on two ranks."""
    made = config(corpus, folder, training={"per_device_train_batch_size": 1})
    return made.model_copy(update={"gpu": made.gpu.model_copy(update={"count": 2})})


def runs_as_rank(corpus, folder) -> None:  # noqa: F811
    """Whole runs; the last is ended by a signal to rank 1 only, during step 5."""
    folder, rank = Path(folder), int(os.environ["RANK"])
    train(plain(corpus, folder / "plain", 2))
    train(dropping(corpus, folder / "straight"))
    original = session_module.Session._log

    def log(self, *arguments):
        original(self, *arguments)
        if self.step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    session_module.Session._log = log
    train(dropping(corpus, folder / "run"))


def resumed_as_rank(corpus, folder) -> None:  # noqa: F811
    """Go on, with a rank 0 that takes longer over its saves than a collective may last."""
    coordinator.COLLECTIVE = coordinator.timedelta(seconds=10)
    original = saving.save_checkpoint

    def slow(*arguments):
        time.sleep(12)
        return original(*arguments)

    saving.save_checkpoint = slow
    train(dropping(corpus, Path(folder) / "run"), resume=True)


def failing_as_rank(corpus, folder) -> None:  # noqa: F811
    """Rank 1 runs out of memory in step 8, in the middle of which rank 0 waits for it."""
    from framework.cli import complain
    from framework.errors import TunesmithError
    from framework.run import trainer

    original = trainer.launch_step

    def step_with(assembly, micro_batches, step, *others):
        if step == 8 and assembly.ranks.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(assembly, micro_batches, step, *others)

    trainer.launch_step = step_with
    try:
        train(plain(corpus, Path(folder) / "failing", 2))
    except TunesmithError as error:
        complain(str(error), False)
        sys.exit(error.exit_code)


def as_ranks(name, *arguments):
    script = f"import sys; from tests.run.ranks.test_ranks import {name}; {name}(*sys.argv[1:])"
    return ended(start(script, *map(str, arguments)))


@pytest.mark.slow
def test_runs_are_saved_stopped_and_resumed_together(corpus, tmp_path):  # noqa: F811
    """A signal to any rank saves and ends all; resumed on as many ranks a run is the same bit for bit, on one rank the
    same but for rounding, with the same global batch."""
    both = as_ranks("runs_as_rank", corpus, tmp_path)
    assert "after step 5" in both[0].err, both
    assert both[1].code == 130
    assert len(metrics(tmp_path / "run")) == 5
    again = as_ranks("resumed_as_rank", corpus, tmp_path)
    assert [rank.code for rank in again] == [0, 0], again
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    alone = tmp_path / "alone"
    train(plain(corpus, alone, 1))
    assert list(metrics(tmp_path / "plain").values()) == pytest.approx(list(metrics(alone).values()), rel=1e-5)
    (tmp_path / "plain" / "checkpoints" / "step-00000012").rename(tmp_path / "aside")
    train(plain(corpus, tmp_path / "plain", 1), resume=True)
    assert list(metrics(tmp_path / "plain").values()) == pytest.approx(list(metrics(alone).values()), rel=1e-5)
    assert (alone / "final" / "model.safetensors").stat().st_size == (
        tmp_path / "plain" / "final" / "model.safetensors"
    ).stat().st_size


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_is_the_one_that_speaks(corpus, tmp_path):  # noqa: F811
    begun = time.monotonic()
    both = as_ranks("failing_as_rank", corpus, tmp_path)
    assert [rank.code for rank in both] == [4, 4], both
    assert time.monotonic() - begun < 200
    assert "rank 1 of 2" in both[1].err
    assert "2.00 GiB" in both[1].err
    assert "error" not in both[0].err
    assert (tmp_path / "failing" / "checkpoints" / "step-00000006").exists()


OTHER_ROWS = """
import os, sys
from pathlib import Path
from tests.run.ranks.test_ranks import plain
from tests.run.test_trainer import train
rows = [{"text": f"row {number} of this rank"} for number in range(20 if os.environ["RANK"] == "0" else 13)]
made = plain(None, Path(sys.argv[1]), 2)
made = made.model_copy(update={"data": made.data.model_copy(update={"train": (), "eval_fraction": 0.0})})
train(made, train_rows=rows)
"""


@pytest.mark.slow
def test_the_reason_of_ranks_that_read_other_rows_reaches_the_user_under_torchrun(tmp_path):
    """torchrun ends a rank as soon as another has ended: its message must be printed before."""
    script = tmp_path / "script.py"
    script.write_text(OTHER_ROWS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "run")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert re.search("rank 0: .*20 rows for training", done.stderr), done.stderr
    assert re.search("rank 1: .*13 rows for training", done.stderr), done.stderr


def elsewhere_as_rank(corpus, folder):  # noqa: F811
    """Entry point of each of two sharded ranks with a disk that is full for rank 1, and for the export."""
    from safetensors.torch import save_file

    from framework.run.checkpoints import sharded, sharded_export
    from framework.schema.config import TrainingConfig

    run, rank, written = Path(folder) / "run", int(os.environ["RANK"]), sharded.save_verified

    def full(write, of_rank, after):
        calls = itertools.count(1)

        def write_unless_full(*arguments, **options):
            if rank == of_rank and next(calls) > after and any(str(run) in str(argument) for argument in arguments):
                raise OSError(28, "No space left on device")
            return write(*arguments, **options)

        return write_unless_full

    made = plain(Path(corpus), run, 2).model_dump()
    training = {**made["training"], "save_steps": 5, "fallback_dir": str(Path(folder) / "other")}
    made = TrainingConfig.model_validate({**made, "training": training, "fsdp": {"enable_fsdp": True}})
    sharded.save_verified = full(written, 1, 1)  # once before the first step, where it is tried
    sharded_export.save_file = full(save_file, 0, 0)
    try:
        train(made, quiet=False)
    except TunesmithError as error:
        print(error)
        sys.exit(error.exit_code)


@pytest.mark.slow
def test_shards_and_a_sharded_export_go_to_the_fallback_if_a_rank_has_no_space(corpus, tmp_path):  # noqa: F811
    both = as_ranks("elsewhere_as_rank", corpus, tmp_path)
    assert [rank.code for rank in both] == [4, 4], both
    (kept,) = (tmp_path / "other").iterdir()
    assert [path.name for path in checkpoints(kept)] == ["step-00000010", "step-00000012"], both
    assert both[0].err.count("No space left on device") >= 3
    assert f"The checkpoint is {kept / 'checkpoints' / 'step-00000010'}" in both[0].err
    assert f"The export is {kept / 'final'}" in both[0].out
    train(plain(corpus, tmp_path / "run", 1, save_steps=5, fallback_dir=str(tmp_path / "other")), resume=True)
    saved = load_file(kept / "final" / "model.safetensors")
    again = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert same(saved, again)
    assert not list((tmp_path / "run").glob("checkpoints/*")), "nor a half one"
