import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from framework.errors import RequestError, SaveFailed
from framework.run import checkpoint as module
from framework.run.checkpoint import checkpoints, load_checkpoint, save_checkpoint, written_aside
from framework.run.step import train_step
from tests.optimizers import BF16, ON_CPU, WIDE, eager, training  # noqa: F401
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

TIED = {**LLAMA, "tie_word_embeddings": True}
DROPOUT = {**GPT2, "resid_pdrop": 0.2}


def steps(assembly, first, last):
    return [train_step(assembly, [unequal_rows()], step).loss for step in range(first, last + 1)]


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
@pytest.mark.parametrize(
    ("architecture", "sections"),
    [
        (TIED, {}),
        (DROPOUT, {}),
        (LLAMA, {"training": {"use_peft": True}, "peft": {"lora_dropout": 0.3}}),
        (LLAMA, {"model": {"freeze_layers": ["layers.0"], "torch_dtype_str": "bfloat16"}}),
    ],
    ids=["tied", "dropout", "lora", "frozen-bf16"],
)
def test_training_goes_on_bit_for_bit(tmp_path, optimizer, architecture, sections):
    """C01: weights, optimizer states and random states come back exactly."""
    training = {"optimizer": optimizer, **sections.get("training", {})}
    config = tiny_config(architecture, **{**sections, "training": training})
    straight = tiny_assembly(config)
    steps(straight, 1, 3)
    saved = save_checkpoint(tmp_path, straight, 3, keep=2)
    expected = steps(straight, 4, 6)
    resumed = tiny_assembly(config)
    steps(resumed, 1, 1)  # whatever state there was is replaced
    assert load_checkpoint(saved, resumed) == 3
    assert steps(resumed, 4, 6) == expected
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "more", [{}, {"optimizer_in_backward": True, "max_grad_norm": 0.0}, {"optimizer_offload": "host"}]
)
@pytest.mark.parametrize("optimizer", ON_CPU)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path, optimizer, more):
    """C01 for states that are codes, averages, projections, random, or in another memory."""
    if more and ("torchao" in optimizer or ("8bit" in optimizer and "optimizer_offload" in more)):
        pytest.skip("refused")
    config = tiny_config({**WIDE, "tie_word_embeddings": True}, training=training(optimizer, **more), model=BF16)
    straight = tiny_assembly(config)
    steps(straight, 1, 3)
    saved = save_checkpoint(tmp_path, straight, 3, keep=2)
    expected = steps(straight, 4, 5)
    resumed = tiny_assembly(config)
    steps(resumed, 1, 1)
    assert load_checkpoint(saved, resumed) == 3
    assert steps(resumed, 4, 5) == expected
    for (name, a), (_, b) in zip(straight.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    saved = save_checkpoint(tmp_path, tiny_assembly(tiny_config()), 1, keep=1)
    assert {file.suffix for file in saved.iterdir()} == {".safetensors", ".json"}


def test_retention_deletes_the_oldest_after_the_newest_is_complete(tmp_path, monkeypatch):
    """C11: at every moment a complete checkpoint exists."""
    assembly = tiny_assembly(tiny_config())
    save_checkpoint(tmp_path, assembly, 1, keep=1)
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: seen.append((str(path), len(checkpoints(tmp_path)))))
    save_checkpoint(tmp_path, assembly, 2, keep=1)
    retired = [(path, count) for path, count in seen if path.endswith("step-00000001")]
    assert retired == [(str(tmp_path / "checkpoints" / "step-00000001"), 2)]
    monkeypatch.undo()
    save_checkpoint(tmp_path, assembly, 3, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]


@pytest.mark.parametrize("fails_at", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, fails_at):
    assembly = tiny_assembly(tiny_config())
    steps(assembly, 1, 1)
    good = save_checkpoint(tmp_path, assembly, 1, keep=1)

    def full_disk(*args, **kwargs):
        if fails_at in str(args):
            raise OSError(28, "No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", full_disk)
    if fails_at == "state.json":
        monkeypatch.setattr(json, "dumps", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(SaveFailed, match="No space left on device"):
        save_checkpoint(tmp_path, assembly, 2, keep=1)
    assert checkpoints(tmp_path) == [good]
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    monkeypatch.undo()
    assert load_checkpoint(good, assembly) == 1


def test_a_file_that_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    def loses_one(tensors, path):
        save_file(dict(list(tensors.items())[1:]), path)

    monkeypatch.setattr(module, "save_file", loses_one)
    with pytest.raises(SaveFailed, match="does not read back"):
        save_checkpoint(tmp_path, tiny_assembly(tiny_config()), 1, keep=1)
    assert checkpoints(tmp_path) == []


def test_being_killed_while_writing_leaves_no_half_folder(tmp_path):
    def killed():
        with written_aside(tmp_path / "final") as aside:
            (aside / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved = save_checkpoint(tmp_path, tiny_assembly(tiny_config()), 1, keep=1)
    wider = tiny_assembly(tiny_config({**LLAMA, "intermediate_size": 48}))
    with pytest.raises(RequestError, match="holds another model"):
        load_checkpoint(saved, wider)
    deeper = tiny_assembly(tiny_config({**LLAMA, "num_hidden_layers": 3}))
    with pytest.raises(RequestError, match="holds another model"):
        load_checkpoint(saved, deeper)


def test_a_damaged_checkpoint_is_named(tmp_path):
    assembly = tiny_assembly(tiny_config())
    saved = save_checkpoint(tmp_path, assembly, 1, keep=1)
    (saved / "state.json").write_text("{")
    with pytest.raises(RequestError, match="not a readable checkpoint"):
        load_checkpoint(saved, assembly)


def test_tied_weights_are_stored_once(tmp_path):
    saved = save_checkpoint(tmp_path, tiny_assembly(tiny_config(TIED)), 1, keep=1)
    names = set(load_file(saved / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
