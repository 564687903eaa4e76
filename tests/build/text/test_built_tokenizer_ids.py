"""A model with a tokenizer built on the spot stops at that tokenizer's end token."""

import warnings

import pytest
import torch

from framework.build.adapters.adapter import attach_adapter
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.build.text.tokenizer import train_tokenizer
from framework.schema.config import TrainingConfig
from framework.schema.peft import PeftParams
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config


@pytest.mark.parametrize("architecture", [GPT2, LLAMA])
def test_end_token_of_the_built_tokenizer_is_the_models(architecture):
    model = {"architecture": architecture, "load_pretrained_weights": False, "tokenizer": {"vocab_size": 300}}
    tokenizer = train_tokenizer(["some text"], 300)
    read = read_architecture(TrainingConfig(model=model))
    assert (read.bos_token_id, read.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_attaching_an_adapter_warns_of_nothing():
    model = tiny_assembly(tiny_config()).model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_adapter(PeftParams(), model, real_place(torch.device("cpu")), masters=False, lost={}, seed=0)
