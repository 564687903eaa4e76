"""Every kind of adapter: the modules it is on, the weights it trains, and refused combinations."""

import math
from functools import cache

import pytest
import torch

from framework.build.verify import verify
from framework.build.verify.adapter import coverage, describe_save_dtypes
from framework.errors import RequestError
from framework.memory.planning import make_plan
from framework.run.rehearsal.footprint import state_tensors
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.grids import chosen, first, slow
from tests.tiny import GPT2, LLAMA, split, tiny_assembly, tiny_config, unequal_rows

MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
METHODS = ("lora", "rslora", "dora", "pissa", "olora", "vera", "oft", "ia3", "prefix", "prompt")
UNLIKE = chosen(("lora", "dora", "ia3", "prompt"), METHODS)
"""One of each kind of update in the quick suite."""


def adapted(method="lora", architecture=LLAMA, training=(), model=(), **peft):
    if method not in ("prefix", "prompt"):
        peft = {"lora_target_modules": ["all-linear"], **peft}
    return tiny_config(
        architecture,
        training={"use_peft": True, "learning_rate": 1e-2, **dict(training)},
        model=dict(model),
        peft={"peft_method": method, **peft},
    )


def steps(assembly, count=2, size=4):
    return [train_step(assembly, split(unequal_rows(), size), step).loss for step in range(1, count + 1)]


@cache
def loss_of_the_base() -> float:
    return steps(tiny_assembly(tiny_config()), 1)[0]


@pytest.mark.parametrize("method", METHODS)
def test_each_kind_trains_from_where_the_base_stands_and_is_read_back(method):
    assembly = tiny_assembly(adapted(method))
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["peft.peft_method"].found == method
    assert readings["peft.adapter_dtype"].found == "float32"
    losses = steps(assembly, 4)
    if method not in ("prefix", "prompt"):
        assert losses[0] == pytest.approx(loss_of_the_base(), rel=1e-5)
    assert losses[-1] < losses[0]
    assert all("original_module" not in name for name, p in assembly.model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("method", UNLIKE)
def test_the_plan_counts_what_is_built(method):
    config = adapted(method)
    footprint = record(config).footprint
    model = tiny_assembly(config).model
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert footprint.trainable_parameters == sum(trained)
    assert footprint.total_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(footprint.trained_sizes) == 4 * sum(trained)


@pytest.mark.parametrize("method", first(2, ["lora", "dora", "pissa", "vera", "ia3"]))
def test_conv1d_layers_are_linear_layers(method):
    assembly = tiny_assembly(adapted(method, GPT2))
    verify(assembly)
    assert coverage(assembly.model)["attention"] == coverage(assembly.model)["dense MLP"] == 1
    assert math.isfinite(steps(assembly)[-1])


def test_olora_on_conv1d_is_refused():
    with pytest.raises(RequestError, match="transposed"):
        tiny_assembly(adapted("olora", GPT2))


def test_gpt2_has_no_q_proj():
    """Names of another family."""
    with pytest.raises(RequestError) as error:
        tiny_assembly(adapted(architecture=GPT2, lora_target_modules=["q_proj", "v_proj"]))
    first, second = error.value.problems
    assert (first.key, second.key) == ("peft.lora_target_modules[0]", "peft.lora_target_modules[1]")
    assert "c_attn (2), c_proj (4)" not in first.message
    assert "c_proj (4)" in first.expected
    assert (first.nearest, second.nearest) == ("c_attn", "c_attn")


def test_a_missing_name_among_others_is_a_warning():
    assembly = tiny_assembly(adapted(lora_target_modules=["q_proj", "v_porj"]))
    [warning] = assembly.adapter.warnings
    assert "'v_porj' names no module" in warning
    assert warning.endswith("did you mean v_proj?")
    assert coverage(assembly.model)["attention"] < 1


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (r".*\.layers\.1\..*_proj", 7),
        (r"model\.layers\.\d+\.self_attn\.[qv]_proj", 4),
        ("q_proj", 2),
        ("all-linear", 14),
        (["layers.0.self_attn.q_proj", "up_proj"], 3),
        (["lm_head"], 1),
    ],
)
def test_targets_are_names_or_one_expression(targets, modules):
    assembly = tiny_assembly(adapted(lora_target_modules=targets))
    assert sum("lora_A" in name for name, _ in assembly.model.named_parameters()) == modules


@pytest.mark.parametrize(
    ("params", "nearest"),
    [
        ({"lora_target_modules": "all"}, "all-linear"),
        ({"lora_target_modules": ["all_linear"]}, "all-linear"),
        ({"lora_target_modules": []}, None),
        ({"lora_modules_to_save": ["lm_hed"]}, "lm_head"),
    ],
)
def test_names_of_no_module_lead_to_names_of_modules(params, nearest):
    with pytest.raises(RequestError) as error:
        tiny_assembly(adapted(**params))
    [problem] = error.value.problems
    assert problem.nearest == nearest
    assert problem.nearest or "[all-linear]" in problem.expected


@pytest.mark.parametrize("targets", [[r".*\.q_proj"], "(q_proj", "q_proj|v_porj", "self_attn"])
def test_what_matches_nothing_is_refused(targets):
    with pytest.raises(RequestError) as error:
        tiny_assembly(adapted(lora_target_modules=targets))
    assert error.value.problems[0].key.startswith("peft.lora_target_modules")


@pytest.mark.parametrize("architecture", [MOE, MIXTRAL])
def test_all_linear_reaches_the_experts(architecture):
    assembly = tiny_assembly(adapted(architecture=architecture))
    assert coverage(assembly.model) == {"attention": 1, "experts": 1, "head": 0}
    assert not assembly.adapter.warnings
    losses = steps(assembly, 4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("architecture", "width"), [(MOE, 16), (MIXTRAL, 64)])
def test_the_plan_of_adapted_experts_is_what_is_built(architecture, width):
    """Each expert has factors of rank 8: of gate and up together, 32 to twice its width, and of down, back again."""
    config = adapted(architecture=architecture)
    made, assembly = make_plan(record(config)), tiny_assembly(config)
    trained = {name: item.numel() for name, item in assembly.model.named_parameters() if item.requires_grad}
    of_experts = sum(count for name, count in trained.items() if ".experts." in name)
    assert of_experts == 2 * 4 * 8 * ((32 + 2 * width) + (width + 32))
    assert made.trainable_parameters == sum(trained.values())
    steps(assembly, 1)
    held = sum(tensor.nbytes for tensor in state_tensors(assembly) if tensor.dim())
    assert held == 8 * sum(trained.values())
    assert made.disk_bytes >= held + 4 * sum(trained.values())


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "experts are at 0 %; [all-linear] or experts.down_proj"),
        ({"lora_dropout": 0.1}, "peft.lora_dropout=0"),
        ({"method": "ia3"}, "peft.peft_method=lora"),
        slow({"method": "dora"}, "peft.peft_method=lora"),
        slow({"method": "vera"}, "peft.peft_method=lora"),
    ],
)
def test_experts_left_out_are_reported_with_the_setting_that_reaches_them(peft, message):
    rehearsal = record(adapted(**peft, architecture=MOE))
    assert "experts 0%" in rehearsal.notes[0]
    assert message in " ".join(rehearsal.warnings)
    assembly = tiny_assembly(adapted(**peft, architecture=MOE))
    verify(assembly)
    assert math.isfinite(steps(assembly)[-1])


def test_experts_by_name():
    names = ["experts.gate_up_proj", "q_proj"]
    assert 0 < coverage(tiny_assembly(adapted(architecture=MOE, lora_target_modules=names)).model)["experts"] < 1
    old = ["gate_proj", "up_proj", "down_proj"]  # what the experts were called before they were stacked
    assert coverage(tiny_assembly(adapted(architecture=MOE, lora_target_modules=old)).model)["experts"] == 1
    with pytest.raises(RequestError, match="lora_dropout=0"):
        tiny_assembly(adapted(architecture=MOE, lora_target_modules=names, lora_dropout=0.1))


@pytest.mark.parametrize(
    ("dtype", "held"), [(None, torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.bfloat16)]
)
def test_the_adapter_has_the_dtype_that_was_asked_for(dtype, held):
    assembly = tiny_assembly(adapted(adapter_dtype=dtype, model={"torch_dtype_str": "bfloat16"}))
    verify(assembly)
    assert {parameter.dtype for parameter in assembly.trained} == {held}
    assert math.isfinite(steps(assembly)[-1])


def test_lora_plus_gives_b_its_own_rate():
    plain, faster = (tiny_assembly(adapted(lora_plus_lr_ratio=ratio)) for ratio in (None, 16))
    losses = steps(plain, 1), steps(faster, 1)
    assert losses[0] == losses[1]
    rates = sorted(group["lr"] for group in faster.optimizer.param_groups)
    assert rates == pytest.approx([1e-2, 16e-2])
    held = [parameter for group in faster.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(faster.trained)
    slow, fast = (
        next(p for name, p in assembly.model.named_parameters() if "lora_B" in name) for assembly in (plain, faster)
    )
    assert torch.allclose(fast, 16 * slow)


def test_matrices_that_never_moved_are_reported():
    assembly = tiny_assembly(adapted())
    assert "14 LoRA B matrices are still zero" in describe_save_dtypes(assembly)[0]
    steps(assembly)
    assert not describe_save_dtypes(assembly)


@pytest.mark.parametrize("method", chosen(("lora", "dora", "prompt"), [name for name in METHODS if name != "prefix"]))
def test_checkpointing_changes_no_loss(method):
    plain = steps(tiny_assembly(adapted(method)), 3)
    recomputed = steps(tiny_assembly(adapted(method, training={"enable_gradient_checkpointing": True})), 3)
    assert recomputed == pytest.approx(plain, rel=1e-5)


def test_a_prefix_is_not_recomputed():
    from framework.build.refuse import refuse_impossible

    config = TrainingConfig(
        training={"use_peft": True, "enable_gradient_checkpointing": True}, peft={"peft_method": "prefix"}
    )
    with pytest.raises(RequestError, match="checkpointed blocks drop"):
        refuse_impossible(config, "one")


@pytest.mark.parametrize("method", chosen(("lora", "vera"), METHODS[:-2]))
def test_whole_modules_next_to_the_adapter(method):
    assembly = tiny_assembly(adapted(method, lora_modules_to_save=["lm_head"]))
    verify(assembly)
    assert coverage(assembly.model)["head"] == 1
    assert math.isfinite(steps(assembly)[-1])
    with pytest.raises(RequestError, match="names no module"):
        tiny_assembly(adapted(method, lora_modules_to_save=["lm_haed"]))


@pytest.mark.parametrize(("name", "is_shared"), [("wte", False), ("lm_head", True)])
def test_an_embedding_trained_without_its_tied_head_is_reported(name, is_shared):
    """Peft ties what is trained whole to GPT-2's embedding only where the head is named."""
    assembly = tiny_assembly(adapted(architecture=GPT2, lora_modules_to_save=[name]))
    model = assembly.adapter.model.get_base_model()
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_shared
    message = "lm_head in peft.lora_modules_to_save trains them as one"
    assert any(message in warning for warning in assembly.adapter.warnings) != is_shared


@pytest.mark.parametrize(
    ("architecture", "peft"),
    [
        (LLAMA, {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["q_proj"]}),
        (LLAMA, {"lora_target_modules": ["up_proj"], "lora_modules_to_save": ["mlp"]}),
        (GPT2, {"lora_target_modules": ["wte"], "lora_modules_to_save": ["wte"]}),
        (GPT2, {"lora_target_modules": ["c_attn", "lm_head"], "lora_modules_to_save": ["wte"]}),
        (TIED, {"lora_target_modules": ["embed_tokens"], "lora_modules_to_save": ["lm_head"]}),
    ],
)
def test_an_adapter_on_what_is_trained_whole_is_refused(architecture, peft):
    with pytest.raises(RequestError, match="is trained in full") as error:
        tiny_assembly(adapted(architecture=architecture, **peft))
    assert error.value.problems[0].key == "peft.lora_target_modules"


def test_all_linear_leaves_out_what_is_trained_whole():
    assembly = tiny_assembly(adapted(lora_modules_to_save=["mlp"]))
    assert {name.rsplit(".", 1)[-1] for name in assembly.adapter.targets.modules} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    verify(assembly)


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_start_taken_out_of_a_shared_head_is_refused(method):
    """It would be gone from the embedding: on a head of its own the model begins as the base."""
    targets = ["lm_head"]
    with pytest.raises(RequestError, match="shares its weight"):
        tiny_assembly(adapted(method, TIED, lora_target_modules=targets))
    start = steps(tiny_assembly(adapted(method, lora_target_modules=targets)), 1)
    assert start == pytest.approx(steps(tiny_assembly(tiny_config()), 1), rel=1e-5)
