"""Initial values of LoRA's A matrices, whether they are trained, and OFT's rotations."""

import pytest
import torch

from framework.build.adapters.first_adapter import start_layers
from framework.build.adapters.merge import merge
from framework.build.model.parts import causal_model
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.memory.planning import make_plan
from framework.run.checkpoints.checkpoint import contents_of, load_checkpoint, save_checkpoint
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.choices import PeftMethod
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

WIDE = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}
TARGETS = {"lora_target_modules": ["q_proj", "down_proj"]}


def configured(architecture=WIDE, training=None, **peft):
    asked = {"use_peft": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **(training or {})}
    return tiny_config(architecture, training=asked, peft={**TARGETS, **peft})


def named(assembly, part):
    return {name: item for name, item in assembly.model.named_parameters() if part in name}


def found(assembly):
    return {item.key: item.found for item in verify(assembly)}


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize(("start", "spread"), [("gaussian", 1 / 4), ("kaiming", (3 * 128) ** -0.5)])
def test_a_starts_as_it_was_asked_to(method, start, spread):
    assembly = tiny_assembly(configured(peft_method=method, lora_r=4, lora_init=start))
    assert found(assembly)["peft.lora_init"] == start
    matrices = [item for name, item in named(assembly, "lora_A").items() if "q_proj" in name]
    assert float(torch.cat(matrices).std().detach()) == pytest.approx(spread, rel=0.1)
    assert not any(item.any() for item in named(assembly, "lora_B").values())


def test_another_start_than_asked_for_stops_the_run():
    assembly = tiny_assembly(configured(lora_init="gaussian"))
    layers = [
        (name, module) for name, module in causal_model(assembly.model).named_modules() if hasattr(module, "lora_A")
    ]
    start_layers(layers, 0, assembly.place, TrainingConfig().peft)
    with pytest.raises(VerificationFailed, match="lora_init: asked gaussian, in effect kaiming"):
        verify(assembly)


def test_frozen_factors_stay_and_the_others_train_as_they_would_have():
    """B starts at 0, so the first step moves no A either way."""
    plain, frozen = tiny_assembly(configured()), tiny_assembly(configured(lora_freeze_a=True))
    assert found(frozen)["peft.lora_freeze_a"] == "4 of 4"
    before = {name: item.detach().clone() for name, item in named(frozen, "lora_A").items()}
    losses = [train_step(each, [unequal_rows()], 1).loss for each in (plain, frozen)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, item in named(frozen, "lora_B").items():
        torch.testing.assert_close(item, named(plain, "lora_B")[name], rtol=1e-4, atol=1e-5)
    losses = [train_step(frozen, [unequal_rows()], step).loss for step in range(2, 6)]
    assert losses[-1] < losses[0]
    for name, item in named(frozen, "lora_A").items():
        assert torch.equal(item, before[name])
    assert all("lora_B" in name for name, item in frozen.model.named_parameters() if item.requires_grad)


def test_frozen_factors_are_no_part_of_a_base_in_half_precision():
    config = tiny_config(
        WIDE,
        training={"use_peft": True, "mixed_precision_dtype": "bf16"},
        model={"torch_dtype_str": "bfloat16"},
        peft={**TARGETS, "lora_freeze_a": True},
    )
    readings = found(tiny_assembly(config))
    assert readings["model.torch_dtype_str"] == "bfloat16"
    assert readings["peft.adapter_dtype"] == "float32"


def test_a_checkpoint_has_the_frozen_factors(tmp_path):
    """Another device would draw others from the same seed."""
    first = tiny_assembly(configured(lora_freeze_a=True))
    train_step(first, [unequal_rows()], 1)
    path = save_checkpoint(tmp_path, contents_of(first, 1), 2)
    resumed = tiny_assembly(configured(lora_freeze_a=True, training={"seed": 7}))
    assert not all(item.equal(named(first, "lora_A")[name]) for name, item in named(resumed, "lora_A").items())
    load_checkpoint(path, resumed, is_other_allowed=True)
    for name, item in named(resumed, "lora_").items():
        assert torch.equal(item, named(first, "lora_")[name]), name


def test_trained_factors_that_were_to_be_frozen_stop_the_run():
    assembly = tiny_assembly(configured(lora_freeze_a=True))
    next(iter(named(assembly, "lora_A").values())).requires_grad_(True)
    with pytest.raises(VerificationFailed, match="lora_freeze_a: asked 4 of 4, in effect 3 of 4"):
        verify(assembly)


def test_frozen_factors_take_no_gradients_no_states_and_fewer_activations():
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}
    rehearsals = [record(configured(wide, lora_r=64, lora_freeze_a=value)) for value in (False, True)]
    plain, frozen = map(make_plan, rehearsals)
    trained = 2 * 64 * (512 + 512)  # B of two layers
    assert frozen.trainable_parameters == trained
    assert plain.trainable_parameters == trained + 2 * 64 * (512 + 1024)
    gone = plain.trainable_parameters - frozen.trainable_parameters
    ends = [next(phase.terms for phase in made.phases if phase.name == "optimizer_step") for made in (plain, frozen)]
    assert ends[0].gradients - ends[1].gradients == pytest.approx(4 * gone, rel=0.02)
    assert ends[0].optimizer - ends[1].optimizer == pytest.approx(8 * gone, rel=0.02)
    kept = [next(phase.terms.activations for phase in made.phases if phase.name == "loss") for made in (plain, frozen)]
    assert kept[1] < kept[0]
    launched = [len(rehearsal.trace.operations) for rehearsal in rehearsals]
    assert launched[1] < launched[0], "no product is made for a gradient that nobody wants"


def rotation(weight, size):
    """Cayley's (I + Q)(I - Q)^-1 of each block as a series of five terms, as peft's default computes it."""
    blocks = []
    for row in weight.detach().double():
        skew = torch.zeros(size, size, dtype=torch.float64)
        skew[tuple(torch.triu_indices(size, size, 1))] = row
        skew = skew - skew.T
        powers = [torch.linalg.matrix_power(skew, power) for power in range(5)]
        blocks.append(powers[0] + 2 * (powers[1] + powers[2] + powers[3]) + powers[4])
    return torch.block_diag(*blocks)


def test_oft_rotates_the_inputs_and_merges_into_the_weights():
    assembly = tiny_assembly(configured(peft_method="oft", oft_block_size=16))
    readings = found(assembly)
    assert readings["peft.peft_method"] == "oft"
    assert readings["peft.oft_block_size"] == "16"
    first, *_, last = [train_step(assembly, [unequal_rows()], step).loss for step in range(1, 6)]
    assert last < first
    layer = causal_model(assembly.model).model.layers[1].self_attn.q_proj
    turned = rotation(layer.oft_R["default"].weight, 16)
    assert (turned @ turned.T - torch.eye(128)).abs().max() < 1e-2, "nearly orthogonal"
    inputs = torch.randn(5, 128)
    expected = inputs.double() @ turned @ layer.get_base_layer().weight.double().T
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=1e-4, atol=1e-5)
    assembly.model.eval()
    ids = unequal_rows()["input_ids"]
    with torch.no_grad():
        before = assembly.model(input_ids=ids).logits
        after = merge(assembly.adapter.model, torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def test_oft_trains_half_a_block_squared_for_each_block():
    made = make_plan(record(configured(peft_method="oft", oft_block_size=16)))
    assert made.trainable_parameters == 2 * (128 // 16 + 256 // 16) * 16 * 15 // 2


@pytest.mark.parametrize(
    ("architecture", "peft", "message"),
    [
        (WIDE, {"oft_block_size": 24}, "24 does not divide the 128 inputs"),
        (GPT2, {"lora_target_modules": ["c_attn"]}, "oft"),
    ],
)
def test_what_oft_cannot_be_on_is_refused(architecture, peft, message):
    with pytest.raises(RequestError, match=message):
        tiny_assembly(configured(architecture, peft_method="oft", **peft))


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"peft": {"lora_init": "eva"}, "data": {"streaming": True}}, ("peft.lora_init", "data.streaming")),
        ({"peft": {"lora_freeze_a": True}, "training": {"fp8": "tensorwise"}}, ("peft.lora_freeze_a", "training.fp8")),
        (
            {"peft": {"lora_freeze_a": True}, "model": {"offload_frozen_base": True}},
            ("peft.lora_freeze_a", "model.offload_frozen_base"),
        ),
        ({"peft": {"lora_init": "eva"}, "gpu": {"count": 2}}, ("peft.lora_init", "gpu.count")),
        ({"peft": {"peft_method": "oft"}, "training": {"compile": True}}, ("peft.peft_method", "training.compile")),
    ],
)
def test_what_they_do_not_go_with_is_refused(sections, keys):
    config = TrainingConfig.model_validate({**sections, "training": {"use_peft": True, **sections.get("training", {})}})
    assert keys in {item.keys for item in find_conflicts(config, Needs()) if not item.is_warning}


@pytest.mark.parametrize("method", PeftMethod)
def test_frozen_factors_and_starts_are_unused_where_there_are_none(method):
    config = TrainingConfig.model_validate(
        {"training": {"use_peft": True}, "peft": {"peft_method": method, "lora_init": "gaussian"}}
    )
    unused = {item.keys[0] for item in find_conflicts(config, Needs()) if item.message.startswith("has no effect")}
    assert ("peft.lora_init" in unused) == (method not in (PeftMethod.LORA, PeftMethod.RSLORA, PeftMethod.DORA))
