"""Checkpoints written during training: the same files as without, complete or absent, and nobody ends before them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from framework.errors import Interrupted, OutOfMemory, RequestError, SaveFailed, VerificationFailed
from framework.memory.cards import read_card
from framework.memory.host_use import HOST_BASE_BYTES
from framework.run import session as session_module
from framework.run import trainer
from framework.run.checkpoints import checkpoint as checkpoint_module
from framework.run.checkpoints import read_back as written_module
from framework.run.checkpoints import saver as saving
from framework.run.checkpoints.async_writer import Writer
from framework.run.checkpoints.checkpoint import checkpoints, contents_of, save_checkpoint
from framework.run.rehearsal.footprint import state_tensors
from framework.run.rehearsal.rehearse import rehearse
from framework.run.step import train_step
from framework.schema.choices import StateDictType
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.grids import thinned
from tests.run.ranks.test_sharded import parsed
from tests.run.several import ROOT, ended, start
from tests.run.test_trainer import config, corpus, final_weights, interrupt_after, metrics, same, train  # noqa: F401
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

DROPOUT = {**GPT2, "resid_pdrop": 0.2}
ADAPTED = {"training": {"use_peft": True}, "peft": {"lora_dropout": 0.3}}
ASYNC = {"async_save": True, "save_steps": 4}


@pytest.fixture(autouse=True)
def no_long_samples(monkeypatch):
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def live(assembly):
    return (*assembly.trained, *state_tensors(assembly))


@pytest.mark.parametrize(
    ("architecture", "sections", "optimizer"),
    thinned(
        [pytest.param(DROPOUT, {}, id="all"), pytest.param(LLAMA, ADAPTED, id="lora")],
        ["adamw_torch_fused", "schedule_free_adamw"],
    ),
)
def test_an_asynchronous_save_is_byte_for_byte_a_synchronous_one(tmp_path, optimizer, architecture, sections):
    """Twice, since the second save takes the copies' memory of the first."""
    training = {"optimizer": optimizer, "lr_scheduler_type": "constant", **sections.get("training", {})}
    assembly = tiny_assembly(tiny_config(architecture, **{**sections, "training": training}))
    writer, stepped = Writer(is_async=True), threading.Event()

    def write(contents):
        assert stepped.wait(200)  # until the weights are others
        save_checkpoint(tmp_path / "asynchronous", contents, 5)

    for step in (1, 3):
        train_step(assembly, [unequal_rows()], step)
        save_checkpoint(tmp_path / "before", contents_of(assembly, step), 5)
        writer.begin(contents_of(assembly, step), write, live(assembly))
        before = [tensor.clone() for tensor in assembly.trained]
        train_step(assembly, [unequal_rows()], step + 1)
        assert not all(torch.equal(a, b) for a, b in zip(before, assembly.trained, strict=True))
        stepped.set()
        writer.wait()
        stepped.clear()
    written = files(tmp_path / "asynchronous")
    assert len(written) == 8
    assert written == files(tmp_path / "before")


def test_copies_that_are_none_are_found(monkeypatch):
    assembly = tiny_assembly(tiny_config())
    monkeypatch.setattr(Writer, "_copied", lambda self, contents: contents)
    with pytest.raises(VerificationFailed, match=r"training would change model\.embed_tokens\.weight"):
        Writer(is_async=True).begin(contents_of(assembly, 1), lambda contents: None, live(assembly))


def test_a_second_interrupt_does_not_wait_for_the_writer_and_an_error_does():
    released, written = threading.Event(), threading.Event()

    def write(contents):
        released.wait(200)
        written.set()

    writer = Writer(is_async=True)
    writer.begin(contents_of(tiny_assembly(tiny_config()), 1), write, ())
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    assert not written.is_set()
    threading.Timer(0.2, released.set).start()
    with pytest.raises(ValueError, match="first"), writer:
        raise ValueError("first")
    assert written.is_set()


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):  # noqa: F811
    """Twelve steps, saved before the next ones."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(config(corpus, folder, training={"save_steps": 4, "save_total_limit": 5}))
    return folder


def test_a_run_learns_and_saves_the_same(corpus, straight, tmp_path, capsys):  # noqa: F811
    train(config(corpus, tmp_path / "run", training={**ASYNC, "save_total_limit": 5}), quiet=False)
    output = capsys.readouterr().err.replace("\n", " ")
    assert "after step 4: training.async_save = true (" in output
    assert "of copies in host memory)" in output
    # the last one counts as well, though it is waited for
    assert "2 checkpoints written during training in" not in output
    assert "3 checkpoints written during training in" in output
    assert metrics(tmp_path / "run") == metrics(straight)
    assert same(final_weights(tmp_path / "run"), final_weights(straight))
    one, other = files(tmp_path / "run" / "checkpoints"), files(straight / "checkpoints")
    assert one.keys() == other.keys()
    for name in one:
        if name.endswith("state.json"):
            a, b = json.loads(one[name]), json.loads(other[name])
            for document in (a, b):
                del (
                    document["crc32"],
                    document["config"]["training"]["async_save"],
                    document["config"]["training"]["output_dir"],
                )
            assert a == b
        else:
            assert one[name] == other[name], name


def slowed(monkeypatch, seconds):
    """Writers that take their time, and how many are at work at once."""
    original, at_work, most = checkpoint_module.save_checkpoint, [], []

    def slow(folder, contents, *others):
        at_work.append(contents.step)
        most.append(len(at_work))
        time.sleep(seconds)
        original(folder, contents, *others)
        at_work.pop()

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    return most


def test_saves_that_come_faster_than_they_are_written_wait_for_each_other(corpus, tmp_path, monkeypatch):  # noqa: F811
    most = slowed(monkeypatch, 0.1)
    train(config(corpus, tmp_path / "run", training={"async_save": True, "save_steps": 1, "max_steps": 6}))
    assert most == [1] * 6
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000005", "step-00000006"]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-00000005", "step-00000006"}


def test_an_interrupted_run_has_written_what_it_began_and_resumes_exactly(
    corpus,  # noqa: F811
    straight,
    tmp_path,
    monkeypatch,
):
    with monkeypatch.context() as patched:
        interrupt_after(4, patched)
        slowed(patched, 0.5)
        with pytest.raises(Interrupted, match="after step 4"):
            train(config(corpus, tmp_path / "run", training=ASYNC))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000004"]
    train(config(corpus, tmp_path / "run", training={"save_steps": 4}), resume=True)  # harmless: the same is trained on
    assert metrics(tmp_path / "run") == metrics(straight)
    assert same(final_weights(tmp_path / "run"), final_weights(straight))


def test_a_run_that_cannot_write_ends_at_the_next_step_with_the_last_checkpoint_whole(
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The disk is full. The message equals that of a synchronous save."""
    original, log = written_module.save_file, session_module.Session._log
    reached = threading.Event()  # the next step: on a busy machine the writer might fail before it

    def full_disk(tensors, file, **options):
        if "step-00000008" in str(file):
            reached.wait(200)
            raise OSError(28, "No space left on device")
        original(tensors, file, **options)

    def until_failed(self, *arguments):
        log(self, *arguments)
        if self.step == 9:
            reached.set()
            while not self.saving.writer.has_failed:
                time.sleep(0.01)

    monkeypatch.setattr(written_module, "save_file", full_disk)
    monkeypatch.setattr(session_module.Session, "_log", until_failed)
    messages = []
    for name, training in (("asynchronous", ASYNC), ("before", {"save_steps": 4})):  # `reached` stays set
        with pytest.raises(SaveFailed, match="No space left on device") as caught:
            train(config(corpus, tmp_path / name, training=training))
        first, second = str(caught.value).splitlines()
        messages.append(first.replace(name, "run"))
        made = 9 if name == "asynchronous" else 8
        assert f"The weights after step {made} are exported" in second
        AutoModelForCausalLM.from_pretrained(tmp_path / name / f"export-step-{made:08d}")
        assert [path.name for path in (tmp_path / name / "checkpoints").iterdir()] == ["step-00000004"]
        assert not (tmp_path / name / "final").exists()
    assert messages[0] == messages[1]
    assert max(metrics(tmp_path / "asynchronous")) == 9
    assert max(metrics(tmp_path / "before")) == 8


def test_memory_that_runs_out_waits_for_the_writer_and_names_its_checkpoint(corpus, tmp_path, monkeypatch):  # noqa: F811
    slowed(monkeypatch, 0.5)
    original = session_module.Session.observe

    def fail(self, phase):
        original(self, phase)
        if phase == "end" and self.step == 4:  # step 5 has changed the weights
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(session_module.Session, "observe", fail)
    with pytest.raises(OutOfMemory, match="there is the checkpoint of step 4 to resume from"):
        train(config(corpus, tmp_path / "run", training=ASYNC))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000004"]


KILLED = """
import sys, time
from pathlib import Path
from framework.run import trainer
from framework.run.checkpoints import read_back as written
from tests.run.test_trainer import config, train

original = written.save_file

def half(tensors, file, **options):
    original(tensors, file, **options)
    if "step-00000008" in str(file):
        file.write_bytes(file.read_bytes()[:100])
        time.sleep(600)

written.save_file = half
trainer.SAMPLE_NEW_TOKENS = 1
train(config(Path(sys.argv[1]), Path(sys.argv[2]), training={"async_save": True, "save_steps": 4}))
"""


def test_killed_while_the_writer_works_the_run_resumes_from_the_last_complete_checkpoint(
    corpus,  # noqa: F811
    straight,
    tmp_path,
):
    """Training had gone on meanwhile, to where it would wait for the writer."""
    folder = tmp_path / "run"
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(corpus), str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and max(metrics(folder), default=0) == 12:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"step-00000004", ".step-00000008.incomplete"}
    (folder / "checkpoints" / ".step-00000006.incomplete").mkdir()
    (folder / "checkpoints" / ".parts").mkdir()
    train(config(corpus, folder, training=ASYNC), resume=True)
    assert metrics(folder) == metrics(straight)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-00000008", "step-00000012"}
    assert same(final_weights(folder), final_weights(straight))


GATHERED = {"enable_fsdp": True, "state_dict_type": StateDictType.FULL_STATE_DICT}
KINDS = {"split": {"enable_fsdp": True}, "gathered": GATHERED, "shared": {"tensor_parallel_size": 2}, "copied": {}}


def on_two(corpus, folder, **sections):  # noqa: F811
    training = {"save_steps": 4, "save_total_limit": 5, **sections.pop("training", {})}
    made = config(corpus, folder, architecture=LLAMA, training=training)
    gpu = made.gpu.model_copy(update={"name": "cpu", "count": 2})
    return made.model_copy(update={"gpu": gpu, "fsdp": made.fsdp.model_copy(update=sections.pop("fsdp", {}))})


def runs_as_rank(corpus, folder) -> None:  # noqa: F811
    """Runs of two ranks, saved before and next to steps; the last cannot write its second checkpoint."""
    from framework.cli import complain
    from framework.errors import TunesmithError

    trainer.SAMPLE_NEW_TOKENS = 1
    folder = Path(folder)
    for kind, fsdp in KINDS.items():
        for name in ("before", "asynchronous"):
            training = {"async_save": name == "asynchronous"}
            train(on_two(corpus, folder / kind / name, training=training, fsdp=fsdp))
    original = written_module.save_file

    def full_disk(tensors, file, **options):
        if "step-00000008" in str(file):
            raise OSError(28, "No space left on device")
        original(tensors, file, **options)

    written_module.save_file = full_disk
    try:
        train(on_two(corpus, folder / "full", training={"async_save": True}))
    except TunesmithError as error:
        complain(str(error), False)
        sys.exit(error.exit_code)


@pytest.mark.slow
def test_two_ranks_save_asynchronously_what_they_save_synchronously(corpus, tmp_path):  # noqa: F811
    script = "import sys; from tests.run.checkpoints.test_async_save import runs_as_rank; runs_as_rank(*sys.argv[1:])"
    both = ended(start(script, str(corpus), str(tmp_path)))
    assert [rank.code for rank in both] == [4, 4], both
    assert "No space left on device" in both[0].err
    assert "No space" not in both[1].err
    assert [path.name for path in checkpoints(tmp_path / "full")] == ["step-00000004"]
    for kind in KINDS:
        before, asynchronous = tmp_path / kind / "before", tmp_path / kind / "asynchronous"
        assert metrics(before) == metrics(asynchronous)
        one, other = files(before / "checkpoints"), files(asynchronous / "checkpoints")
        assert one.keys() == other.keys()
        for name in one:
            if not name.endswith("state.json"):  # which says how it was saved
                assert parsed(before / "checkpoints" / name) == parsed(asynchronous / "checkpoints" / name)
        assert {path.name for path in (asynchronous / "checkpoints").iterdir()} == {
            "step-00000004",
            "step-00000008",
            "step-00000012",
        }


def plan_of(gpu: str, count: int = 1, **training):
    made = {"max_steps": 10, "global_batch_size": None, **training}
    card = {**read_card(gpu), "count": count} if gpu != "cpu" else {"name": gpu}
    return rehearse(tiny_config({**LLAMA, "vocab_size": 50_000}, training=made, gpu=card))


@pytest.mark.parametrize("gpu", ["cpu", "h100_80gb"])
def test_the_copies_are_in_the_plan(gpu):
    """On a card only host memory grows, by one checkpoint; on the CPU the device's does."""
    without, asynchronous = plan_of(gpu, save_steps=5), plan_of(gpu, save_steps=5, async_save=True)
    held = without.checkpoint_bytes
    if gpu == "cpu":
        assert asynchronous.peak.allocated_bytes - without.peak.allocated_bytes == pytest.approx(held, rel=1e-3)
        assert asynchronous.host_bytes - without.host_bytes == pytest.approx(held, rel=1e-3)
    else:
        assert asynchronous.peak == without.peak
        during = [made.host_bytes - made.host.end_bytes for made in (asynchronous, without)]
        assert during[0] - HOST_BASE_BYTES == pytest.approx(held, rel=1e-3)
        assert during[0] > during[1]


def test_of_ranks_that_hold_copies_the_first_alone_copies():
    made = [plan_of("h100_80gb", count=2, save_steps=5, async_save=asynchronous) for asynchronous in (False, True)]
    without, asynchronous = made
    assert asynchronous.host_bytes - HOST_BASE_BYTES == pytest.approx(asynchronous.checkpoint_bytes, rel=1e-3)
    assert asynchronous.host.other_bytes == without.host.other_bytes


@pytest.mark.parametrize(
    ("training", "reason"),
    [({}, "the only save is at the end"), ({"save_steps": 10, "max_steps": 10}, "after 10 steps")],
)
def test_it_is_refused_without_anything_to_overlap(training, reason):
    refused = find_conflicts(TrainingConfig(training={"async_save": True, **training}), Needs())
    found = [item for item in refused if item.keys == ("training.async_save", "training.save_steps")]
    assert len(found) == 1
    assert not found[0].is_warning
    assert reason in found[0].message
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    goes = TrainingConfig.model_validate(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert not [item for item in find_conflicts(goes, Needs()) if "training.async_save" in item.keys]


def test_it_is_refused_where_the_rows_are_fewer_steps(corpus, tmp_path):  # noqa: F811
    """Known when the rows are read, before any weight is loaded."""
    epochs = {**ASYNC, "max_steps": None, "num_train_epochs": 1, "save_steps": 10_000}
    with pytest.raises(RequestError, match=r"the only save is at the end, after \d+ steps") as caught:
        train(config(corpus, tmp_path / "run", training=epochs))
    assert caught.value.problems[0].key == "training.async_save"
    assert not (tmp_path / "run").exists()
