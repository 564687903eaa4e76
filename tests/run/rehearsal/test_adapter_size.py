"""The planned size of what an adapted run exports is the size of the files that it writes."""

import pytest

from framework.run.checkpoints.export import export
from framework.run.rehearsal.rehearse import record
from tests.build.adapters.test_adapter import UNLIKE, adapted, steps
from tests.grids import thinned
from tests.run.checkpoints.test_adapter_saves import TIED, TOKENIZER
from tests.tiny import GPT2, LLAMA, tiny_assembly

HEADER_BYTES = 3000
"""More than the header of a model's file has here: 21 tensors of about 110 characters."""


def planned_and_written(folder, config):
    planned = record(config).footprint.export_bytes
    assembly = tiny_assembly(config)
    steps(assembly, 1)
    export(assembly, TOKENIZER, folder)
    return planned, sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("method", UNLIKE)
def test_an_adapter_alone(method, tmp_path):
    planned, written = planned_and_written(tmp_path / "final", adapted(method, LLAMA))
    assert planned == written


@pytest.mark.parametrize(("method", "whole"), thinned(["lora", "vera", "pissa"], ["lm_head", "embed_tokens"]))
def test_a_tied_matrix_that_is_trained_whole_is_written_under_both_names(method, whole, tmp_path):
    planned, written = planned_and_written(tmp_path / "final", adapted(method, TIED, lora_modules_to_save=[whole]))
    assert planned == written


BASES = [
    pytest.param("lora", LLAMA, {}, id="plain"),
    pytest.param("lora", LLAMA, {"lora_freeze_a": True}, id="frozen factors"),
    pytest.param("lora", TIED, {"lora_modules_to_save": ["lm_head"]}, id="tied"),
    pytest.param("vera", TIED, {"lora_modules_to_save": ["lm_head"]}, id="vera"),
    pytest.param("lora", TIED, {"lora_target_modules": ["lm_head", "q_proj"]}, id="adapted head"),
    pytest.param("lora", GPT2, {"lora_modules_to_save": ["wte"]}, id="gpt2"),
]


@pytest.mark.parametrize(
    ("method", "architecture", "settings", "mode"), thinned(BASES, ["merged", "adapter_and_base_model"])
)
def test_the_base_is_planned_where_it_is_written(method, architecture, settings, mode, tmp_path):
    config = adapted(method, architecture, peft_save_mode=mode, **settings)
    planned, written = planned_and_written(tmp_path / "final", config)
    assert planned <= written <= planned + HEADER_BYTES
