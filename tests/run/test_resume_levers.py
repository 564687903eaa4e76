"""A run resumed with another exact lever makes the same steps as without."""

import json
import shutil

import pytest

from framework.errors import RequestError
from framework.memory.explain.moves import propose
from framework.memory.levers import LEVERS
from framework.run.checkpoints.resume import check_allowed, check_resume, resume_with
from framework.schema.optimizers import FACTS, Optimizer
from tests.grids import first, slow
from tests.run.test_preference_run import config as preference
from tests.run.test_preference_run import files  # noqa: F401
from tests.run.test_trainer import config, corpus, metrics, train  # noqa: F401
from tests.tiny import LLAMA, tiny_config

H100 = {"name": "h100_80gb", "capability": "9.0", "usable_bytes": 80 << 30}
STEPS = {"max_steps": 6, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
LORA = {"lora_target_modules": ["all-linear"]}
SETTINGS = [
    ("training.optimizer_offload", "host"),
    ("training.optimizer_in_backward", True),
    ("training.enable_gradient_checkpointing", True),
    ("training.activation_offload", True),
    ("training.per_device_train_batch_size", 1),
    ("training.optimizer", "adamw_torch_fused"),
    ("model.attn_implementation", "eager"),
    ("model.chunked_loss", True),
    ("data.padding_free", True),
    ("data.pad_to_multiple_of", 16),
]


@pytest.fixture
def all_packages(monkeypatch):
    """Every package that an optimizer comes from counts as installed."""
    for module in ("requirements", "explain.moves"):
        monkeypatch.setattr(f"framework.memory.{module}.is_installed", lambda name: True)


def with_key(made, key, value):
    section, name = key.split(".")
    return made.model_copy(
        update={section: getattr(made, section).__class__(**{**getattr(made, section).model_dump(), name: value})}
    )


def begun(run, folder):
    """The same run in `folder`, ended after its third step."""
    shorter = with_key(with_key(run, "training.max_steps", 3), "training.output_dir", str(folder))
    train(shorter)
    return folder


def go_on(run, kept, folder, allow):
    """The losses of a run resumed from the checkpoint, in its own folder."""
    shutil.copytree(kept, folder)
    train(with_key(run, "training.output_dir", str(folder)), resume=True, allow=["training.max_steps", *allow])
    return metrics(folder)


@pytest.fixture(scope="module")
def full(corpus, tmp_path_factory):  # noqa: F811
    """A run of six steps without clipping or dropout, its losses, and the same run ended after three."""
    folder = tmp_path_factory.mktemp("full")
    steps = {**STEPS, "max_grad_norm": 0.0, "per_device_train_batch_size": 4}
    run = config(corpus, folder / "whole", architecture=LLAMA, training=steps)
    train(run)
    return run, metrics(folder / "whole"), begun(run, folder / "kept")


@pytest.mark.parametrize(("key", "value"), first(4, SETTINGS), ids=lambda value: str(value))
def test_a_run_resumes_with_another_exact_lever(full, tmp_path, key, value):
    run, losses, kept = full
    changed = with_key(run, key, value)
    if key == "training.per_device_train_batch_size":
        changed = with_key(changed, "training.gradient_accumulation_steps", 4)
        changed = with_key(changed, "training.global_batch_size", None)
    if key == "training.optimizer_in_backward":
        with pytest.raises(RequestError, match="by rounding"):
            go_on(changed, kept, tmp_path / "refused", ())
    assert go_on(changed, kept, tmp_path / "run", (key,)) == pytest.approx(losses, rel=2e-5)


def test_a_frozen_base_goes_to_the_host_at_a_resume(corpus, tmp_path):  # noqa: F811
    run = config(corpus, tmp_path / "whole", architecture=LLAMA, training={**STEPS, "use_peft": True}, peft=dict(LORA))
    train(run)
    kept = begun(run, tmp_path / "kept")
    changed = with_key(run, "model.offload_frozen_base", True)
    assert go_on(changed, kept, tmp_path / "run", ["model.offload_frozen_base"]) == metrics(tmp_path / "whole")


@pytest.mark.parametrize("adapted", [False, slow(True)], ids=["full", "lora"])
def test_a_reference_is_asked_anew_before_the_checkpoint_takes_its_place(files, tmp_path, adapted):  # noqa: F811
    run = preference(files, tmp_path / "whole", adapted=adapted, training=dict(STEPS))
    train(run)
    kept = begun(run, tmp_path / "kept")
    key = "training.preference.precompute_reference"
    once = preference(files, tmp_path / "run", adapted=adapted, training=dict(STEPS), precompute_reference=True)
    with pytest.raises(RequestError, match=key):
        go_on(once, kept, tmp_path / "refused", ())
    assert go_on(once, kept, tmp_path / "run", [key]) == pytest.approx(metrics(tmp_path / "whole"), rel=2e-5)
    again = with_key(with_key(run, "training.output_dir", str(tmp_path / "run")), "training.max_steps", 7)
    train(again, resume=True, allow=["training.max_steps", key])
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7


def test_every_exact_lever_is_allowed_and_no_other_fact_says_so():
    exact = {row.key for row in LEVERS if row.exact}
    assert all(resume_with(key) for key in exact)
    check_allowed(sorted(exact))
    inexact = {"training.rounding", "model.torch_dtype_str", "peft.lora_r", "data.packing"}
    assert not any(resume_with(key) for key in inexact)
    with pytest.raises(RequestError) as caught:
        check_allowed(sorted(inexact))
    assert len(caught.value.problems) == len(inexact)


@pytest.mark.usefixtures("all_packages")
@pytest.mark.parametrize("optimizer", Optimizer)
def test_what_explain_calls_exact_goes_with_a_resume(optimizer):
    """Each with `--allow` for the keys that it types, whichever optimizer the run has."""
    pure = {"torch_dtype_str": "bfloat16"} if FACTS[optimizer].keeps_small_updates else {}
    run = tiny_config(gpu=H100, model=pure, training={"optimizer": optimizer})
    found = [proposal for proposal in propose(run) if proposal.exact]
    assert len(found) > 5
    for proposal in found:
        keys = [word.partition("=")[0] for word in proposal.override.split()]
        assert check_resume(run.model_dump(mode="json"), proposal.config, keys), proposal.override


@pytest.mark.usefixtures("all_packages")
@pytest.mark.parametrize(
    ("optimizer", "proposed"),
    [
        ("adamw_torch", {"adamw_torch_fused": True, "paged_adamw_32bit": True, "adamw_8bit": False}),
        ("paged_adamw_8bit", {"adamw_8bit": True, "adamw_torch": False, "adamw_torchao_8bit": False}),
        ("lion", {"lion_8bit": False, "paged_lion_8bit": False}),
        ("paged_lion_8bit", {"lion_8bit": True, "lion": False}),
        ("muon", {}),
    ],
)
def test_optimizers_of_the_same_rule_are_proposed_and_called_exact_with_the_same_states(optimizer, proposed):
    run = tiny_config(gpu=H100, training={"optimizer": optimizer})
    found = {item.config.training.optimizer: item.exact for item in propose(run) if item.key == "training.optimizer"}
    assert proposed.items() <= found.items()
    assert {FACTS[other].rule for other in found} <= {FACTS[Optimizer(optimizer)].rule}
