import pytest
import torch

from framework.build.verify import missing_gradients, verify
from framework.errors import RequestError, VerificationFailed
from framework.run.step import train_step
from tests.tiny import GEMMA2, GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows


def found(config):
    return {reading.key: reading.found for reading in verify(tiny_assembly(config))}


def test_what_was_asked_for_is_read_back():
    config = tiny_config(
        {**LLAMA, "num_hidden_layers": 3},
        training={"enable_gradient_checkpointing": True, "optimizer": "adamw_torch_fused"},
        model={"attn_implementation": "eager", "torch_dtype_str": "bfloat16", "chunked_loss": 8},
    )
    readings = found(config)
    assert readings["training.enable_gradient_checkpointing"] == "3/3"
    assert readings["training.optimizer"] == "adamw_torch_fused"
    assert readings["model.attn_implementation"] == "eager"
    assert readings["model.torch_dtype_str"] == "bfloat16"
    assert readings["model.chunked_loss"] == "8"


@pytest.mark.parametrize("autocast", ["none", "bf16", "fp16"])
def test_autocast_and_its_masters_are_read_back(autocast):
    assembly = tiny_assembly(tiny_config(training={"mixed_precision_dtype": autocast}))
    reading = next(item for item in verify(assembly) if item.key == "training.mixed_precision_dtype")
    assert reading.found == autocast
    assert ("float32 masters" in reading.source) == (autocast != "none")
    assert ("loss scale 65536" in reading.source) == (autocast == "fp16")


def test_float16_without_its_scaler_stops_the_run():
    import dataclasses

    assembly = tiny_assembly(tiny_config(training={"mixed_precision_dtype": "fp16"}))
    plain = tiny_assembly(tiny_config())
    with pytest.raises(VerificationFailed, match="asked fp16, in effect fp16 without a loss scaler"):
        verify(dataclasses.replace(assembly, loss_scale=plain.loss_scale))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_adapter_on_a_half_precision_base_is_float32(dtype):
    """Fp16 weights with fp16 autocast train, because the weights trained next to them are float32."""
    autocast = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    config = tiny_config(
        model={"torch_dtype_str": dtype},
        training={"use_peft": True, "mixed_precision_dtype": autocast, "learning_rate": 1e-2},
        peft={"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"]},
    )
    assembly = tiny_assembly(config)
    verify(assembly)
    assert {parameter.dtype for parameter in assembly.trained} == {torch.float32}
    losses = [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 4)]
    assert losses[-1] < losses[0]


def test_checkpointing_lost_after_building_stops_the_run():
    """The option was asked for, and something switched it off again."""
    assembly = tiny_assembly(tiny_config(training={"enable_gradient_checkpointing": True}))
    for module in assembly.model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    with pytest.raises(VerificationFailed, match=r"enable_gradient_checkpointing: asked 2/2, in effect 0/2"):
        verify(assembly)


def test_checkpointing_in_eval_mode_does_not_count():
    assembly = tiny_assembly(tiny_config(training={"enable_gradient_checkpointing": True}))
    assembly.model.eval()
    with pytest.raises(VerificationFailed, match="in effect 0/2"):
        verify(assembly)


def test_another_optimizer_than_the_one_asked_for_stops_the_run():
    """The optimizer was swapped behind our back."""
    import dataclasses

    assembly = tiny_assembly(tiny_config(training={"optimizer": "adamw_torch_fused"}))
    plain = torch.optim.AdamW(assembly.trained)
    with pytest.raises(VerificationFailed, match="asked adamw_torch_fused, in effect adamw_torch"):
        verify(dataclasses.replace(assembly, optimizer=plain))
    other = torch.optim.Adam(assembly.trained)
    with pytest.raises(VerificationFailed, match="in effect Adam"):
        verify(dataclasses.replace(assembly, optimizer=other))


def test_chunked_loss_is_refused_where_the_model_changes_its_logits():
    """A change that no known setting announces shows in a forward pass: here a cap added after the model was built."""
    uncapped = {**GEMMA2, "final_logit_softcapping": None}
    assembly = tiny_assembly(tiny_config(uncapped, model={"chunked_loss": True}))
    verify(assembly)
    assembly.model.config.final_logit_softcapping = 3.0
    with pytest.raises(VerificationFailed, match=r"model\.chunked_loss.*changes its logits"):
        verify(assembly)


def test_lora_trains_the_adapter_alone():
    assembly = tiny_assembly(
        tiny_config(training={"use_peft": True}, peft={"lora_target_modules": ["q_proj", "v_proj"]})
    )
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["peft.peft_method"].source == "4 Linear; 1,792 trained parameters"
    trained = {name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(("architecture", "suffix"), [(LLAMA, "q_proj (2)"), (GPT2, "c_attn (2)")])
def test_adapter_targets_of_another_family_are_named(architecture, suffix):
    """Every target that names nothing is reported, with the linear layers there are."""
    config = tiny_config(architecture, training={"use_peft": True}, peft={"lora_target_modules": ["query", "valu"]})
    with pytest.raises(RequestError) as caught:
        tiny_assembly(config)
    assert [problem.key for problem in caught.value.problems] == [
        "peft.lora_target_modules[0]",
        "peft.lora_target_modules[1]",
    ]
    assert suffix in (caught.value.problems[0].expected or "")


def test_missing_gradients_are_found():
    assembly = tiny_assembly(tiny_config())
    assert "lm_head.weight" in missing_gradients(assembly)


def test_an_attention_kernel_that_cannot_run_names_the_nearest_that_can():
    config = tiny_config(model={"attn_implementation": "flash_attention_2"})
    with pytest.raises(RequestError) as caught:
        tiny_assembly(config)
    (problem,) = caught.value.problems
    assert problem.key == "model.attn_implementation"
    assert "eager" in (problem.nearest or "")
