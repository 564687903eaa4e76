"""Mixtures of experts: routers that are not trained, and how evenly they send tokens to their experts."""

import json

import pytest
import torch

from framework.build.model.experts import routers
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.memory.planning import make_plan
from framework.run.evaluate import evaluate
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.build.losses.test_router_loss import EXPERTS
from tests.run.test_best import config as run_config
from tests.run.test_best import run
from tests.tiny import LLAMA, split, tiny_assembly, tiny_config, unequal_rows

FAMILIES = [{**LLAMA, **settings} for settings in EXPERTS.values()]


def family(architecture):
    return architecture["model_type"]


def router_choices(assembly, batch):
    """Choices of each layer's router by the logits that transformers gives out: `[layers, experts]`."""
    assembly.model.eval()
    with torch.no_grad():
        logits = assembly.model(input_ids=batch["input_ids"], output_router_logits=True).router_logits
    assembly.model.train()
    chosen = [layer.reshape(-1, 4).topk(2, -1).indices.flatten() for layer in logits]
    return torch.stack([torch.bincount(each, minlength=4) for each in chosen])


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES, ids=family)
def test_the_share_of_the_busiest_expert_is_that_of_the_routers_logits(architecture, checkpointed):
    assembly = tiny_assembly(tiny_config(architecture, training={"enable_gradient_checkpointing": checkpointed}))
    counts = sum(router_choices(assembly, part) for part in split(unequal_rows(), 2))
    expected = float((counts.max(1).values / counts.sum(1)).mean())
    assert 0.25 < expected < 1
    evaluate(assembly, [unequal_rows()], lambda phase: None)
    result = train_step(assembly, split(unequal_rows(), 2), 1)
    assert result.busiest_expert == pytest.approx(expected)


def test_a_dense_model_has_no_busiest_expert():
    assembly = tiny_assembly(tiny_config())
    assert assembly.experts is None
    assert train_step(assembly, [unequal_rows()], 1).busiest_expert is None


def test_a_run_logs_it_for_each_step(tmp_path):
    asked = run_config(tmp_path, eval_steps=None, max_steps=2)
    architecture = {**asked.model.architecture.thaw(), **EXPERTS["mixtral"]}
    tree = asked.model_dump(exclude_unset=True)
    tree["model"]["architecture"] = architecture
    folder = run(TrainingConfig.model_validate(tree)).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [line["busiest_expert_share"] for line in lines if "loss" in line]
    assert len(shares) == 2
    assert all(0.25 <= share <= 1 for share in shares)


@pytest.mark.parametrize("architecture", FAMILIES, ids=family)
def test_frozen_routers_stay_and_all_else_is_trained(architecture):
    plain = tiny_assembly(tiny_config(architecture))
    config = tiny_config(architecture, model={"freeze_router": True}, training={"learning_rate": 1e-2})
    assembly = tiny_assembly(config)
    found = {item.key: item for item in verify(assembly)}
    assert found["model.freeze_router"].holds
    before = {name: module.weight.detach().clone() for name, module in routers(assembly.model).items()}
    assert len(before) == 2
    train_step(assembly, [unequal_rows()], 1)
    for name, module in routers(assembly.model).items():
        assert torch.equal(module.weight, before[name])
    frozen = sum(p.numel() for module in routers(plain.model).values() for p in module.parameters())
    count = [sum(p.numel() for p in each.trained) for each in (plain, assembly)]
    assert count[0] - count[1] == frozen >= 2 * 4 * 32


def test_routers_that_are_trained_after_all_stop_the_run():
    assembly = tiny_assembly(tiny_config(FAMILIES[0], model={"freeze_router": True}))
    next(iter(routers(assembly.model).values())).requires_grad_(True)
    with pytest.raises(VerificationFailed, match=r"model\.freeze_router"):
        verify(assembly)


def test_a_model_without_routers_refuses_to_freeze_them():
    with pytest.raises(RequestError, match="llama has no routers"):
        tiny_assembly(tiny_config(model={"freeze_router": True}))


def test_the_plan_has_no_gradients_and_no_states_of_frozen_routers():
    wide = {**LLAMA, **EXPERTS["mixtral"], "num_local_experts": 64, "hidden_size": 512, "num_hidden_layers": 1}
    plain, frozen = (make_plan(record(tiny_config(wide, model={"freeze_router": value}))) for value in (False, True))
    assert plain.trainable_parameters - frozen.trainable_parameters == 64 * 512
    ends = [next(phase.terms for phase in made.phases if phase.name == "optimizer_step") for made in (plain, frozen)]
    held = [terms.gradients + terms.optimizer for terms in ends]
    assert held[0] - held[1] == pytest.approx(12 * 64 * 512, rel=0.02)
