"""The saves of a run with an adapter compute what the run computed: adapter, base next to it, merged."""

import json
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.checkpoints.export import export
from framework.run.step import train_step
from tests.build.adapters.test_adapter import METHODS, MIXTRAL, MOE, UNLIKE, adapted, steps
from tests.grids import first, slow, thinned
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, unequal_rows

TIED = {**LLAMA, "tie_word_embeddings": True}
MODES = ["adapter_only", "adapter_and_base_model", "merged"]
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
IDS = unequal_rows()["input_ids"][:2]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits[:, -IDS.shape[1] :]


def trained(config):
    """(assembly after three steps, its logits, its base from before them)."""
    base = tiny_assembly(config.model_copy(update={"training": config.training.model_copy(update={"use_peft": False})}))
    assembly = tiny_assembly(config)
    steps(assembly, 3)
    return assembly, logits(assembly.model), base.model


def close(found, expected):
    assert (found - expected).abs().max() <= 1e-5 * max(1, float(expected.abs().max()))


@pytest.mark.parametrize(("method", "architecture"), thinned(METHODS, {"llama": LLAMA, "gpt2": GPT2}))
def test_an_adapter_by_itself_fits_the_original_base(method, architecture, tmp_path):
    if method in ("olora", "oft") and architecture is GPT2:
        pytest.skip("refused: see test_olora_on_conv1d_is_refused, test_what_oft_cannot_be_on_is_refused")
    assembly, expected, base = trained(adapted(method, architecture))
    export(assembly, TOKENIZER, tmp_path / "final")
    close(logits(PeftModel.from_pretrained(base, tmp_path / "final")), expected)
    with safe_open(tmp_path / "final" / "adapter_model.safetensors", "pt") as stored:
        assert not [name for name in stored.keys() if "_orig_mod" in name or "base_layer" in name]  # noqa: SIM118


@pytest.mark.parametrize("architecture", first(1, [MOE, MIXTRAL]), ids=lambda a: a["model_type"])
def test_adapted_experts_are_saved(architecture, tmp_path):
    assembly, expected, base = trained(adapted(architecture=architecture))
    export(assembly, TOKENIZER, tmp_path / "final")
    close(logits(PeftModel.from_pretrained(base, tmp_path / "final")), expected)


@pytest.mark.parametrize("method", UNLIKE)
def test_an_adapter_is_applied_to_the_base_saved_next_to_it(method, tmp_path):
    assembly, expected, _ = trained(adapted(method, peft_save_mode="adapter_and_base_model"))
    export(assembly, TOKENIZER, tmp_path / "final")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "base_model")
    close(logits(PeftModel.from_pretrained(base, tmp_path / "final")), expected)
    found = json.loads((tmp_path / "final" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert found == str(tmp_path / "final" / "base_model")


@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        *[(name, LLAMA) for name in ("lora", "dora", "vera")],
        *[("dora", GPT2), ("lora", MOE), slow("lora", GPT2), slow("lora", MIXTRAL)],
        *[slow(name, LLAMA) for name in ("rslora", "olora", "pissa", "ia3", "oft")],
    ],
)
def test_a_merged_model_is_a_plain_one(method, architecture, tmp_path):
    assembly, expected, _ = trained(adapted(method, architecture, peft_save_mode="merged"))
    export(assembly, TOKENIZER, tmp_path / "final")
    assert not (tmp_path / "final" / "adapter_config.json").exists()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    close(logits(model), expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, where the test loads
@pytest.mark.parametrize(
    ("mode", "method", "modules"), thinned(MODES, ["lora", "vera", "ia3", "oft"], [["lm_head"], ["embed_tokens"]])
)
def test_a_trained_head_of_tied_embeddings(mode, method, modules, tmp_path):
    config = adapted(method, TIED, peft_save_mode=mode, lora_modules_to_save=modules)
    assembly, expected, base = trained(config)
    causal = assembly.adapter.model.get_base_model()
    tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    assert tied is (method == "lora")
    assert tied or "separate weights" in " ".join(assembly.adapter.warnings)
    export(assembly, TOKENIZER, tmp_path / "final")
    if mode == "merged":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    elif mode == "adapter_only":
        model = PeftModel.from_pretrained(base, tmp_path / "final")
    else:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "base_model")
        model = PeftModel.from_pretrained(base, tmp_path / "final")
    close(logits(model), expected)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, where the test loads
@pytest.mark.parametrize(
    ("method", "targets"), thinned(["lora", "dora"], [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
)
def test_an_update_of_one_of_two_that_share_a_weight_reaches_it_alone(method, targets, tmp_path):
    """Added into the shared weight it would change the other of the two as well."""
    assembly, expected, _ = trained(adapted(method, TIED, peft_save_mode="merged", lora_target_modules=targets))
    export(assembly, TOKENIZER, tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    close(logits(model), expected)


@pytest.mark.parametrize(
    ("method", "modules", "mode"), thinned(["lora", "vera", "ia3", "oft"], [["mlp"], ["norm", "lm_head"]], MODES)
)
def test_modules_trained_whole_of_any_size(method, modules, mode, tmp_path):
    assembly, expected, base = trained(adapted(method, peft_save_mode=mode, lora_modules_to_save=modules))
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    export(assembly, TOKENIZER, tmp_path / "final")
    if mode == "merged":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    elif mode == "adapter_only":
        model = PeftModel.from_pretrained(base, tmp_path / "final")
    else:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "base_model")
        assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
        model = PeftModel.from_pretrained(base, tmp_path / "final")
    close(logits(model), expected)


@pytest.mark.parametrize("method", UNLIKE)
def test_a_resumed_adapter_resumes_as_if_it_had_not_stopped(method, tmp_path):
    config = adapted(method, lora_plus_lr_ratio=4 if method == "lora" else None)
    straight = tiny_assembly(config)
    expected = steps(straight, 4)
    first = tiny_assembly(config)
    steps(first, 2)
    path = save_checkpoint(tmp_path, contents_of(first, 2), keep=1)
    again = tiny_assembly(config)
    assert load_checkpoint(path, again) == 2
    resumed = [train_step(again, split(unequal_rows(), 4), step).loss for step in (3, 4)]
    assert resumed == expected[2:]


def test_nothing_is_warned_of_when_an_adapter_is_saved(tmp_path):
    assembly, *_ = trained(adapted(lora_target_modules=["lm_head", "q_proj"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(assembly, TOKENIZER, tmp_path / "final")
