"""The export is tried before the first step: what would fail at the end of a run fails at its beginning."""

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from framework.errors import SaveFailed
from framework.run import trainer
from framework.run.checkpoints.export import try_export
from framework.run.trainer import train
from tests.build.adapters.test_adapter import METHODS, MIXTRAL, MOE, adapted
from tests.grids import first, thinned
from tests.run.checkpoints.test_adapter_saves import TIED, TOKENIZER
from tests.run.test_trainer import config, corpus  # noqa: F401
from tests.tiny import GEMMA2, GPT2, LLAMA, tiny_assembly, tiny_config

MODELS = [LLAMA, TIED, GPT2, GEMMA2, MOE, MIXTRAL]


def leaves_no_trace(assembly, folder):
    before = {name: tensor.clone() for name, tensor in assembly.model.state_dict().items()}
    dtype, random = assembly.model.config.dtype, torch.get_rng_state()
    try_export(assembly, TOKENIZER, folder / "final")
    assert list(folder.iterdir()) == []
    assert assembly.model.config.dtype == dtype
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in assembly.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("architecture", first(2, MODELS), ids=lambda a: a["model_type"])
def test_what_can_be_exported_passes_and_leaves_no_trace(architecture, tmp_path):
    leaves_no_trace(tiny_assembly(tiny_config(architecture)), tmp_path)


@pytest.mark.parametrize(("method", "mode"), thinned(METHODS, ["adapter_only", "adapter_and_base_model", "merged"]))
def test_adapters_pass_and_leave_no_trace(method, mode, tmp_path):
    if mode == "merged" and method in ("prefix", "prompt"):
        pytest.skip("refused: nothing to merge")
    leaves_no_trace(tiny_assembly(adapted(method, peft_save_mode=mode)), tmp_path)


def test_weights_that_share_memory_unknown_to_the_model_are_refused(tmp_path):
    """Tied by hand, so that the class does not say which of both is written."""
    assembly = tiny_assembly(tiny_config(LLAMA))
    blocks = assembly.model.model.layers
    blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    with pytest.raises(SaveFailed, match="share"):
        try_export(assembly, TOKENIZER, tmp_path / "final")
    assert list(tmp_path.iterdir()) == []


def fails(*_, **__):
    raise ValueError("no such thing can be written")


@pytest.mark.parametrize("what", [PreTrainedTokenizerBase, GenerationConfig])
def test_a_run_that_could_not_be_exported_makes_no_step(corpus, tmp_path, monkeypatch, what):  # noqa: F811
    monkeypatch.setattr(what, "save_pretrained", fails)
    monkeypatch.setattr(trainer, "launch_step", lambda *_: pytest.fail("trained"))
    with pytest.raises(SaveFailed, match=r"would end without .*final.*ValueError: no such thing can be written"):
        train(config(corpus, tmp_path / "run"), planner=None, quiet=True)
