"""The checkpoint of the last step is written while the run evaluates and exports, where that is safe."""

import threading
import weakref

import pytest
import torch

from framework.errors import SaveFailed
from framework.memory.cards import read_card
from framework.memory.host_use import HOST_BASE_BYTES
from framework.run import trainer
from framework.run.checkpoints import checkpoint, saver
from framework.run.checkpoints.checkpoint import save_checkpoint
from framework.run.checkpoints.read_back import save_verified
from framework.run.rehearsal.rehearse import rehearse
from framework.schema.gpu import GPUParams
from tests.run.test_trainer import config, corpus, train  # noqa: F401
from tests.tiny import LLAMA

WAIT = {"seconds": 0.3}
"""Seconds that a save waits for the export to begin."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of beginnings and ends: a save takes until the export has begun, or it has waited."""
    seen, exporting = list[str](), threading.Event()
    export, evaluate = trainer.export, trainer.Session.evaluate

    def slow(*arguments, **options):
        seen.append("save")
        exporting.wait(WAIT["seconds"])
        path = save_checkpoint(*arguments, **options)
        seen.append("saved")
        return path

    def exported(*arguments, **options):
        seen.append("export")
        exporting.set()
        return export(*arguments, **options)

    def evaluated(session):
        seen.append("evaluate")
        return evaluate(session)

    monkeypatch.setattr(saver, "save_checkpoint", slow)
    monkeypatch.setattr(trainer, "export", exported)
    monkeypatch.setattr(trainer.Session, "evaluate", evaluated)
    return seen


PLAIN = {"max_steps": 2, "optimizer": "adamw_torch"}


def test_it_is_written_while_the_run_ends(corpus, tmp_path, order, monkeypatch):  # noqa: F811
    monkeypatch.setitem(WAIT, "seconds", 200.0)
    train(config(corpus, tmp_path / "run", training=PLAIN))
    assert order[0] == "evaluate"
    assert order.index("save") < order.index("export") < order.index("saved")
    assert (tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json").exists()
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.mark.parametrize(
    ("training", "model", "before"),
    [
        ({"optimizer": "schedule_free_adamw"}, {}, "evaluate"),  # which evaluates an average
        ({"optimizer": "adamw_torch"}, {"architecture": "in bfloat16"}, "export"),  # which casts
    ],
)
def test_it_is_done_before_what_changes_the_weights(corpus, tmp_path, order, training, model, before):  # noqa: F811
    asked = config(corpus, tmp_path / "run", training={**PLAIN, **training})
    if model:
        written = {**asked.model.architecture.thaw(), "dtype": "bfloat16"}
        asked = asked.model_copy(update={"model": type(asked.model)(**{**dict(asked.model), "architecture": written})})
    train(asked)
    last = len(order) - 1 - order[::-1].index(before)
    assert order.index("saved") < last, order


@pytest.mark.parametrize("room", ["memory", "disk"])
def test_it_is_done_first_if_memory_is_short(corpus, tmp_path, order, monkeypatch, room):  # noqa: F811
    if room == "memory":
        monkeypatch.setattr(saver, "available_host_bytes", lambda: 1000)
    else:
        usage = saver.shutil.disk_usage
        monkeypatch.setattr(saver.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    train(config(corpus, tmp_path / "run", training=PLAIN))
    assert order[-2:] == ["evaluate", "export"]
    assert order.index("saved") < len(order) - 2


def test_one_that_fails_meanwhile_is_reported_with_the_export_that_there_is(corpus, tmp_path, monkeypatch):  # noqa: F811
    def failing(*arguments, **options):
        raise SaveFailed("the disk is on fire.")

    monkeypatch.setattr(saver, "save_checkpoint", failing)
    with pytest.raises(SaveFailed) as raised:
        train(config(corpus, tmp_path / "run", training=PLAIN))
    final = tmp_path / "run" / "final"
    assert str(raised.value) == (
        f"the disk is on fire.\nThe weights after step 2 are exported: {final}; there is no checkpoint to resume from"
    )
    assert (final / "config.json").exists()


@pytest.mark.parametrize(
    ("training", "model", "is_at_once"),
    [
        ({}, {}, True),
        ({"ema_decay": 0.5}, {}, False),  # another set of weights takes the place of the trained ones
        ({}, {"architecture": {**LLAMA, "dtype": "bfloat16"}, "torch_dtype_str": "float32"}, False),  # cast in place
    ],
)
def test_the_sample_is_written_during_an_export_that_leaves_the_model(
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
    training,
    model,
    is_at_once,
):
    exporting, seen, export = threading.Event(), [], trainer.export
    monkeypatch.setattr(trainer, "export", lambda *given: exporting.set() or export(*given))
    monkeypatch.setattr(trainer, "_sample", lambda _: seen.append(exporting.wait(10 if is_at_once else 0.1)))
    train(config(corpus, tmp_path / "run", training={**PLAIN, **training}, model=model))
    assert seen == [is_at_once]
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_what_it_holds_on_a_host_at_a_time_is_planned(corpus, tmp_path, monkeypatch):  # noqa: F811
    """As on a card, where files are written from copies: those of both files and of the export, counted in the run."""
    held, most, configs = [0], [0], []
    copied, exporting, export = threading.Semaphore(0), threading.Event(), trainer.export

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().clone()
        held[0] += made.nbytes
        weakref.finalize(made, lambda size=made.nbytes: held.__setitem__(0, held[0] - size))
        most[0] = max(most[0], held[0])
        return made

    def save(file, tensors, *given):
        copied.release()
        exporting.wait(60)
        save_verified(file, {**tensors}, *given)

    def exported(assembly, *given):
        assert all(copied.acquire(timeout=60) for _ in ("model", "optimizer"))
        configs.append(assembly.config)
        whole = [copy(tensor) for tensor in assembly.model.parameters()]
        exporting.set()
        del whole
        return export(assembly, *given)

    monkeypatch.setattr(checkpoint, "save_verified", save)
    monkeypatch.setattr(trainer, "export", exported)
    monkeypatch.setattr(torch.Tensor, "cpu", copy)
    wide = {**LLAMA, "hidden_size": 256, "intermediate_size": 512}
    train(config(corpus, tmp_path / "run", training=PLAIN, architecture=wide))
    (asked,) = configs
    plan = rehearse(asked.model_copy(update={"gpu": GPUParams(**read_card("h100_80gb"))}))
    planned = plan.host_bytes - HOST_BASE_BYTES
    assert most[0] == pytest.approx(planned, rel=0.01)
    assert planned - plan.host.end_bytes == pytest.approx(2 / 4 * planned, rel=0.01), "states alone, of four parts"
