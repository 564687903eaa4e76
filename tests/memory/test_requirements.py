"""Requirements of a setting on card and machine are found from the recipe alone, all at once."""

import contextlib
import os

import pytest

from framework import checks
from framework.checks import CHECK, PLAN, TRAIN, check
from framework.errors import RequestError
from framework.memory import requirements
from framework.memory.cards import read_card
from framework.memory.requirements import suits, unmet_requirements, unusable_settings, workers_over_cores
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams

LLAMA = {"architecture": {"model_type": "llama"}, "load_pretrained_weights": False}
CPU = {"name": "cpu"}
FLASH = "flash_attention_2"


def card(capability):
    return {"name": "card", "capability": capability} if capability else CPU


def unmet(here=False, **sections):
    found = unmet_requirements(TrainingConfig.model_validate(sections), here)
    return {conflict.keys[0]: conflict for conflict in found}


@pytest.mark.parametrize(("workers", "ranks", "expected"), [(2, 1, None), (3, 1, "at most 1"), (2, 2, "at most 0")])
def test_more_workers_than_cores_are_a_warning(workers, ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    sections = {"data": {"workers": workers}, "gpu": {"name": "cpu", "count": ranks}}
    found = list(workers_over_cores(TrainingConfig.model_validate(sections)))
    assert [(each.expected, each.is_warning) for each in found] == ([(expected, True)] if expected else [])
    assert all("processes for 2 cores" in each.message for each in found)
    warnings = check(TrainingConfig.model_validate({**sections, "model": LLAMA, "gpu": CPU}), CHECK)
    assert [each.key for each in warnings if each.key == "data.workers"] == (["data.workers"] if workers > 2 else [])


@pytest.mark.parametrize(
    ("capability", "model", "fits"),
    [
        ("8.0", {"attn_implementation": FLASH}, True),
        ("7.5", {"attn_implementation": FLASH}, False),
        ("8.9", {"attn_implementation": "flash_attention_3"}, False),
        ("9.0", {"attn_implementation": "flash_attention_3"}, True),
        ("10.0", {"attn_implementation": "flash_attention_3"}, False),
        ("10.0", {"attn_implementation": "flash_attention_4"}, True),
        ("12.0", {"attn_implementation": "flash_attention_4"}, False),
        ("10.0", {"attn_implementation": FLASH}, True),
        (None, {"attn_implementation": FLASH}, False),
        (None, {"attn_implementation": "flex_attention"}, False),
        ("7.0", {"attn_implementation": "flex_attention"}, True),
        (None, {"attn_implementation": "sdpa"}, True),
        (None, {"sdpa_backend": "flash"}, True),
        (None, {"sdpa_backend": "cudnn"}, False),
        (None, {"sdpa_backend": "efficient"}, False),
        ("7.0", {"sdpa_backend": "efficient"}, True),
        ("7.5", {"sdpa_backend": "flash"}, False),
        ("8.6", {"sdpa_backend": "cudnn"}, True),
    ],
)
def test_kernels_need_their_cards(capability, model, fits):
    assert fits == (not unmet(gpu=card(capability), model=model))


def test_compile_needs_a_compiler_for_its_device(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(requirements.shutil, "which", {"clang": "/bin/clang"}.get)
    monkeypatch.setattr(requirements, "is_installed", {"triton": True}.get)
    compiled = {"compile": True}
    assert "no g++ here" in unmet(here=True, gpu=CPU, training=compiled)["training.compile"].message
    assert not unmet(here=False, gpu=CPU, training=compiled)
    assert not unmet(here=True, gpu=card("8.0"), training=compiled)
    monkeypatch.setattr(requirements, "is_installed", {}.get)
    assert "needs triton" in unmet(here=True, gpu=card("8.0"), training=compiled)["training.compile"].message
    monkeypatch.setenv("CXX", "clang")
    assert not unmet(here=True, gpu=CPU, training=compiled)


def test_a_card_known_to_be_no_cuda_card_is_taken_for_one_that_can():
    assert suits("cuda 9.0", GPUParams(name="mi300x_192gb"))
    assert not suits("cuda", GPUParams(name="cpu"))


def test_every_conflict_with_the_card_comes_in_one_report():
    """Bf16, tf32 and flash attention on capability 7.0, each with key, reason and replacement."""
    config = TrainingConfig.model_validate(
        {
            "gpu": {"name": "v100", "capability": "7.0"},
            "training": {"mixed_precision_dtype": "bf16", "tf32": True},
            "model": {**LLAMA, "attn_implementation": FLASH, "torch_dtype_str": "float32"},
        }
    )
    with pytest.raises(RequestError) as caught:
        check(config, PLAN)
    found = {problem.key: problem for problem in caught.value.problems}
    assert set(found) == {"training.mixed_precision_dtype", "training.tf32", "model.attn_implementation"}
    assert all("capability 7.0" in problem.message and "v100" in problem.message for problem in found.values())
    assert "fp16" in found["training.mixed_precision_dtype"].expected
    assert found["training.tf32"].expected == "false"
    assert found["model.attn_implementation"].expected == "sdpa"


def test_a_package_that_is_not_here_is_named_with_what_works_instead(monkeypatch):
    monkeypatch.setattr(requirements, "is_installed", lambda package: package != "flash-attn")
    model = {**LLAMA, "attn_implementation": FLASH}
    problem = unmet(here=True, gpu=card("8.0"), model=model)["model.attn_implementation"]
    assert "flash-attn, not installed" in problem.message
    assert problem.expected == "pip install flash-attn, or sdpa"
    config = TrainingConfig.model_validate({"gpu": card("8.0"), "model": model, "data": {"train": [{"path": "x"}]}})
    with pytest.raises(RequestError, match="flash-attn"):
        check(config, TRAIN)
    check(config, PLAN)  # a plan needs neither the card nor the package


@pytest.mark.parametrize(("here", "is_refused"), [("a100_40gb", True), ("rtx4090_24gb", False), (None, False)])
def test_a_look_at_a_request_for_the_card_of_another_machine_warns_of_its_packages(monkeypatch, here, is_refused):
    monkeypatch.setattr(requirements, "is_installed", lambda package: package != "flash-attn")
    monkeypatch.setattr(checks, "detect", lambda: here)
    gpu = {"name": "a100_40gb", "capability": "8.0"}
    config = TrainingConfig.model_validate({"gpu": gpu, "model": {**LLAMA, "attn_implementation": FLASH}})
    with pytest.raises(RequestError, match="flash-attn") if is_refused else contextlib.nullcontext():
        assert "model.attn_implementation" in {warning.key for warning in check(config, CHECK)}


def test_nothing_is_needed_by_the_defaults():
    assert not unmet(here=True)
    assert requirements.is_installed("torch")
    assert not requirements.is_installed("no-such-package")


@pytest.mark.parametrize("kernel", [FLASH, "flash_attention_4"])
def test_kernels_of_the_flash_package_do_not_compute_in_float32(kernel):
    config = {
        "gpu": card("10.0"),
        "model": {**LLAMA, "attn_implementation": kernel, "torch_dtype_str": "float32"},
        "training": {"mixed_precision_dtype": "none"},
    }
    with pytest.raises(RequestError, match="does not compute in float32"):
        check(TrainingConfig.model_validate(config), PLAN)


def test_ligers_kernels_need_a_card_and_two_packages(monkeypatch):
    model, key = {"enable_liger_kernel": True}, "model.enable_liger_kernel"
    assert "this is the cpu" in unmet(model=model, gpu=CPU)[key].message
    assert "capability 7.0" in unmet(model=model, gpu=card("6.1"))[key].message
    monkeypatch.setattr(requirements, "is_installed", lambda name: False)
    assert "needs liger-kernel and triton" in unmet(here=True, model=model, gpu=card("7.0"))[key].message
    assert key not in unmet(model=model, gpu=card("7.0"))


def test_a_tracker_that_is_not_installed_is_found_by_check_and_not_needed_by_a_plan(monkeypatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", {"tensorboard": True}.get)
    sections = {"gpu": CPU, "model": LLAMA, "training": {"trackers": ["tensorboard", "wandb"]}}
    config = TrainingConfig.model_validate(sections)
    with pytest.raises(RequestError) as caught:
        check(config, CHECK)
    [problem] = caught.value.problems
    assert (problem.key, problem.message) == ("training.trackers[1]", "the package wandb is not installed")
    check(config, PLAN)


def test_settings_that_a_machine_cannot_have(monkeypatch):
    monkeypatch.setattr("framework.memory.requirements.is_installed", lambda name: name != "torchao")
    found = {name: unusable_settings(GPUParams.model_validate(read_card(name))) for name in ("cpu", "a100_80gb")}
    assert found["cpu"]["model.sdpa_backend=cudnn"] == "capability 8.0"
    assert found["a100_80gb"]["training.fp8=rowwise"] == "capability 8.9, torchao"
    assert found["a100_80gb"]["training.optimizer=adamw_torchao_8bit"] == "torchao"
    assert "training.optimizer=adamw_8bit" not in found["a100_80gb"]
    assert "model.sdpa_backend=cudnn" not in found["a100_80gb"]
