"""`training.parameter_groups`: rates and decays by the names of weights, under every optimizer."""

import pytest

from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts
from tests.optimizers import ON_CPU, WIDE, eager, training  # noqa: F401
from tests.tiny import tiny_assembly, tiny_config, unequal_rows


def assembled(groups, optimizer="adamw_torch", architecture=WIDE, peft=None, **more):
    asked = training(optimizer, **{"parameter_groups": groups, "weight_decay": 0.1, **more})
    if peft is not None:
        asked["use_peft"] = True
    return tiny_assembly(tiny_config(architecture, training=asked, **({"peft": peft} if peft else {})))


def settings(assembly):
    """Name of each trained weight -> the rate and decay that its group has after a step."""
    train_step(assembly, [unequal_rows()], 1)
    held = {id(item): group for group in assembly.optimizer.param_groups for item in group["params"]}
    named = {name: held[id(item)] for name, item in assembly.model.named_parameters() if id(item) in held}
    return {name: (float(group["lr"]), group["weight_decay"]) for name, group in named.items()}


def test_rates_and_decays_are_those_of_the_pattern_and_all_others_keep_theirs():
    groups = [{"match": "layers.0", "learning_rate": 1e-4}, {"match": "lm_head", "weight_decay": 0.5}]
    assembly = assembled(groups, learning_rate=1e-3)
    assert {item.key for item in verify(assembly)} >= {f"training.parameter_groups[{index}]" for index in (0, 1)}
    for name, (rate, decay) in settings(assembly).items():
        assert rate == pytest.approx(1e-4 if ".layers.0." in name else 1e-3), name
        assert decay == (0.0 if "norm" in name else 0.5 if "lm_head" in name else 0.1), name


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("optimizer", ON_CPU)
def test_under_every_optimizer_weights_of_a_low_rate_hardly_move(optimizer):
    groups = [{"match": "layers.1.mlp", "learning_rate": 1e-12, "weight_decay": 0.0}]
    assembly = assembled(groups, optimizer, weight_decay=0.0)
    before = {name: item.detach().clone() for name, item in assembly.model.named_parameters()}
    train_step(assembly, [unequal_rows()], 1)
    for name, item in assembly.model.named_parameters():
        moved = float((item - before[name]).abs().max().detach())
        assert moved < 1e-9 if ".layers.1.mlp." in name else moved > 1e-7, name


def test_the_faster_matrices_of_an_adapter_are_so_by_their_own_ratio():
    groups = [{"match": "layers.0", "learning_rate": 2e-3}]
    peft = {"lora_plus_lr_ratio": 16.0, "lora_target_modules": ["q_proj"]}
    assembly = assembled(groups, learning_rate=1e-3, peft=peft)
    assert {item.key: item.found for item in verify(assembly)}["peft.lora_plus_lr_ratio"] == "16"
    for name, (rate, _) in settings(assembly).items():
        assert rate == pytest.approx((2e-3 if ".layers.0." in name else 1e-3) * (16 if "lora_B" in name else 1)), name


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "layers.7", "learning_rate": 1e-4}], "'layers.7' matches no weight of this model"),
        ([{"match": "mlp", "learning_rate": 1e-4}, {"match": "layers.0", "weight_decay": 0.0}], "both match"),
    ],
)
def test_patterns_that_match_nothing_or_share_a_weight_are_refused(groups, message):
    with pytest.raises(RequestError, match=message):
        assembled(groups)


def test_a_pattern_of_frozen_weights_is_refused():
    with pytest.raises(RequestError, match="not trained"):
        assembled([{"match": "gate_proj", "learning_rate": 1e-4}], peft={"lora_target_modules": ["q_proj"]})


def test_a_group_that_changes_nothing_and_a_multiple_of_no_rate_are_refused():
    asked = [{"match": "mlp"}, {"match": "lm_head", "learning_rate": 1e-4}]
    config = TrainingConfig.model_validate({"training": {"parameter_groups": asked, "learning_rate": 0}})
    keys = {item.keys[0] for item in find_conflicts(config, Needs()) if not item.is_warning}
    assert {"training.parameter_groups[0]", "training.parameter_groups[1].learning_rate"} <= keys


def test_a_group_at_another_rate_than_asked_for_stops_the_run():
    assembly = assembled([{"match": "lm_head", "learning_rate": 1e-4}])
    for group in assembly.optimizer.param_groups:
        group.pop("rate_factor", None)
    with pytest.raises(VerificationFailed, match=r"parameter_groups\[0\]: asked rate 0.0001"):
        verify(assembly)
