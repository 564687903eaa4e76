"""Settings of the CUDA allocator: given before CUDA starts, refused where the environment says otherwise, read back."""

import pytest
import torch

from framework.build.levers import allocator
from framework.build.levers.allocator import choose_allocator, environment_settings, live_settings
from framework.build.verify.batch import read_allocator_settings
from framework.errors import RequestError
from framework.schema.config import TrainingConfig
from tests.tiny import tiny_assembly, tiny_config

H100 = {"name": "h100_80gb", "capability": "9.0"}
LIVE = {"expandable_segments": "False", "max_split_size_mb": "None", "garbage_collection_threshold": "None"}


def config(**settings):
    return TrainingConfig.model_validate({"training": {"allocator": settings}, "gpu": H100})


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if torch.cuda.is_available():  # there the one test runs in a process of its own; torch 2.11 has no such getter
        yield
        return
    before = torch._C._accelerator_getAllocatorSettings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


def test_torch_gets_the_requested_settings_and_keeps_others_of_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2], max_split_size_mb:64")
    choose_allocator(config(expandable_segments=True, max_split_size_mb=64))
    given = torch._C._accelerator_getAllocatorSettings()
    assert given.startswith("roundup_power2_divisions:[256:1,512:2]")
    assert "expandable_segments:True" in given
    assert environment_settings()["max_split_size_mb"] == "64"


def test_nothing_asked_and_the_cpu_change_nothing():
    before = torch._C._accelerator_getAllocatorSettings()
    choose_allocator(config())
    choose_allocator(tiny_config(training={"allocator": {"max_split_size_mb": 64}}))
    assert torch._C._accelerator_getAllocatorSettings() == before


def test_an_environment_that_says_otherwise_is_named_with_the_key(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:128")
    with pytest.raises(RequestError) as caught:
        choose_allocator(config(expandable_segments=True, max_split_size_mb=64))
    first, second = caught.value.problems
    assert first.key == "training.allocator.expandable_segments"
    assert "PYTORCH_CUDA_ALLOC_CONF of the environment says expandable_segments:False" in first.message
    assert second.key == "training.allocator.max_split_size_mb"
    choose_allocator(config(max_split_size_mb=128))


def test_a_process_that_holds_memory_under_other_settings_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1 << 21)
    monkeypatch.setattr(allocator, "live_settings", lambda: LIVE)
    with pytest.raises(RequestError, match="CUDA has started in this process and holds memory under False"):
        choose_allocator(config(expandable_segments=True))
    choose_allocator(config(expandable_segments=False))


def test_the_live_allocator_is_what_is_read(monkeypatch):
    """A snapshot as torch 2.11 and 2.13 make it: a size that was never set is -1."""
    settings = {"max_split_size": -1, "garbage_collection_threshold": 0.8, "expandable_segments": True}
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": settings})
    assert live_settings() == {
        "expandable_segments": "True",
        "max_split_size_mb": "None",
        "garbage_collection_threshold": "0.8",
    }


def on_a_card(monkeypatch, **settings):
    """A tiny assembly that claims to be on a card with default allocator settings."""
    from dataclasses import replace

    assembly = tiny_assembly(tiny_config(training={"allocator": settings}))
    monkeypatch.setattr("framework.build.verify.batch.live_settings", lambda: LIVE)
    return replace(assembly, place=replace(assembly.place, kind="cuda"))


def test_a_setting_that_is_not_in_effect_shows(monkeypatch):
    reading, other = read_allocator_settings(on_a_card(monkeypatch, expandable_segments=True, max_split_size_mb=512))
    assert (reading.asked, reading.found, reading.holds) == ("True", "False", False)
    assert (other.asked, other.found) == ("512", "None")


def test_a_setting_that_only_the_environment_makes_is_reported(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    (reading,) = read_allocator_settings(on_a_card(monkeypatch))
    assert reading.holds
    assert "PYTORCH_ALLOC_CONF of the environment; it was planned without" in reading.source


@pytest.mark.gpu
def test_a_real_allocator_reads_back_what_it_was_given():
    """In a process of its own, since nothing of the card may be held before."""
    import subprocess
    import sys

    code = """
from tests.build.levers.test_allocator import config
from framework.build.levers.allocator import choose_allocator, live_settings
import torch
choose_allocator(config(expandable_segments=True, max_split_size_mb=512, garbage_collection_threshold=0.8))
block = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
print(live_settings(), [s["is_expandable"] for s in torch.cuda.memory_snapshot()], torch.cuda.memory_reserved() >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "{'expandable_segments': 'True', 'max_split_size_mb': '512', 'garbage_collection_threshold': '0.8'}"
    assert done.stdout.strip() == f"{expected} [True] 40"
