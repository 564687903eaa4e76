"""Cross-section rules: contradictions, all reported at once."""

import math

import pytest

from framework.schema.config import TrainingConfig
from framework.schema.rules.every import Needs, find_conflicts, unused_key_conflicts

T4 = {"name": "t4", "capability": "7.5"}
LLAMA = {"model_type": "llama", "max_position_embeddings": 1024, "vocab_size": 1000}


def conflicts(needs=None, **sections):
    found = find_conflicts(TrainingConfig.model_validate(sections), needs or Needs())
    return {conflict.keys[0]: conflict for conflict in found}


LEGAL = [("float32", "none"), ("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "none")]
ALL = [(held, computed) for held in ("float32", "bfloat16", "float16") for computed in ("none", "bf16", "fp16")]


@pytest.mark.parametrize("pair", ALL)
def test_trained_weights_have_the_legal_precisions_of_the_contract(pair):
    held, computed = pair
    found = conflicts(model={"torch_dtype_str": held}, training={"mixed_precision_dtype": computed, "learning_rate": 1})
    assert (pair in LEGAL) == (not found)
    if found:
        message = found["model.torch_dtype_str"].message
        assert f"model.torch_dtype_str {held}" in message
        assert f"training.mixed_precision_dtype {computed}" in message
        for precision in ("float32 with none", "float32 with bf16 or fp16", "bfloat16 with none"):
            assert precision in found["model.torch_dtype_str"].expected


@pytest.mark.parametrize(
    ("held", "computed", "card", "is_reported"),
    [
        ("float32", "bf16", "a", True),
        ("float32", "fp16", "a", True),
        ("float32", None, "a", True),
        ("float32", "none", "a", False),
        ("float32", None, "cpu", False),
        ("auto", "bf16", "a", False),
    ],
)
def test_a_frozen_base_in_float32_is_a_waste_where_it_is_computed_in_less(held, computed, card, is_reported):
    """2 bytes a parameter that nothing learns."""
    sections = {"model": {"torch_dtype_str": held}, "gpu": {"name": card}}
    for is_frozen in (True, False):
        found = conflicts(**sections, training={"use_peft": is_frozen, "mixed_precision_dtype": computed})
        assert found.keys() == ({"model.torch_dtype_str"} if is_reported and is_frozen else set())
        assert all(conflict.is_warning and "2 bytes" in conflict.message for conflict in found.values())


@pytest.mark.parametrize(("held", "computed"), [("float16", "fp16"), ("bfloat16", "bf16")])
def test_a_frozen_base_may_stay_in_the_dtype_of_autocast(held, computed):
    training = {"mixed_precision_dtype": computed, "use_peft": True}
    assert not conflicts(model={"torch_dtype_str": held}, training=training)
    assert conflicts(model={"torch_dtype_str": "float16"}, training={**training, "mixed_precision_dtype": "bf16"})


def test_unset_and_checkpoint_dtypes_are_left_to_what_derives_them():
    assert not conflicts(model={"torch_dtype_str": "auto"}, training={"mixed_precision_dtype": "bf16"})
    assert not conflicts(training={"mixed_precision_dtype": "bf16"})
    assert "model.torch_dtype_str" in conflicts(model={"torch_dtype_str": "float16"})


def test_bfloat16_on_a_card_without_it_is_refused_wherever_it_is_asked_for():
    found = conflicts(gpu=T4, training={"mixed_precision_dtype": "bf16"}, model={"torch_dtype_str": "float32"})
    assert set(found) == {"training.mixed_precision_dtype"}
    assert all("7.5" in conflict.message and "t4" in conflict.message for conflict in found.values())
    assert "model.torch_dtype_str" in conflicts(
        gpu=T4, model={"torch_dtype_str": "bfloat16"}, training={"learning_rate": 1}
    )


STORED = {**LLAMA, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("rate", "model", "message"),
    [
        (6e-6, {"torch_dtype_str": "bfloat16"}, "most updates of bfloat16 weights"),
        (1e-4, {"torch_dtype_str": "bfloat16"}, "norm weights of 1.0 never move"),
        (1e-4, {"torch_dtype_str": "auto", "architecture": STORED}, "norm weights of 1.0 never move"),
        (6e-6, {"torch_dtype_str": "auto", "architecture": {**LLAMA, "torch_dtype": "bfloat16"}}, "most updates"),
        (3e-3, {"torch_dtype_str": "bfloat16"}, None),
        (6e-6, {"torch_dtype_str": "float32"}, None),
        (6e-6, {"torch_dtype_str": "auto", "architecture": {**LLAMA, "dtype": "float32"}}, None),
        (6e-6, {"architecture": STORED}, None),
    ],
)
def test_pure_bfloat16_at_a_small_rate_is_warned_about(rate, model, message):
    found = conflicts(model=model, training={"learning_rate": rate}).get("model.torch_dtype_str")
    assert (found is not None) == (message is not None)
    assert found is None or (found.is_warning and message in found.message and "8 bytes" in found.expected)
    stochastic = {"learning_rate": rate, "optimizer": "anyprecision_adamw"}
    others = conflicts(model=model, training=stochastic).get("model.torch_dtype_str")
    assert others is None or "learning rate" not in others.message


@pytest.mark.parametrize(
    ("rate", "adapter", "warns"),
    [(6e-6, "bfloat16", True), (6e-6, "auto", True), (1e-4, "bfloat16", False), (6e-6, None, False)],
)
def test_an_adapter_in_bfloat16_at_a_small_rate_is_warned_about(rate, adapter, warns):
    model = {"torch_dtype_str": "bfloat16"}
    found = conflicts(model=model, training={"learning_rate": rate, "use_peft": True}, peft={"adapter_dtype": adapter})
    assert warns == ("peft.adapter_dtype" in found)
    assert not warns or found["peft.adapter_dtype"].is_warning
    assert "model.torch_dtype_str" not in found


@pytest.mark.parametrize(
    ("training", "count", "message"),
    [
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, 1, "10 global is not a whole number"),
        ({"global_batch_size": 4}, 1, "4 global"),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 4}, 1, "64 global is not 4 x (8 per device"),
        ({"global_batch_size": 24, "per_device_train_batch_size": 4}, 4, "4 devices"),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 8}, 1, None),
        ({"global_batch_size": 10, "per_device_train_batch_size": "auto"}, 1, None),
    ],
)
def test_an_impossible_division_shows_the_equation(training, count, message):
    found = conflicts(training=training, gpu={"count": count})
    assert (message is None) == (not found)
    if message:
        assert message in found["training.global_batch_size"].message


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"warmup_steps": 5, "max_steps": 4}}, "training.warmup_steps"),
        (
            {"training": {"min_learning_rate": 1, "lr_scheduler_type": "cosine_with_min_lr"}},
            "training.min_learning_rate",
        ),
        ({"training": {"eval_steps": 5}}, "training.eval_steps"),
        ({"data": {"streaming": True}}, "data.streaming"),
        ({"model": {"architecture": {"hidden_size": 1}}}, "model.architecture"),
        ({"model": {"load_pretrained_weights": False, "model_name": "a"}}, "model.load_pretrained_weights"),
        ({"model": {"architecture": LLAMA, "model_max_length": 1025}}, "model.model_max_length"),
        (
            {"model": {"architecture": {"model_type": "gpt2", "n_positions": 8}, "model_max_length": 9}},
            "model.model_max_length",
        ),
        ({"model": {"tokenizer": {}, "tokenizer_name": "a"}}, "model.tokenizer"),
        ({"model": {"tokenizer": {}, "model_name": "a"}}, "model.tokenizer"),
        ({"model": {"architecture": {**LLAMA, "x": math.inf}}}, "model.architecture.x"),
        ({"training": {"seed": "9" * 20}}, "training.seed"),
        ({"model": {"architecture": {**LLAMA, "n": 2**63}}}, "model.architecture.n"),
    ],
)
def test_keys_that_contradict_each_other(sections, key):
    conflict = conflicts(**sections)[key]
    assert not conflict.is_warning
    assert conflict.expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "default"}}},
    ],
)
def test_stretched_positions_may_be_exceeded(rope):
    assert not conflicts(model={"architecture": {**LLAMA, **rope}, "model_max_length": 4096})


def test_unscaled_rope_parameters_are_no_excuse():
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}, "rope_scaling": None}
    assert conflicts(model={"architecture": {**LLAMA, **plain}, "model_max_length": 4096})


def test_padding_to_a_multiple_stays_within_the_models_positions():
    def found(multiple, length):
        model = {"architecture": {**LLAMA, "max_position_embeddings": 100}, "model_max_length": length}
        return conflicts(model=model, data={"pad_to_multiple_of": multiple})

    assert not found(64, 64)
    assert found(64, 65)["data.pad_to_multiple_of"].expected == "model.model_max_length=64, or unset"
    assert found(128, 65)["data.pad_to_multiple_of"].expected == "unset"
    assert "data.pad_to_multiple_of" in conflicts(data={"pad_to_multiple_of": 8, "padding_free": True})


def test_a_memory_budget_needs_the_compiler_and_names_the_line_to_write():
    found = conflicts(training={"activation_memory_budget": 0.5})["training.activation_memory_budget"]
    assert "training.compile=true" in str(found.expected)
    assert not conflicts(training={"activation_memory_budget": 0.5, "compile": True})
    assert not conflicts(training={"activation_memory_budget": "auto"}), "a search leaves it unset without compile"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"peft": {"lora_r": 3}}, "peft.lora_r"),
        ({"fsdp": {"cpu_offload": True}}, "fsdp.cpu_offload"),
        ({"training": {"compile_scope": "model"}}, "training.compile_scope"),
        ({"training": {"cuda_graphs": True}}, "training.cuda_graphs"),
        ({"training": {"min_learning_rate": 1e-6}}, "training.min_learning_rate"),
        ({"training": {"adam_beta2": 0.95, "optimizer": "sgd"}}, "training.adam_beta2"),
        ({"training": {"warmup_ratio": 0.1, "warmup_steps": 3}}, "training.warmup_ratio"),
        ({"training": {"num_train_epochs": 1, "max_steps": 3}}, "training.num_train_epochs"),
        ({"data": {"eval_fraction": 0.1, "eval": [{"path": "a"}]}}, "data.eval_fraction"),
        ({"data": {"truncation": "error"}, "training": {"task": "pretrain"}}, "data.truncation"),
        ({"model": {"model_revision": "main"}}, "model.model_revision"),
    ],
)
def test_what_has_no_effect_is_warned_about(sections, key):
    [conflict] = conflicts(**sections).values()
    assert conflict.keys[0] == key
    assert conflict.is_warning


def test_a_key_written_as_its_default_is_not_warned_about_with_its_switch():
    assert not conflicts(peft={"lora_r": 8}, training={"use_peft": False}, fsdp={"enable_fsdp": False})


def test_each_verb_has_its_needs():
    def unmet(needs, **sections):
        found = find_conflicts(TrainingConfig.model_validate(sections), needs)
        return {conflict.keys[0]: conflict.is_warning for conflict in found}

    train, check = Needs(model=True, data="required"), Needs(model=True, data="advised")
    assert unmet(Needs()) == {}
    assert unmet(Needs(model=True)) == {"model.model_name": False}
    assert unmet(check) == {"model.model_name": False, "data.train": True}
    assert unmet(train) == {"model.model_name": False, "data.train": False}
    bare = {"model": {"architecture": LLAMA}, "data": {"train": [{"path": "a"}]}}
    assert unmet(check, **bare) == {}
    assert unmet(train, **bare) == {"model.load_pretrained_weights": False}


def test_settings_of_a_quantized_base_are_idle_without_one():
    config = TrainingConfig.model_validate({"training": {"use_peft": True}, "peft": {"q_lora_bits": 8}})
    found = [conflict for conflict in find_conflicts(config, Needs()) if "peft.q_lora_bits" in conflict.keys]
    assert [conflict.is_warning for conflict in found] == [True]
    assert found[0].message == "has no effect: peft.q_lora is false"


def test_emptying_the_cache_is_reported_to_lower_no_peak():
    key, card = "training.empty_device_cache_steps", {"name": "h100_80gb", "capability": "9.0"}
    often, seldom = (
        conflicts(gpu=card, training={"empty_device_cache_steps": steps})[key].message for steps in (1, 50)
    )
    assert "allocated peak stays" in often
    assert "2.8 %" in often
    assert "allocated peak stays" in seldom
    assert "2.8 %" not in seldom
    assert "no cache" in conflicts(training={"empty_device_cache_steps": 50})[key].message
    assert all(item.is_warning for item in conflicts(training={"empty_device_cache_steps": 1}).values())


def test_settings_of_the_allocator_need_one():
    key, card = "training.allocator.max_split_size_mb", {"name": "h100_80gb", "capability": "9.0"}
    assert not conflicts(training={"allocator": {"max_split_size_mb": 64}})[key].is_warning
    assert not conflicts(gpu=card, training={"allocator": {"max_split_size_mb": 64}})
    both = {"expandable_segments": True, "garbage_collection_threshold": 0.8}
    assert conflicts(gpu=card, training={"allocator": both})["training.allocator.garbage_collection_threshold"]


@pytest.mark.parametrize(
    ("training", "model", "clashes"),
    [
        ({}, {}, False),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}, True),
        ({}, {"attn_implementation": "flex_attention"}, True),
        ({"compile": True}, {}, True),
        ({}, {"attn_implementation": "eager"}, True),
        ({}, {"sdpa_backend": "math"}, True),
        ({"gradient_checkpointing_policy": "save_matmuls"}, {"attn_implementation": "eager"}, False),
        ({"gradient_checkpointing_policy": "full"}, {"attn_implementation": "eager"}, False),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused(training, model, clashes):
    policy = {"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": "save_attention"}
    found = conflicts(training={**policy, **training}, model=model)
    assert ("training.gradient_checkpointing_policy" in found) == clashes


def test_options_of_checkpointing_are_idle_without_it():
    options = {"gradient_checkpointing_every": 2, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    found = conflicts(training=options)
    assert set(found) == {
        "training.gradient_checkpointing_every",
        "training.gradient_checkpointing_kwargs.use_reentrant",
    }
    assert all(conflict.is_warning for conflict in found.values())


def test_rows_that_are_put_together_say_what_they_do_not_go_with():
    both = conflicts(data={"packing": True, "padding_free": True}, model={"attn_implementation": "flash_attention_2"})
    assert both["data.padding_free"].expected == "one of the two"
    warned = conflicts(data={"padding_free": True})["data.padding_free"]
    assert warned.is_warning
    assert warned.expected == "flash_attention_2 or flex_attention"
    flash = {"attn_implementation": "flash_attention_2", "torch_dtype_str": "bfloat16"}
    assert "data.padding_free" not in conflicts(data={"padding_free": True}, model=flash)
    assert not conflicts(data={"packing": True, "group_by_length": True})


@pytest.mark.parametrize("key", ["packing", "padding_free"])
@pytest.mark.parametrize("method", ["prefix", "prompt"])
def test_a_trained_prompt_does_not_go_with_several_documents_in_a_row(key, method):
    found = conflicts(data={key: True}, training={"use_peft": True}, peft={"peft_method": method})
    assert found["peft.peft_method"].keys == ("peft.peft_method", f"data.{key}")


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({}, "training.use_peft"),
        ({"training": {"use_peft": True}, "peft": {"q_lora": True}}, "peft.q_lora"),
        ({"training": {"use_peft": True, "compile": True}}, "training.compile"),
        ({"training": {"use_peft": True}, "fsdp": {"enable_fsdp": True}}, "fsdp.enable_fsdp"),
        ({"training": {"use_peft": True, "activation_offload": True}}, "training.activation_offload"),
    ],
    ids=lambda part: str(part),
)
def test_a_base_on_the_host_is_refused_with_what_it_does_not_go_with(sections, other):
    card = {"name": "h100_80gb", "capability": "9.0"}
    model = {"offload_frozen_base": True}
    found = find_conflicts(TrainingConfig.model_validate({**sections, "model": model, "gpu": card}), Needs())
    (clash,) = [item for item in found if item.keys[0] == "model.offload_frozen_base"]
    assert other in clash.keys
    assert clash.expected
    assert not clash.is_warning
    plain = TrainingConfig.model_validate({"training": {"use_peft": True}, "model": model, "gpu": card})
    assert not find_conflicts(plain, Needs())


def test_copies_of_a_float32_base_under_autocast_are_reported():
    card = {"name": "h100_80gb", "capability": "9.0"}
    training = {"use_peft": True, "mixed_precision_dtype": "bf16"}
    model = {"offload_frozen_base": True, "torch_dtype_str": "float32"}
    assert conflicts(gpu=card, model=model, training=training)["model.offload_frozen_base"].is_warning
    checkpointed = {**training, "enable_gradient_checkpointing": True}
    assert "model.offload_frozen_base" not in conflicts(gpu=card, model=model, training=checkpointed)


def test_offloaded_activations_go_with_neither_compiled_code_nor_a_prefix():
    key = "training.activation_offload"
    assert key in conflicts(training={"activation_offload": True, "compile": True})
    prefix = conflicts(training={"activation_offload": True, "use_peft": True}, peft={"peft_method": "prefix"})
    assert prefix["peft.peft_method"].keys[1] == key
    assert not conflicts(training={"activation_offload": True})


def test_a_prefix_is_not_compiled_and_a_prompt_is():
    training, key = {"compile": True, "use_peft": True}, "peft.peft_method"
    assert conflicts(training=training, peft={"peft_method": "prefix"})[key].keys[1] == "training.compile"
    assert key not in conflicts(training=training, peft={"peft_method": "prompt"})


@pytest.mark.parametrize(
    ("training", "other"),
    [
        ({"compile": True}, "training.compile"),
        (
            {"enable_gradient_checkpointing": True, "gradient_checkpointing_policy": "save_matmuls"},
            "training.gradient_checkpointing_policy",
        ),
    ],
)
def test_ligers_kernels_are_refused_with_what_they_do_not_go_with(training, other):
    key, card = "model.enable_liger_kernel", {"name": "h100_80gb", "capability": "9.0"}
    model = {"enable_liger_kernel": True, "chunked_loss": True}
    clash = conflicts(gpu=card, model=model, training=training)[key]
    assert clash.keys == (key, other)
    assert clash.expected
    assert not clash.is_warning
    allowed = {**training, "compile": False, "gradient_checkpointing_policy": "full"}
    assert key not in conflicts(gpu=card, model=model, training=allowed)


def test_ligers_kernels_without_the_loss_that_builds_no_logits_are_reported():
    """Unset, the loss goes over chunks by itself."""
    found = conflicts(model={"enable_liger_kernel": True, "chunked_loss": False})["model.chunked_loss"]
    assert found.is_warning
    assert found.expected == "true, or unset"
    for chunked in (None, True, 256):
        assert not conflicts(model={"enable_liger_kernel": True, "chunked_loss": chunked})


@pytest.mark.parametrize(
    ("sections", "idle"),
    [
        ({"peft": {"lora_r": 8, "peft_method": "lora"}}, {"peft.lora_r", "peft.peft_method"}),
        ({"fsdp": {"sharding_strategy": "FULL_SHARD"}}, {"fsdp.sharding_strategy"}),
        ({"data": {"shuffle_buffer": 1000}}, {"data.shuffle_buffer"}),
        ({"peft": {"lora_r": 8}, "training": {"use_peft": False}}, set()),
        ({"peft": {"lora_r": 4}, "training": {"use_peft": False}}, {"peft.lora_r"}),
        ({"peft": {"lora_r": 8}, "training": {"use_peft": True}}, set()),
    ],
)
def test_a_default_that_is_written_without_its_switch_is_reported(sections, idle):
    """Who writes `peft: {lora_r: 8}` and nothing else believes that an adapter is trained. A run's `config.yaml`, which
    writes every value, says of each switch that it is off."""
    config = TrainingConfig.model_validate(sections)
    assert {found.keys[0] for found in unused_key_conflicts(config)} == idle
    assert all(found.is_warning for found in unused_key_conflicts(config))
    whole = TrainingConfig.model_validate(TrainingConfig().model_dump())
    assert not list(unused_key_conflicts(whole))


@pytest.mark.parametrize(
    ("optimizer", "peft", "refused"),
    [
        ("muon", {"peft_method": "vera"}, ("training.optimizer", "peft.peft_method")),
        ("galore_adamw", {"peft_method": "ia3"}, ("training.optimizer", "peft.peft_method")),
        ("muon", {"peft_method": "ia3"}, None),
        ("muon", {}, None),
        ("apollo_adamw", {"lora_r": 8}, ("training.projection_rank", "peft.lora_r", "training.optimizer")),
        ("apollo_adamw", {"lora_r": 200}, None),
        ("galore_adamw", {"peft_method": "vera", "lora_modules_to_save": ["mlp"]}, None),
        ("adamw_torch_fused", {"peft_method": "vera"}, None),
    ],
)
def test_optimizers_of_matrices_are_refused_with_adapters_that_have_none(optimizer, peft, refused):
    found = conflicts(training={"optimizer": optimizer, "use_peft": True}, peft=peft).values()
    keys = [conflict.keys for conflict in found if "training.optimizer" in conflict.keys and not conflict.is_warning]
    assert keys == ([] if refused is None else [refused])


RECORDED = {"compile": True, "cuda_graphs": True}
EVEN = {"model": {"model_max_length": 1000}, "data": {"pad_to_multiple_of": 125}}


@pytest.mark.parametrize(
    ("sections", "other", "expected"),
    [
        ({"model": EVEN["model"], "data": {"pad_to_multiple_of": 124}}, "data.pad_to_multiple_of", "125"),
        ({"model": EVEN["model"]}, "data.pad_to_multiple_of", "125"),
        (EVEN | {"training": {"gradient_accumulation_steps": 3}}, "data.pad_to_multiple_of", "of 500 or more"),
        (EVEN | {"training": {"gradient_accumulation_steps": 4}}, "data.pad_to_multiple_of", "of 1000 or more"),
        (EVEN | {"gpu": {"count": 2}}, "gpu.count", "false"),
        (
            EVEN | {"training": {"enable_gradient_checkpointing": True}},
            "training.enable_gradient_checkpointing",
            "one of the two",
        ),
        (EVEN | {"training": {"compile_scope": "model"}}, "training.compile_scope", "false"),
        (EVEN | {"training": {"activation_memory_budget": 0.5}}, "training.activation_memory_budget", "false"),
        (EVEN | {"training": {"optimizer_offload": "host"}}, "training.optimizer_offload", "false"),
        (EVEN | {"training": {"on_oom": "shrink"}}, "training.on_oom", "false"),
        (EVEN | {"training": {"use_peft": True}, "peft": {"q_lora": True}}, "peft.q_lora", "false"),
        (
            EVEN | {"training": {"use_peft": True, "task": "preference"}},
            "training.preference.precompute_reference",
            "false",
        ),
    ],
)
def test_cuda_graphs_are_for_few_shapes_and_what_was_tried(sections, other, expected):
    found = conflicts(**sections | {"training": RECORDED | sections.get("training", {})})
    assert found["training.cuda_graphs"].keys[:2] == ("training.cuda_graphs", other)
    assert expected in found["training.cuda_graphs"].expected
    without = sections | {"training": {"compile": True} | sections.get("training", {})}
    assert "training.cuda_graphs" not in conflicts(**without)


def test_cuda_graphs_go_with_a_reference_that_is_asked_once():
    once = {"use_peft": True, "task": "preference", "preference": {"precompute_reference": True}}
    assert "training.cuda_graphs" not in conflicts(training=RECORDED | once, **EVEN)


def test_cuda_graphs_go_with_eight_lengths():
    assert "training.cuda_graphs" not in conflicts(training=RECORDED, **EVEN)
    halves = EVEN | {"data": {"pad_to_multiple_of": 500}}
    assert "training.cuda_graphs" not in conflicts(training=RECORDED | {"gradient_accumulation_steps": 3}, **halves)
