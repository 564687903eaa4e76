"""Axolotl: flat keys, most of them handed to transformers and peft."""

from framework.converters.axolotl_data import carry_data
from framework.converters.translation import Translation, Why
from framework.converters.words import (
    carry_attention,
    carry_deepspeed_file,
    carry_optimizer,
    carry_per_epoch,
    carry_schedule,
    carry_steps,
    product,
    put_precision,
)
from framework.schema.choices import PreferenceLoss

SAME = {
    "base_model": "model.model_name",
    "revision_of_model": "model.model_revision",
    "trust_remote_code": "model.trust_remote_code",
    "tokenizer_config": "model.tokenizer_name",
    "sequence_len": "model.model_max_length",
    "num_epochs": "training.num_train_epochs",
    "micro_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "learning_rate": "training.learning_rate",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "adam_epsilon": "training.adam_epsilon",
    "max_grad_norm": "training.max_grad_norm",
    "tf32": "training.tf32",
    "seed": "training.seed",
    "output_dir": "training.output_dir",
    "save_total_limit": "training.save_total_limit",
    "logging_steps": "training.logging_steps",
    "group_by_length": "data.group_by_length",
    "dataloader_num_workers": "data.workers",
    "tensor_parallel_size": "fsdp.tensor_parallel_size",
    "gradient_checkpointing_kwargs.use_reentrant": "training.gradient_checkpointing_kwargs.use_reentrant",
    "torch_compile": "training.compile",
}
"""Their key -> ours, where the value means the same."""
OF_ADAPTER = {
    "lora_r": "peft.lora_r",
    "lora_alpha": "peft.lora_alpha",
    "lora_dropout": "peft.lora_dropout",
    "lora_modules_to_save": "peft.lora_modules_to_save",
    "loraplus_lr_ratio": "peft.lora_plus_lr_ratio",
}
DEFAULTS = {
    "lr_scheduler": ("training.lr_scheduler_type", "cosine"),
    "optimizer": ("training.optimizer", "adamw_torch_fused"),
    "num_epochs": ("training.num_train_epochs", 1),
    "micro_batch_size": ("training.per_device_train_batch_size", 1),
    "sequence_len": ("model.model_max_length", 512),
}
"""Their key -> ours, and the value it has there where none is written; ours is another (docs.axolotl.ai, 2026-11)."""
LEFT = {
    (Why.DEFAULT, "labels are made from positions: what pads and what ends a turn needs no word of its own"): (
        "special_tokens.pad_token eot_tokens"
    ),
    (Why.ABSENT, "the tokenizer's own are taken"): "special_tokens tokens",
    (Why.ABSENT, "embeddings keep their size: no tokens are added"): "resize_token_embeddings_to_32x",
    (Why.DEFAULT, "tokenised rows are kept by data.cache, under ~/.cache"): "dataset_prepared_path",
    (Why.DEFAULT, "only the columns that a form reads are kept"): "remove_unused_columns skip_prepare_dataset",
    (Why.WRITE, "WANDB_ENTITY or WANDB_RUN_ID in the environment; wandb reads them"): "wandb_entity wandb_run_id",
    (Why.ABSENT, "weights are not watched by wandb, and not sent to it"): "wandb_watch wandb_log_model",
    (Why.ABSENT, "a loss that is not finite stops the run, a high one does not"): (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    (Why.NOT_OURS, "quantisation-aware training"): "qat",
    (Why.NOT_OURS, "experts that are split over devices, or have kernels of their own"): (
        "expert_parallel_size expert_parallel_num_nvl_bytes expert_parallel_token_capacity experts_implementation "
        "use_scattermoe use_sonicmoe quantize_moe_experts llama4_linearized_experts dsv4_fp4_grouped_mode"
    ),
    (Why.NOT_OURS, "another loss than the cross entropy of all supervised tokens"): (
        "use_eaft eaft_alpha eaft_k use_dft_loss"
    ),
    (Why.NOT_OURS, "training of a few layers at a time (LISA); model.freeze_first_blocks freezes for good"): (
        "lisa_n_layers lisa_step_interval lisa_layers_attribute"
    ),
    (Why.ABSENT, "model.enable_liger_kernel and training.compile fuse kernels here"): (
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel fused_attn_kernel flash_attn_fuse_mlp flash_attn_rms_norm "
        "flash_attn_cross_entropy use_kernels use_glm_dsa_kernels gemma4_hybrid_attn_impl"
    ),
    (Why.WRITE, "`tunesmith train --nproc N`, or `-m` for launchers such as Ray's"): "use_ray ray_num_workers ddp",
    (Why.DEFAULT, "the model's class follows from its config"): "model_type tokenizer_type cls_model_config",
    (Why.WRITE, "a key of model.architecture, next to the rest of the model's config"): "model_config",
    (Why.WRITE, "the name of a model that this adapter was merged into, as the model"): "lora_model_dir",
    (Why.WRITE, "fsdp.context_parallel_size, next to model.attn_implementation: ring_attention"): (
        "context_parallel_size context_parapllel_size sequence_parallel_degree"
    ),
}  # fmt: skip
"""Why something is not carried -> the keys."""
_ROLLOUTS = ("grpo", "gdpo", "ppo", "ebft", "online_dpo", "rloo")
_MASTERS = "sharded training of Axolotl keeps float32 masters"
_PURE = "Axolotl trains weights held in bfloat16; float32 would keep masters, 8 bytes a parameter more with AdamW"


def translate(t: Translation) -> None:
    """Fills the translation. Raises RequestError for what is not a recipe of supervised or preference training."""
    _refuse(t)
    source = t.source
    t.rename(SAME)
    carry_optimizer(t, "optimizer")
    carry_steps(t, "max_steps")
    carry_schedule(t, "lr_scheduler", "warmup_ratio", "warmup_steps")
    if source.text("lr_scheduler") != "constant" and not (source.get("warmup_ratio") or source.get("warmup_steps")):
        comment = "Axolotl's default, there at most 100 steps"
        t.put("training.warmup_ratio", 0.03, "warmup_ratio", "warmup_steps", comment=comment)
    for key, (ours, value) in DEFAULTS.items():
        if source.get(key) is None and not (key == "num_epochs" and t.has("training.max_steps")):
            t.put(ours, value, comment="Axolotl's default")
    _shape(t)
    _kernels(t)
    _frozen(t)
    _adapter(t)
    _sharding(t)
    _precision(t)
    _task(t)
    carry_data(t)
    _recording(t)
    t.leave_all(LEFT)


def _refuse(t: Translation) -> None:
    source = t.source
    if source.text("rl") in _ROLLOUTS:
        message = f"`{source.get('rl')}` learns from rollouts of the model, which is not ours for now"
        raise source.refuse("rl", message, "a recipe of supervised or preference training (dpo, ipo, orpo, simpo, kto)")
    if source.get("processor_type"):
        raise source.refuse("processor_type", "rows of images or sound are not ours for now", "a recipe on text")
    if source.has("diffusion"):
        raise source.refuse("diffusion", "diffusion language models are not ours for now", "next-token training")
    if source.text("adapter") not in ("", "lora", "qlora"):
        message = f"an adapter of the kind {source.get('adapter')!r} is not ours for now"
        raise source.refuse("adapter", message, "lora or qlora")


def _shape(t: Translation) -> None:
    """Batch, recomputation and the end of the rate."""
    source = t.source
    micro, total = source.number("micro_batch_size"), source.number("batch_size")
    if total and micro and not source.get("gradient_accumulation_steps"):
        count = max(int(total // micro), 1)
        t.put("training.gradient_accumulation_steps", count, "batch_size", comment=f"batch_size {total:g} there")
    else:
        t.leave("batch_size", Why.DEFAULT, "gradient_accumulation_steps goes before it")
    checkpointing = source.get("gradient_checkpointing")
    if checkpointing is not None:
        t.put("training.enable_gradient_checkpointing", checkpointing is not False, "gradient_checkpointing")
    offload = source.get("activation_offloading")
    if checkpointing in ("offload", "offload_disk") or offload not in (None, False):
        of = [key for key in ("gradient_checkpointing", "activation_offloading") if key in source.leaves]
        t.put("training.activation_offload", True, *of)
    share, rate = source.number("cosine_min_lr_ratio"), source.number("learning_rate")
    if share and rate and t.has("training.lr_scheduler_type", "cosine"):
        t.put("training.lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler", "cosine_min_lr_ratio")
        comment = f"{share:g} of the learning rate"
        t.put("training.min_learning_rate", product(share, rate), "cosine_min_lr_ratio", comment=comment)
    if source.text("torch_compile") == "auto":
        t.drop("training.compile", Why.WRITE, "training.compile: true")


def _frozen(t: Translation) -> None:
    """Axolotl names what is trained, by patterns; we name what is not."""
    if t.source.strings("unfrozen_parameters"):
        text = "model.freeze_layers: the modules that are not trained; until then all are"
        t.leave("unfrozen_parameters", Why.WRITE, text)
        t.head.append("Axolotl trains its unfrozen_parameters alone: name the others under model.freeze_layers")


def _kernels(t: Translation) -> None:
    """Attention, Liger and losses without logits."""
    source = t.source
    carry_attention(t, "attn_implementation")
    switches = {
        "flash_attention": "flash_attention_2", "flex_attention": "flex_attention", "sdp_attention": "sdpa",
        "xformers_attention": "sdpa", "eager_attention": "eager",
    }  # fmt: skip
    for key, kernel in switches.items():
        if source.get(key) is True and not t.has("model.attn_implementation"):
            t.put("model.attn_implementation", kernel, key)
    liger = [f"liger_{name}" for name in ("rope", "rms_norm", "glu_activation", "layer_norm", "rms_norm_gated")]
    wanted = [key for key in liger if source.get(key) is True]
    if wanted:
        t.put("model.enable_liger_kernel", True, *wanted)
    for key in ("liger_fused_linear_cross_entropy", "cut_cross_entropy"):
        if source.get(key) is True:
            t.put("model.chunked_loss", True, key, comment="the logits are never built, as there")
    for plugin in source.strings("plugins"):
        if "cut_cross_entropy" in plugin:
            t.put("model.chunked_loss", True, "plugins", comment="the logits are never built, as with its plugin")
        elif "liger" not in plugin:
            t.leave("plugins", Why.ABSENT, f"of {plugin.rpartition('.')[2]}")
    if t.is_open("plugins"):
        t.leave("plugins", Why.DEFAULT, "Liger is switched on by its keys")


def _adapter(t: Translation) -> None:
    source, kind = t.source, t.source.text("adapter")
    if not kind:
        keys = [*OF_ADAPTER, "lora_target_modules", "lora_target_linear", "load_in_4bit", "load_in_8bit", "adapter"]
        t.leave_all({(Why.DEFAULT, "there is no adapter: all weights are trained"): " ".join(keys)})
        return
    t.put("training.use_peft", True, "adapter")
    t.rename(OF_ADAPTER)
    for switch, method in {"peft_use_dora": "dora", "peft_use_rslora": "rslora"}.items():
        if source.get(switch) is True:
            t.put("peft.peft_method", method, switch)
    start = source.text("peft_init_lora_weights").partition("_")[0]
    if start in ("pissa", "olora"):
        t.put("peft.peft_method", start, "peft_init_lora_weights")
    if source.has("peft.loftq_config"):
        t.put("peft.peft_method", "loftq", "peft.loftq_config.loftq_bits")
    names = source.get("lora_target_modules")
    experts = source.strings("lora_target_parameters")
    if source.get("lora_target_linear") is True:
        t.put("peft.lora_target_modules", ["all-linear"], "lora_target_linear", "lora_target_modules")
        t.leave("lora_target_parameters", Why.DEFAULT, "all-linear takes stacked experts too")
    elif names is not None:
        targets = [*names, *experts] if isinstance(names, list) else names
        t.put("peft.lora_target_modules", targets, "lora_target_modules", "lora_target_parameters")
    four, eight = source.get("load_in_4bit") is True, source.get("load_in_8bit") is True
    if kind == "qlora" or four or eight:
        t.put("peft.q_lora", True, "adapter", "load_in_4bit", "load_in_8bit")
        if eight and not four and kind != "qlora":
            t.put("peft.q_lora_bits", 8, "load_in_8bit")
        elif source.get("bnb_config_kwargs.bnb_4bit_use_double_quant") is not False:
            comment = "Axolotl's default"
            t.put("peft.use_bnb_nested_quant", True, "bnb_config_kwargs.bnb_4bit_use_double_quant", comment=comment)


def _sharding(t: Translation) -> None:
    source = t.source
    carry_deepspeed_file(t, "deepspeed")
    words = [word for text in source.strings("fsdp") for word in text.lower().split()]
    keys = {key.rpartition(".")[2].removeprefix("fsdp_"): key for key in source.below("fsdp_config")}
    if words or keys:
        t.put("fsdp.enable_fsdp", True, "fsdp", *keys.values(), comment="start it with --nproc N")
        strategies = {
            "full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "HYBRID_SHARD",
            "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2", "no_shard": "NO_SHARD",
        }  # fmt: skip
        for word in words:
            if word in strategies:
                t.put("fsdp.sharding_strategy", strategies[word], "fsdp")
        if "offload" in words:
            t.put("fsdp.cpu_offload", True, "fsdp")
    if "reshard_after_forward" in keys:
        kept = source.get(keys["reshard_after_forward"]) is False
        strategy = "SHARD_GRAD_OP" if kept else "FULL_SHARD"
        t.put("fsdp.sharding_strategy", strategy, keys["reshard_after_forward"])
    same = {
        "sharding_strategy": "sharding_strategy", "offload_params": "cpu_offload",
        "forward_prefetch": "forward_prefetch", "state_dict_type": "state_dict_type",
        "backward_prefetch": "backward_prefetch",
    }  # fmt: skip
    for name, ours in same.items():
        if name in keys:
            t.carry(keys[name], f"fsdp.{ours}")
    if "transformer_layer_cls_to_wrap" in keys:
        classes = source.get(keys["transformer_layer_cls_to_wrap"])
        if isinstance(classes, str) and "," not in classes:
            t.put("fsdp.transformer_layer_cls", classes, keys["transformer_layer_cls_to_wrap"])
        else:
            t.leave(keys["transformer_layer_cls_to_wrap"], Why.DEFAULT, "the blocks of the model, inferred and printed")
    if "activation_checkpointing" in keys and source.get(keys["activation_checkpointing"]) is True:
        t.put(
            "training.enable_gradient_checkpointing", True, keys["activation_checkpointing"], "gradient_checkpointing"
        )
    for key in keys.values():
        if t.entries["fsdp.enable_fsdp"].of and key.rpartition(".")[2] in ("auto_wrap_policy", "fsdp_auto_wrap_policy"):
            t.leave(key, Why.DEFAULT, "each block is a unit")
    for key in ("context_parallel_size", "dp_replicate_size", "expert_parallel_size"):
        if source.get(key) == 1:
            t.leave(key, Why.DEFAULT, "one: nothing is split by it")
    t.leave("dp_shard_size", Why.DEFAULT, "all devices share what is split")
    t.leave("fsdp_version", Why.DEFAULT, "sharding is FSDP2's")


def _precision(t: Translation) -> None:
    """Axolotl loads weights in bfloat16 where `bf16` is set, frozen or trained; sharded they get float32 masters."""
    source = t.source
    fp16 = source.get("fp16") is True or source.get("float16") is True
    is_unsaid = "bf16" not in source.leaves and not fp16  # `auto` is its default
    bf16 = source.get("bf16") in (True, "auto", "full") or source.get("bfloat16") is True or is_unsaid
    of = [key for key in ("bf16", "bfloat16", "fp16", "float16", "torch_dtype") if source.get(key) not in (None, False)]
    if not (bf16 or fp16):
        if not source.text("torch_dtype"):
            put_precision(t, "float32", "none", "bf16", "fp16")
            return
        bf16 = source.text("torch_dtype") in ("bfloat16", "bf16")
    word, dtype = ("bf16", "bfloat16") if bf16 else ("fp16", "float16")
    if t.has("training.use_peft", True):
        put_precision(t, dtype, word, *of)
    elif not bf16 or t.has("fsdp.enable_fsdp"):
        put_precision(t, "float32", word, *of, comment=_MASTERS if bf16 else "fp16 needs float32 masters")
    else:
        put_precision(t, dtype, "none", *of, comment=_PURE)
    if source.get("fp8") is True:
        t.put("training.fp8", "tensorwise", "fp8")


def _task(t: Translation) -> None:
    source, word = t.source, t.source.text("rl")
    if source.get("reward_model") is True:
        t.put("training.task", "reward", "reward_model")
        t.leave("num_labels", Why.DEFAULT, "a reward is one number")
        t.leave("model_type", Why.DEFAULT, "the head follows from the task")
    if source.has("pretraining_dataset"):
        t.put("training.task", "pretrain", *source.below("pretraining_dataset"))
    if not word:
        return
    if word not in {str(loss) for loss in PreferenceLoss}:
        raise source.refuse("rl", f"{word!r} is not ours for now", ", ".join(PreferenceLoss))
    t.put("training.task", "preference", "rl")
    t.put("training.preference.loss_type", word, "rl")
    for key in ("dpo_beta", "rl_beta", "orpo_alpha"):
        t.carry(key, "training.preference.beta")
    if word == "simpo" and not t.has("training.preference.beta"):
        t.put("training.preference.beta", 0.1, comment="Axolotl's default, TRL's")
    t.carry("kto_desirable_weight", "training.preference.desirable_weight")
    t.carry("kto_undesirable_weight", "training.preference.undesirable_weight")
    t.carry("simpo_gamma", "training.preference.simpo_gamma")


def _recording(t: Translation) -> None:
    """Evaluation, checkpoints and trackers."""
    source = t.source
    if t.has("data.eval") or t.has("data.eval_fraction"):
        rows = t.entries["training.per_device_train_batch_size"].value
        if source.get("eval_batch_size") is None:
            t.put("training.per_device_eval_batch_size", rows, "micro_batch_size", comment="that of training, as there")
        carry_per_epoch(t, "evals_per_epoch", "training.eval_steps")
        t.carry("early_stopping_patience", "training.early_stopping_patience")
    t.leave_all({(Why.ABSENT, "there are no rows to evaluate on"): "evals_per_epoch"})
    carry_per_epoch(t, "saves_per_epoch", "training.save_steps")
    for key, ours in {"eval_steps": "training.eval_steps", "save_steps": "training.save_steps"}.items():
        if source.number(key):
            t.carry(key, ours)
    tracked = {
        "wandb": [key for key in ("wandb_project", "use_wandb") if source.get(key)],
        "mlflow": [key for key in ("mlflow_tracking_uri", "mlflow_experiment_name", "use_mlflow") if source.get(key)],
        "tensorboard": [key for key in ("use_tensorboard",) if source.get(key)],
    }
    used = [tracker for tracker, keys in tracked.items() if keys]
    if used:
        t.put("training.trackers", used, *(key for keys in tracked.values() for key in keys))
    named = next((key for key in ("wandb_name", "wandb_project") if source.get(key)), "")
    if named:
        t.carry(named, "training.run_name")
    if named == "wandb_name":
        t.leave("wandb_project", Why.ABSENT, "trackers take training.run_name for the project too")
