"""Training steps on one card as users of other tools would write them: transformers' Trainer, TRL and Unsloth.

Imports nothing of `framework`. Each function trains a causal model from random weights in bfloat16, and calls
`clock.start()` before the first step and `clock.tick()` at the end of each.
"""

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

RATE = 1e-5


class Clock(Protocol):
    """Timer of the steps."""

    def start(self) -> None: ...

    def tick(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """Training job. `architecture`: keys of a transformers config; `rows`: int64 `[rows, tokens]` on the host, used in
    turn, `micro` per step; `rank` of a LoRA adapter on all linear layers, 0 for full fine-tuning."""

    architecture: dict[str, Any]
    rows: Tensor
    micro: int
    rank: int
    steps: int
    clock: Clock

    @property
    def lists(self) -> list[list[int]]:
        """The tokens of every step, one list per row."""
        taken = self.rows.repeat(self.steps * self.micro // len(self.rows) + 1, 1)
        return [row.tolist() for row in taken]


class _Rows(torch.utils.data.Dataset):
    """The rows with labels and a mask, as in a tokenized dataset, repeated."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)}


def _callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    return Watch()


def _settings(job: Job, folder: str, checkpoints: bool) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": job.micro,
        "gradient_accumulation_steps": 1,  # Unsloth's default is 2
        "max_steps": job.steps,
        "learning_rate": RATE,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": checkpoints,
        "save_strategy": "no",
        "logging_steps": 10_000,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _model(job: Job) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job.architecture), dtype=torch.bfloat16)
    model.config.use_cache = False
    if not job.rank:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, adapter)
    return adapted


def by_trainer(job: Job, checkpoints: bool = False, liger: bool = False) -> None:
    """transformers' Trainer over bfloat16 weights, which is what `from_pretrained` gives."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(job, folder, checkpoints) | {"use_liger_kernel": liger}
        trainer = Trainer(
            model=_model(job),
            args=TrainingArguments(**settings),
            train_dataset=_Rows(job.rows),
            data_collator=default_data_collator,
            callbacks=[_callback(job.clock)],
        )
        trainer.train()


def by_trl(job: Job, checkpoints: bool = False) -> None:
    """TRL's SFTTrainer on tokenized rows."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": job.lists})
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(job, folder, checkpoints) | {"max_length": job.rows.shape[1]}
        trainer = SFTTrainer(
            model=_model(job),
            args=SFTConfig(**settings),
            train_dataset=data,
            processing_class=_tokenizer(),
            callbacks=[_callback(job.clock)],
        )
        trainer.train()


def by_unsloth(job: Job, checkpoints: bool = False) -> None:
    """Unsloth's FastLanguageModel in TRL's SFTTrainer, as in its notebooks; activation checkpoints are its own, on the
    host."""
    from unsloth import FastLanguageModel  # isort: skip - before transformers, which it patches
    from datasets import Dataset
    from transformers import default_data_collator
    from trl import SFTConfig, SFTTrainer

    kind: Any = "unsloth" if checkpoints else False
    with tempfile.TemporaryDirectory() as folder:
        _empty_checkpoint(job.architecture, Path(folder))
        model, tokenizer = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=job.rows.shape[1],
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=not job.rank,
            use_gradient_checkpointing=kind,
        )
    if job.rank:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = FastLanguageModel.get_peft_model(
            model, r=job.rank, lora_alpha=2 * job.rank, target_modules=names, use_gradient_checkpointing=kind
        )
    _draw(model)
    taken = job.lists
    mask = [[1] * job.rows.shape[1]] * len(taken)
    data = Dataset.from_dict({"input_ids": taken, "labels": taken, "attention_mask": mask})
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(job, folder, False)
        del settings["gradient_checkpointing"]
        settings |= {"max_length": job.rows.shape[1], "dataset_kwargs": {"skip_prepare_dataset": True}}
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**settings),
            train_dataset=data,
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )
        trainer.add_callback(_callback(job.clock))
        trainer.train()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"t{index}": index for index in range(3, 1000)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def _empty_checkpoint(architecture: dict[str, Any], folder: Path) -> None:
    """Write a sparse bfloat16 checkpoint at once, as Unsloth loads only files. Values are drawn afterwards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    _tokenizer().save_pretrained(folder)


def _draw(model: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
