"""Liger's kernels: same losses and weights, in one model and no other, read back, refused where they are wrong."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from framework.build.levers.liger import liger_kernels, refuse_unknown_to_liger, use_liger_kernels
from framework.build.verify import READERS, verify
from framework.errors import RequestError, VerificationFailed
from framework.schema.model import ModelParams
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="liger-kernel needs triton to import, and there are wheels for Linux alone")
ON = ModelParams(enable_liger_kernel=True)
ALL = {"liger_rotary_pos_emb": 2, "LigerSwiGLUMLP": 2, "LigerRMSNorm": 5}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}


def built(architecture: dict[str, Any], params: ModelParams = ON) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    use_liger_kernels(params, model)
    return model


def interpreted(*cases: str) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.build.interpreted_liger", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    return {name: found for name, *found in map(json.loads, done.stdout.splitlines())}


def check_equal(cases: dict[str, list[dict[str, Any]]]) -> None:
    for name, (plain, with_liger) in cases.items():
        assert with_liger["losses"] == pytest.approx(plain["losses"], abs=5e-6), name
        assert with_liger["weights"] == plain["weights"], name
        assert with_liger["kernels"], name
        assert not plain["kernels"], name


def test_the_kernels_train_the_same() -> None:
    check_equal(interpreted("llama"))


@pytest.mark.slow
def test_the_kernels_train_the_same_in_other_models_and_with_other_levers() -> None:
    cases = interpreted()
    plain, wrong = cases.pop("products kept")
    check_equal(cases)
    assert wrong["losses"][1] != pytest.approx(plain["losses"][1], abs=5e-4), "the reason why this pair is refused"


def test_another_model_of_the_process_stays_as_it_is() -> None:
    assert liger_kernels(built(LLAMA)) == ALL
    assert not liger_kernels(built(LLAMA, ModelParams()))


def test_experts_stay_with_transformers() -> None:
    assert liger_kernels(built(MIXTRAL)) == {"liger_rotary_pos_emb": 2, "LigerRMSNorm": 5}


def test_what_liger_does_not_know_is_refused_with_what_works_instead() -> None:
    with pytest.raises(RequestError, match="no kernels for gpt2") as refused:
        refuse_unknown_to_liger(ON, AutoConfig.for_model(**GPT2))
    assert "training.compile" in str(refused.value.problems[0].expected)
    refuse_unknown_to_liger(ModelParams(), AutoConfig.for_model(**GPT2))
    refuse_unknown_to_liger(ON, AutoConfig.for_model(**LLAMA))


def test_an_mlp_that_computes_something_else_is_refused() -> None:
    with pytest.raises(RequestError, match="computes silu, and this model's activation is GELU"):
        built({**LLAMA, "hidden_act": "gelu"})


def test_kernels_are_read_back_from_the_forwards() -> None:
    assembly = tiny_assembly(tiny_config(LLAMA, model={"enable_liger_kernel": True}))
    [reading] = READERS["liger_kernels"](assembly)
    assert (reading.asked, reading.found) == ("2/2 blocks", "2/2 blocks")
    assert reading.source == "5 LigerRMSNorm, 2 LigerSwiGLUMLP, 2 liger_rotary_pos_emb"


def test_blocks_without_kernels_stop_the_run_and_kernels_nobody_asked_for_too() -> None:
    assembly = tiny_assembly(tiny_config(LLAMA, model={"enable_liger_kernel": True}))
    for module in assembly.model.modules():
        vars(module).pop("forward", None)
    with pytest.raises(VerificationFailed, match=r"asked 2/2 blocks, in effect 0/2 blocks"):
        verify(assembly)
    assembly = tiny_assembly(tiny_config(LLAMA))
    use_liger_kernels(ON, assembly.model)  # type: ignore[arg-type]
    [reading] = READERS["liger_kernels"](assembly)
    assert not reading.holds


def test_saved_weights_have_the_names_and_numbers_of_plain_ones(tmp_path: Any) -> None:
    torch.manual_seed(0)
    plain = built(LLAMA, ModelParams())
    patched = built(LLAMA)
    patched.load_state_dict(plain.state_dict())
    patched.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not liger_kernels(again)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in again.state_dict().items())
