"""`show --resolve`: what it prints is a recipe that is accepted, and is the same request."""

import pytest

from framework.cli import main
from framework.compose import compose, shipped
from framework.memory.resolve import with_length, with_precision
from framework.memory.search.free_keys import opened
from framework.run.planning.fit import Decided

ASKED = [
    [],
    ["gpu=h100_80gb", "training=fastest"],
    ["gpu=t4_16gb", "training=balanced"],
    ["gpu=24gb", "training=lowest_memory"],
]


@pytest.fixture(autouse=True)
def plain_values(monkeypatch):
    """The search is not under test: its plain values replace its result."""
    monkeypatch.setattr("framework.run.planning.fit.decide", lambda config, runs_here: Decided(opened(config), ()))


@pytest.mark.parametrize("arguments", ASKED, ids=lambda arguments: " ".join(arguments) or "as shipped")
def test_what_is_printed_is_accepted_and_the_same(arguments, write, capsys):
    _try("chat", ["model=qwen3_8b", "peft=qlora", *arguments], write, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ASKED, ids=lambda arguments: " ".join(arguments) or "as shipped")
def test_every_recipe_as_printed_is_accepted_and_the_same(arguments, write, capsys):
    for name in shipped.recipes():
        _try(name, arguments, write, capsys)


def _try(name, arguments, write, capsys):
    assert not main(["show", name, "--resolve", *arguments])
    printed = write(capsys.readouterr().out, "printed.yaml")
    assert main(["check", str(printed), "--quick"]) == 0, (name, capsys.readouterr().err)
    capsys.readouterr()
    assert compose(printed).config == with_length(with_precision(opened(compose(name, arguments).config))), name


@pytest.mark.parametrize(
    ("arguments", "dtype", "autocast"),
    [
        (["gpu=rtx4090_24gb"], "float32", "bf16"),
        (["gpu=t4_16gb"], "float32", "fp16"),
        (["gpu=rtx4090_24gb", "peft=lora"], "bfloat16", "bf16"),
        (["gpu=t4_16gb", "peft=lora"], "float16", "fp16"),
        (["gpu=rtx4090_24gb", "optimizer=anyprecision_adamw"], "bfloat16", "none"),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_unset_precision_is_printed_as_its_default(arguments, dtype, autocast, key, write, capsys):
    """As transformers 5 and 4 write the dtype that a checkpoint is stored in."""
    written = write(f"model: {{architecture: {{model_type: llama, {key}: bfloat16}}}}")
    assert not main(["show", str(written), *arguments, "--resolve"])
    printed = capsys.readouterr().out.splitlines()
    assert f"  torch_dtype_str: {dtype}" in printed
    assert f"  mixed_precision_dtype: {autocast}" in printed
