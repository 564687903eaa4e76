import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.build.optimizers.low_bit import LOW_BIT
from framework.build.ranks import Ranks
from framework.errors import RequestError, SaveFailed
from framework.run.checkpoints import read_back as module
from framework.run.checkpoints.checkpoint import (
    checkpoints,
    contents_of,
    load_checkpoint,
    read_state,
    remove_partial_saves,
    retire_older,
    save_checkpoint,
    verify_checkpoint,
    written_aside,
)
from framework.run.checkpoints.read_back import verify_tensors
from framework.run.state import dumped
from framework.run.step import train_step
from framework.schema.optimizers import Optimizer
from tests.grids import chosen, thinned
from tests.optimizers import BF16, ON_CPU, UNLIKE, WIDE, eager, needs, training  # noqa: F401
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

TIED = {**LLAMA, "tie_word_embeddings": True}
A = torch.ones(2)
DROPOUT = {**GPT2, "resid_pdrop": 0.2}


def steps(assembly, first, last):
    return [train_step(assembly, [unequal_rows()], step).loss for step in range(first, last + 1)]


MODELS = [
    pytest.param(TIED, {}, id="tied"),
    pytest.param(DROPOUT, {}, id="dropout"),
    pytest.param(LLAMA, {"training": {"use_peft": True}, "peft": {"lora_dropout": 0.3}}, id="lora"),
    pytest.param(LLAMA, {"model": {"freeze_layers": ["layers.0"], "torch_dtype_str": "bfloat16"}}, id="frozen-bf16"),
]


@pytest.mark.parametrize(
    ("architecture", "sections", "optimizer"),
    thinned(MODELS, ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"]),
)
def test_training_resumes_bit_for_bit(tmp_path, optimizer, architecture, sections):
    """Weights, optimizer states and random states come back exactly."""
    training = {"optimizer": optimizer, **sections.get("training", {})}
    config = tiny_config(architecture, **{**sections, "training": training})
    straight = tiny_assembly(config)
    steps(straight, 1, 3)
    saved = save_checkpoint(tmp_path, contents_of(straight, 3), keep=2)
    expected = steps(straight, 4, 6)
    resumed = tiny_assembly(config)
    steps(resumed, 1, 1)  # whatever state there was is replaced
    assert load_checkpoint(saved, resumed) == 3
    assert steps(resumed, 4, 6) == expected
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


PLACES = {
    "in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "on the host": {"optimizer_offload": "host"},
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        *chosen(UNLIKE, thinned(ON_CPU, {"plain": {}})),
        *chosen(("adamw_torch", "adamw_torch_fused"), thinned(ON_CPU, PLACES)),
    ],
)
def test_every_optimizer_resumes_bit_for_bit(tmp_path, optimizer, more):
    """For states that are codes, averages, projections, random, or in another memory."""
    if more and ("torchao" in optimizer or ("8bit" in optimizer and "optimizer_offload" in more)):
        pytest.skip("refused")
    config = tiny_config({**WIDE, "tie_word_embeddings": True}, training=training(optimizer, **more), model=BF16)
    straight = tiny_assembly(config)
    steps(straight, 1, 3)
    saved = save_checkpoint(tmp_path, contents_of(straight, 3), keep=2)
    expected = steps(straight, 4, 5)
    resumed = tiny_assembly(config)
    steps(resumed, 1, 1)
    assert load_checkpoint(saved, resumed) == 3
    assert steps(resumed, 4, 5) == expected
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def unpaged(monkeypatch):
    """The class of `paged_adamw_32bit` without pages, which only a card has."""
    row = LOW_BIT[Optimizer.PAGED_ADAMW_32BIT]
    monkeypatch.setitem(LOW_BIT, Optimizer.PAGED_ADAMW_32BIT, replace(row, name="AdamW32bit", paged=False))


@needs("bitsandbytes")
@pytest.mark.usefixtures("unpaged")
@pytest.mark.parametrize(
    ("one", "other", "dtype", "more"),
    thinned(
        [
            pytest.param("adamw_torch", "paged_adamw_32bit", id="from torch"),
            pytest.param("paged_adamw_32bit", "adamw_torch", id="to torch"),
        ],
        ["float32", "bfloat16"],
        {"plain": {}, "in backward": PLACES["in backward"]},
    ),
)
def test_an_adamw_of_full_states_resumes_with_those_of_another(tmp_path, one, other, dtype, more):
    """The moments and the count of steps are the same numbers, of torch in the dtype of the weights."""
    precision = {"torch_dtype_str": dtype}
    configs = [tiny_config(LLAMA, training=training(name, **more), model=precision) for name in (one, other)]
    straight, resumed = map(tiny_assembly, configs)
    steps(straight, 1, 3)
    load_checkpoint(save_checkpoint(tmp_path, contents_of(straight, 3), keep=2), resumed)
    names = {"adamw_torch": ("exp_avg", "exp_avg_sq"), "paged_adamw_32bit": ("state1", "state2")}
    kind = torch.float32 if other.startswith("paged") else getattr(torch, dtype)
    for parameter, built in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        before, state = straight.optimizer.state[parameter], resumed.optimizer.state[built]
        assert state.keys() == {"step", *names[other]}
        assert float(state["step"]) == float(before["step"]) == 3
        for was, now in zip(names[one], names[other], strict=True):
            assert state[now].dtype is kind
            assert torch.equal(state[now], before[was].to(kind))
    assert steps(resumed, 4, 5) == pytest.approx(steps(straight, 4, 5), rel={"float32": 1e-6, "bfloat16": 1e-2}[dtype])


def test_older_checkpoints_are_retired_but_the_best(tmp_path):
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), step), keep=9)
    retire_older(tmp_path, 2, 1, print)
    assert [found.name for found in checkpoints(tmp_path)] == ["step-00000001", "step-00000003", "step-00000004"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_who_may_read_a_checkpoint_is_up_to_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in saved.iterdir()} == {0o666 & ~umask}


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    assert {file.suffix for file in saved.iterdir()} == {".safetensors", ".json"}


def test_retention_deletes_the_oldest_after_the_newest_is_complete(tmp_path, monkeypatch):
    """At every moment a complete checkpoint exists."""
    assembly = tiny_assembly(tiny_config())
    save_checkpoint(tmp_path, contents_of(assembly, 1), keep=1)
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append((str(path), len(checkpoints(tmp_path)))))
    save_checkpoint(tmp_path, contents_of(assembly, 2), keep=1)
    retired = [(path, count) for path, count in seen if "step-00000001" in path]
    assert retired == [(str(tmp_path / "checkpoints" / ".step-00000001.retired"), 1)]
    monkeypatch.undo()
    remove_partial_saves(tmp_path)  # as a run does that goes on after a kill
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    save_checkpoint(tmp_path, contents_of(assembly, 3), keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]


@pytest.mark.parametrize("why", ["link", "permission", "left over", "notes"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_stays(tmp_path, monkeypatch, why):
    assembly, messages = tiny_assembly(tiny_config()), []
    old = save_checkpoint(tmp_path / "other", contents_of(assembly, 1), keep=1)
    target = tmp_path / "checkpoints" / "step-00000001"
    target.parent.mkdir()
    if why == "link":
        target.symlink_to(old)
    else:
        shutil.move(old, target)
    if why == "notes":
        (target / "notes.txt").write_text("mine")

    def refuse(path, *arguments, **options):
        if "step-00000001" in str(path):
            raise PermissionError(1, "Operation not permitted")
        return original(path, *arguments, **options)

    holder, name = {"permission": ("pathlib.os", "rename"), "left over": ("shutil", "rmtree")}.get(why, (None, None))
    if holder is not None:
        original = getattr(os if holder == "pathlib.os" else shutil, name)
        monkeypatch.setattr(f"{holder}.{name}", refuse)
    save_checkpoint(tmp_path, contents_of(assembly, 2), keep=1, say=messages.append)
    assert len(messages) == 1
    assert {"link": "it is a link to", "notes": "no run wrote notes.txt in it"}.get(
        why, "Operation not permitted"
    ) in messages[0]
    assert ((tmp_path / "checkpoints" / ".step-00000001.retired") / "state.json").exists() is (why == "left over")
    assert (target / "state.json").exists() is (why != "left over")
    assert [path.name for path in checkpoints(tmp_path)][-1] == "step-00000002"


@pytest.mark.parametrize("fails_at", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, fails_at):
    assembly = tiny_assembly(tiny_config())
    steps(assembly, 1, 1)
    good = save_checkpoint(tmp_path, contents_of(assembly, 1), keep=1)

    def full_disk(*args, **kwargs):
        if fails_at in str(args):
            raise OSError(28, "No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", full_disk)
    if fails_at == "state.json":
        monkeypatch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SaveFailed, match="No space left on device"):
        save_checkpoint(tmp_path, contents_of(assembly, 2), keep=1)
    assert checkpoints(tmp_path) == [good]
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    monkeypatch.undo()
    assert load_checkpoint(good, assembly) == 1


def test_a_file_that_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    def loses_one(tensors, path, **options):
        save_file(dict(list(tensors.items())[1:]), path, **options)

    monkeypatch.setattr(module, "save_file", loses_one)
    with pytest.raises(SaveFailed, match="does not read back"):
        save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    assert checkpoints(tmp_path) == []


def test_one_wrong_bit_of_a_file_is_not_kept(tmp_path, monkeypatch):
    """Names, shapes and dtypes are right; the checksum is not."""

    def flips_one(tensors, path, **options):
        save_file(tensors, path, **options)
        flip(path)

    monkeypatch.setattr(module, "save_file", flips_one)
    with pytest.raises(SaveFailed, match=r"random\.safetensors does not read back as it was written: 1 tensor differs"):
        save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    "stored",
    [{"a": torch.ones(3)}, {"a": torch.ones(2, dtype=torch.int32)}, {"a": torch.zeros(2)}, {}, {"a": A, "b": A + 1}],
    ids=["shape", "dtype", "value", "missing", "more"],
)
def test_what_differs_from_what_was_to_be_written_is_found(tmp_path, stored):
    verify_tensors_of(tmp_path, {"a": A})
    with pytest.raises(SaveFailed, match="does not read back"):
        verify_tensors_of(tmp_path, stored)


def flip(path, at=-1):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def verify_tensors_of(folder, stored):
    save_file(stored, folder / "file.safetensors")
    verify_tensors(folder / "file.safetensors", {"a": A})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_tensors_of_any_kind_read_back(tmp_path, dtype):
    tensors = {"b": torch.ones(5, 3).to(dtype), "a": torch.ones(()).to(dtype), "empty": torch.ones(0, 4).to(dtype)}
    save_file(tensors, tmp_path / "file.safetensors")
    verify_tensors(tmp_path / "file.safetensors", tensors)


def test_being_killed_while_writing_leaves_no_half_folder(tmp_path):
    def killed():
        with written_aside(tmp_path / "final") as aside:
            (aside / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    wider = tiny_assembly(tiny_config({**LLAMA, "intermediate_size": 48}))
    with pytest.raises(RequestError, match="holds another model"):
        load_checkpoint(saved, wider)
    deeper = tiny_assembly(tiny_config({**LLAMA, "num_hidden_layers": 3}))
    with pytest.raises(RequestError, match="holds another model"):
        load_checkpoint(saved, deeper)


DAMAGES = {
    "changed": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "deleted": lambda file: file.unlink(),
    "emptied": lambda file: file.write_bytes(b""),
}
FILES = ["model.safetensors", "optimizer.safetensors", "random.safetensors", "random-00001.json", "state.json"]


@pytest.mark.parametrize(("name", "damage"), thinned(FILES, DAMAGES))
def test_a_damaged_checkpoint_is_named_and_what_to_do(tmp_path, name, damage):
    assembly = tiny_assembly(tiny_config())
    steps(assembly, 1, 1)
    older, saved = (save_checkpoint(tmp_path, contents_of(assembly, n, others=[dumped()]), keep=2) for n in (1, 2))
    before = [parameter.clone() for parameter in assembly.model.parameters()]
    damage(saved / name)
    with pytest.raises(RequestError) as caught:
        load_checkpoint(saved, assembly)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{saved / name} ")
    assert problem.expected == f"delete {saved}: --resume then continues from step-00000001"
    assert all(map(torch.equal, before, assembly.model.parameters()))
    shutil.rmtree(saved)
    assert load_checkpoint(older, assembly) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "random.safetensors", "random-00001.json"])
def test_ranks_share_the_reading_and_wait_for_each_other(tmp_path, name):
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1, others=[dumped()]), keep=1)
    flip(saved / name)
    state, process_group, found = read_state(saved), [], []
    for rank in range(3):
        try:
            verify_checkpoint(saved, state, Ranks(rank, 3, meet=lambda rank=rank: process_group.append(rank)))
        except RequestError:
            found.append(rank)
    assert len(found) == 1
    assert sorted(process_group + found) == [0, 1, 2]


def test_a_changed_digit_of_the_state_is_found(tmp_path):
    """It is JSON as before, and the only checkpoint."""
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    text = (saved / "state.json").read_text()
    (saved / "state.json").write_text(text.replace('"step": 1,', '"step": 3,'))
    with pytest.raises(RequestError, match=r"state\.json has changed since it was written") as caught:
        read_state(saved)
    assert "there is no older one" in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "{}", "3", '{"format": 1, "step": 1}', "null"])
def test_a_state_that_no_run_has_written_is_reported(tmp_path, text):
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config()), 1), keep=1)
    (saved / "state.json").write_text(text)
    with pytest.raises(RequestError) as caught:
        read_state(saved)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{saved / 'state.json'} ")
    assert problem.expected.startswith(f"delete {saved}")


def test_tied_weights_are_stored_once(tmp_path):
    saved = save_checkpoint(tmp_path, contents_of(tiny_assembly(tiny_config(TIED)), 1), keep=1)
    names = set(load_file(saved / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
