"""Old and foreign names of keys: removed ones, and those of other tools, with ours."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OldName:
    """Replacement of a name."""

    use: str | None
    """The key. None: there is no such key, and `how` explains why."""
    removed_in: int | None = None
    """Schema version in which the key was removed. None: another tool's name."""
    how: str = ""
    """What to write under the key, or what to do if there is none."""


_OURS_FOR: Mapping[str, str] = {
    "data.cache": "dataset_prepared_path overwrite_cache",
    "data.eval": "dataset_val eval_dataset eval_datasets test_datasets validation",
    "data.eval_fraction": "val_set_size val_size",
    "data.packing": "packed sample_packing",
    "data.supervise": "mask_history train_on_input train_on_inputs train_on_prompt",
    "data.train": "dataset datasets train_dataset",
    "data.workers": "dataloader_num_workers",
    "fsdp": "deepspeed fsdp_config",
    "fsdp.transformer_layer_cls": "auto_wrap_policy fsdp_transformer_layer_cls_to_wrap",
    "gpu.count": "devices nproc_per_node num_nodes",
    "model.attn_implementation": "flash_attention flash_attn sdp_attention xformers_attention",
    "model.chunked_loss": "cut_cross_entropy liger_cross_entropy liger_fused_linear_cross_entropy num_output_chunks",
    "model.enable_liger_kernel": "liger_glu_activation liger_layer_norm liger_rms_norm liger_rope use_liger_kernel",
    "model.freeze_layers": "freeze_trainable_layers freeze_trainable_modules unfrozen_parameters",
    "model.model_max_length": "cutoff_len max_length max_seq_len max_seq_length seq_len sequence_len",
    "model.model_name": "base_model checkpoint_dir model_name_or_path pretrained_model_name_or_path",
    "model.torch_dtype_str": "dtype precision pure_bf16 torch_dtype",
    "peft.lora_alpha": "peft.alpha",
    "peft.lora_dropout": "peft.dropout",
    "peft.lora_r": "lora_rank peft.r peft.rank",
    "peft.lora_target_modules": "apply_lora_to_mlp apply_lora_to_output lora_attn_modules lora_head lora_key lora_mlp "
    "lora_projection lora_query lora_target_linear lora_value",
    "peft.peft_method": "init_lora_weights lora_init_weights use_dora use_rslora",
    "peft.q_lora": "load_in_4bit quantization_bit quantize",
    "peft.q_lora_bits": "load_in_8bit",
    "peft.use_bnb_nested_quant": "bnb_4bit_use_double_quant double_quantization",
    "training.activation_offload": "activation_offloading enable_activation_offloading",
    "training.best_metric": "metric_for_best_model",
    "training.empty_device_cache_steps": "torch_empty_cache_steps",
    "training.enable_gradient_checkpointing": "activation_checkpointing enable_activation_checkpointing "
    "gradient_checkpointing",
    "training.eval_first": "eval_on_start",
    "training.eval_steps": "eval_strategy evals_per_epoch evaluation_strategy run_val_every_n_steps",
    "training.export_best": "load_best_model_at_end save_best_model",
    "training.learning_rate": "lr",
    "training.logging_steps": "log_every_n_steps",
    "training.max_grad_norm": "gradient_clipping",
    "training.max_steps": "max_steps_per_epoch",
    "training.mixed_precision_dtype": "bf16 bnb_4bit_compute_dtype fp16",
    "training.num_train_epochs": "epochs num_epochs",
    "training.on_oom": "auto_find_batch_size",
    "training.optimizer": "optim",
    "training.optimizer_in_backward": "optimizer_in_bwd",
    "training.per_device_eval_batch_size": "batch_size_val eval_batch_size",
    "training.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size",
    "training.run_name": "wandb_name wandb_run_name",
    "training.save_steps": "save_strategy saves_per_epoch",
    "training.task": "rl stage trainer_type",
    "training.trackers": "enable_tensorboard enable_wandb logger_name metric_logger report_to use_wandb",
    "training.tracker_project": (
        "comet_project_name mlflow_experiment_name swanlab_project trackio_project wandb_project"
    ),
    "training.use_peft": "adapter finetuning_type",
}
"""Our key -> names in Oumi, Axolotl, LLaMA-Factory, torchtune and litgpt, and in transformers' `TrainingArguments`."""

_HOW: Mapping[str, str] = {
    "adapter": "`peft=lora` or `peft=qlora` sets it and the rest",
    "auto_find_batch_size": "`shrink`, which keeps the global batch",
    "apply_lora_to_mlp": "`[all-linear]` is every linear layer but the head",
    "data.train": "a list of `{path: ..}`",
    "finetuning_type": "`peft=lora` or `peft=qlora` sets it and the rest",
    "freeze_trainable_layers": "what to freeze",
    "freeze_trainable_modules": "what to freeze",
    "load_in_8bit": "8, with `peft.q_lora: true`",
    "lora_target_linear": "`[all-linear]`",
    "mask_history": "`last`",
    "pure_bf16": "`bfloat16`, with `training.mixed_precision_dtype: none`",
    "unfrozen_parameters": "what to freeze",
    "metric_logger": "a list: `[wandb]`",
    "report_to": "a list: `[wandb]`",
    "rl": "`preference`, and `training.preference.loss_type`",
    "train_on_inputs": "`all`, or `completion`",
    "wandb_project": "with `training.trackers: [wandb]`",
}
"""Name -> what to write under our key, where that is not as plain."""

_NO_KEY: Mapping[str, tuple[str, ...]] = {
    "each process has one device, and the tool puts the model there: `gpu=cpu` trains on the CPU, `--nproc N` on N "
    "devices, and fsdp.enable_fsdp splits the model over them": ("device", "device_map"),
    "`tunesmith train --resume` continues from the last checkpoint in the run folder": (
        "auto_resume_from_checkpoints", "resume", "resume_from_checkpoint",
    ),
    "`tunesmith train --overwrite` replaces the contents of the run folder": ("overwrite_output_dir",),
    "`tunesmith push RUN owner/name` uploads the trained model": (
        "export_hub_model_id", "hub_model_id", "hub_private_repo", "hub_strategy", "push_to_hub",
    ),
    "whether higher or lower is better follows from the metric's name (training.best_metric)": ("greater_is_better",),
    "a checkpoint always has everything for a resume, and the separate export is only the model": (
        "save_only_model",
    ),
    "fsdp.forward_prefetch and fsdp.backward_prefetch limit what is gathered ahead": ("limit_all_gathers",),
    "sharding is FSDP2's, which has no such switch": (
        "fsdp_version", "min_num_params", "sync_module_states", "use_orig_params",
    ),
    "units are stored as they are gathered (training.mixed_precision_dtype)": ("bnb_4bit_quant_storage",),
    "a trained weight without a gradient is an error, so there is no search for unused ones": (
        "ddp_find_unused_parameters", "find_unused_parameters",
    ),
    "rows are always padded on the right": ("padding_side",),
    "an evaluation sums losses and counts batch by batch and keeps no logits": (
        "batch_eval_metrics", "eval_accumulation_steps", "prediction_loss_only",
    ),
    "an evaluation uses the precision of training": ("bf16_full_eval", "fp16_full_eval"),
    "the loss is always the mean over all supervised tokens of a step": (
        "average_tokens_across_devices",
    ),
    "a non-finite loss stops the run": ("logging_nan_inf_filter",),
    "the class follows from the model's config": ("model_type", "tokenizer_type"),
    "rows are always shuffled, by training.seed": ("shuffle", "shuffle_merged_datasets"),
    "take a slice of the source: `split: train[:1000]` in data.train": ("max_samples", "max_train_samples"),
    "rows are padded to the longest of their micro-batch": ("pad_to_max_length", "pad_to_sequence_len"),
    "the command decides: `tunesmith train`": ("do_eval", "do_predict", "do_train"),
}  # fmt: skip
"""Why there is no such key -> names in other tools."""


def _names() -> Iterator[tuple[str, OldName]]:
    for key, names in _OURS_FOR.items():
        yield from ((name, OldName(key, how=_HOW.get(name, _HOW.get(key, "")))) for name in names.split())
    for reason, others in _NO_KEY.items():
        yield from ((name, OldName(None, how=reason)) for name in others)


OLD_NAMES = dict(_names())
"""Dotted key, or its last part -> its replacement."""
