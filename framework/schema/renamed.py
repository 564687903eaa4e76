"""Names that a recipe may still carry: keys that left the schema, and what other tools call ours."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OldName:
    """What to write instead."""

    use: str
    removed_in: int | None = None
    """Version of the schema in which the key was removed. None: another tool's name, never a key here."""


OLD_NAMES = {
    "batch_size": OldName("training.per_device_train_batch_size"),
    "bf16": OldName("training.mixed_precision_dtype"),
    "datasets": OldName("data.train"),
    "dataloader_num_workers": OldName("data.workers"),
    "epochs": OldName("training.num_train_epochs"),
    "evals_per_epoch": OldName("training.eval_steps"),
    "flash_attention": OldName("model.attn_implementation"),
    "fp16": OldName("training.mixed_precision_dtype"),
    "gradient_checkpointing": OldName("training.enable_gradient_checkpointing"),
    "gradient_clipping": OldName("training.max_grad_norm"),
    "load_in_4bit": OldName("peft.q_lora"),
    "lr": OldName("training.learning_rate"),
    "max_length": OldName("model.model_max_length"),
    "max_seq_length": OldName("model.model_max_length"),
    "micro_batch_size": OldName("training.per_device_train_batch_size"),
    "num_epochs": OldName("training.num_train_epochs"),
    "peft.alpha": OldName("peft.lora_alpha"),
    "peft.dropout": OldName("peft.lora_dropout"),
    "peft.r": OldName("peft.lora_r"),
    "peft.rank": OldName("peft.lora_r"),
    "report_to": OldName("training.trackers"),
    "sequence_len": OldName("model.model_max_length"),
    "torch_dtype": OldName("model.torch_dtype_str"),
    "trainer_type": OldName("training.task"),
    "val_set_size": OldName("data.eval_fraction"),
}
"""Dotted key, or last part of one -> what stands for it now. Rows without `removed_in` are the names in the recipes
of Oumi, Axolotl, LLaMA-Factory, torchtune, litgpt and the `TrainingArguments` of transformers."""
