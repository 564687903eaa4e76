"""A base that stays on the host trains as one on the device; its weights visit two slots, block by block."""

from typing import Any

import pytest
import torch

from framework.build.levers.streamed_base import blocks_of
from framework.build.verify import FirstStep, verify, verify_first_step
from framework.errors import RequestError, VerificationFailed
from framework.run.step import eval_step, train_step
from tests.grids import chosen, thinned
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows

DEEP = {**LLAMA, "num_hidden_layers": 5}
DEEP_GPT2 = {**GPT2, "n_layer": 5}


def config(architecture: dict[str, Any] = DEEP, offload: bool = True, **sections: Any):
    model = {"offload_frozen_base": offload, **sections.pop("model", {})}
    training = {"use_peft": True, "learning_rate": 1e-2, **sections.pop("training", {})}
    peft = {"lora_target_modules": ["all-linear"], "lora_dropout": 0.0, **sections.pop("peft", {})}
    return tiny_config(architecture, model=model, training=training, peft=peft, **sections)


def trained(made, steps: int = 3):
    losses = [train_step(made, split(unequal_rows(), 4), step).loss for step in range(1, steps + 1)]
    return losses, {name: p.detach().clone() for name, p in made.model.named_parameters() if p.requires_grad}


ARCHITECTURES = {"four": DEEP, "gpt2": DEEP_GPT2, "two": LLAMA, "one": {**LLAMA, "num_hidden_layers": 1}}
CHECKPOINTS = {"enable_gradient_checkpointing": True}
SECTIONS = {
    "plain": {},
    "checkpoints": {"training": CHECKPOINTS},
    "reentrant": {"training": {**CHECKPOINTS, "gradient_checkpointing_kwargs": {"use_reentrant": True}}},
    "every second": {"training": {**CHECKPOINTS, "gradient_checkpointing_every": 2}},
    "bf16": {"training": {"mixed_precision_dtype": "bf16"}, "model": {"torch_dtype_str": "bfloat16"}},
    "autocast": {"training": {"mixed_precision_dtype": "bf16"}},
    "dora": {"peft": {"peft_method": "dora"}},
    "prompt": {"peft": {"peft_method": "prompt", "num_virtual_tokens": 4}},
}


QUICK = [SECTIONS[name] for name in ("plain", "checkpoints", "every second", "bf16", "dora")]


@pytest.mark.parametrize(("sections", "architecture"), chosen(QUICK, thinned(SECTIONS, ARCHITECTURES)))
def test_it_trains_as_a_base_on_the_device_does(architecture, sections):
    """Exactly: the same kernels see the same numbers, with checkpointing and without."""
    plain = tiny_assembly(config(architecture, offload=False, **{k: dict(v) for k, v in sections.items()}))
    streamed = tiny_assembly(config(architecture, **{k: dict(v) for k, v in sections.items()}))
    losses, weights = trained(plain)
    again, others = trained(streamed)
    assert losses == again
    assert losses[-1] < losses[0]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert eval_step(plain, unequal_rows())["loss"] == eval_step(streamed, unequal_rows())["loss"]


def test_the_slots_are_really_what_computes():
    """The emulated device is other memory: weights that change at home after their copy do not show."""
    made = tiny_assembly(config({**LLAMA, "num_hidden_layers": 2}))
    assert made.streamed is not None
    before = eval_step(made, unequal_rows())["loss"]
    for home in made.streamed.homes:
        home.zero_()
    assert eval_step(made, unequal_rows())["loss"] == before, "both blocks are in their slots already"
    made.streamed._held.clear()
    assert eval_step(made, unequal_rows())["loss"] != before


def test_autograd_without_checkpoints_reads_what_has_come_again():
    """Backward of block 0 must not see block 2, which was in its slot at the end of forward."""
    made = tiny_assembly(config())
    assert made.streamed is not None
    trained(made, 1)
    sizes = [len(home) for home in made.streamed.homes]
    assert made.streamed.copied_bytes == 2 * made.streamed.bytes_per_micro_batch + sum(sizes[:2])
    assert made.streamed.bytes_per_micro_batch == 2 * sum(sizes[:3])


def test_between_steps_the_weights_are_at_home():
    made = tiny_assembly(config())
    reading = next(item for item in verify(made) if item.key == "model.offload_frozen_base")
    assert (reading.asked, reading.found) == ("5/5 blocks", "5/5 blocks")
    trained(made, 1)
    verify_first_step(made, FirstStep(((8, 24),)))


def test_a_block_that_stayed_on_the_device_stops_the_run():
    made = tiny_assembly(config())
    weight = next(p for p in blocks_of(made.model)[3].parameters() if not p.requires_grad)
    weight.data = weight.data.clone()
    made.streamed.blocks[3].parts.clear()
    with pytest.raises(VerificationFailed, match="offload_frozen_base: asked 5/5 blocks, in effect 4/5 blocks"):
        verify(made)


def test_a_step_that_failed_leaves_nothing_behind():
    """The next forward pass starts from the weights at home, whatever backward was doing."""
    plain, made = tiny_assembly(config(offload=False)), tiny_assembly(config())
    target = blocks_of(made.model)[2]
    handle = target.register_full_backward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        train_step(made, [unequal_rows()], 1)
    handle.remove()
    made.optimizer.zero_grad()
    assert trained(plain)[0] == trained(made)[0]


def test_dissolved_it_is_a_whole_model():
    plain, made = tiny_assembly(config(offload=False)), tiny_assembly(config())
    assert made.streamed is not None
    trained(plain), trained(made)
    made.streamed.dissolve(made.model)
    expected = plain.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in made.model.state_dict().items())
    addresses = [p.untyped_storage().data_ptr() for p in made.model.parameters()]
    assert len(set(addresses)) == len(addresses)
    assert not any(block._forward_pre_hooks for block in blocks_of(made.model))
    assert eval_step(plain, unequal_rows())["loss"] == eval_step(made, unequal_rows())["loss"]


def test_weights_that_blocks_share_stay_on_the_device():
    from framework.build.levers.streamed_base import StreamedBase
    from framework.build.place import real_place

    made = tiny_assembly(config(offload=False))
    first, second = blocks_of(made.model)[:2]
    second.input_layernorm.weight = first.input_layernorm.weight
    shared = first.input_layernorm.weight
    streamed = StreamedBase(made.model, real_place(torch.device("cpu")))
    assert shared not in streamed.parameters
    assert made.model.get_input_embeddings().weight not in streamed.parameters
    assert all(not parameter.requires_grad for parameter in streamed.parameters)


def test_a_model_without_blocks_is_refused(monkeypatch):
    monkeypatch.setattr("framework.build.levers.streamed_base.blocks_of", lambda model: [])
    with pytest.raises(RequestError, match="no blocks"):
        tiny_assembly(config())


@pytest.mark.parametrize(("checkpointing", "architecture"), thinned([False, True], {"llama": DEEP, "gpt2": DEEP_GPT2}))
def test_a_block_computes_on_its_slot_in_forward_and_in_backward(architecture, checkpointing):
    """On the CPU a weight at home would give the same numbers; on a card it is on the wrong device."""
    made = tiny_assembly(config(architecture, training={"enable_gradient_checkpointing": checkpointing}))
    assert made.streamed is not None
    slots = [slot.untyped_storage().data_ptr() for slot in made.streamed.slots]
    seen = []

    def look(when, number, block):
        at = {p.untyped_storage().data_ptr() for p in block.parameters() if not p.requires_grad}
        seen.append((when, number, at == {slots[number % 2]}))

    def note(number, block):
        inside = next(module for name, module in block.named_modules() if name.endswith(("q_proj", "c_attn")))

        def forward(module, inputs, output):
            look("forward", number, block)
            if output.requires_grad:
                output.register_hook(lambda grad: look("backward", number, block))

        inside.register_forward_hook(forward)

    for number, block in enumerate(blocks_of(made.model)):
        note(number, block)
    train_step(made, [unequal_rows()], 1)
    assert all(on_slot for *_, on_slot in seen)
    assert [number for when, number, _ in seen if when == "backward"] == [4, 3, 2, 1, 0]
    assert sum(when == "forward" for when, *_ in seen) == (10 if checkpointing else 5)
