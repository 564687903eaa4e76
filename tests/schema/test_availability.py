"""What is declared and not built is refused; what is built is not."""

import pytest

from framework.schema import availability
from framework.schema.availability import ROWS, left_open, unavailable
from framework.schema.config import TrainingConfig
from framework.schema.keys import every_key


def found(**sections):
    return {key: sentence for key, sentence, _ in unavailable(TrainingConfig.model_validate(sections))}


def test_the_defaults_are_available():
    assert not found()


def test_every_row_is_about_a_key_and_no_key_has_two():
    keys = [row.key for row in ROWS]
    assert set(keys) <= set(every_key())
    assert len(keys) == len(set(keys))


def test_what_is_not_built_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(availability, "ROWS", (availability.Row("training.seed", (42,), "another beginning"),))
    [(name, sentence)] = found(training={"seed": 7}).items()
    assert (name, sentence) == ("training.seed", "not yet available: another beginning (7)")
    assert not found(training={"seed": 42})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "task", "pretrain"),
        ("training", "optimizer", "adamw_torch_fused"),
        ("training", "optimizer", "adafactor"),
        ("training", "optimizer", "paged_adamw"),
        ("training", "rounding", "kahan"),
        ("training", "mixed_precision_dtype", "bf16"),
        ("training", "mixed_precision_dtype", "half"),
        ("model", "torch_dtype_str", "float16"),
        ("training", "enable_gradient_checkpointing", True),
        ("training", "compile", True),
        ("training", "activation_memory_budget", 0.5),
        ("training", "run_name", "auto"),
        ("training", "empty_device_cache_steps", 50),
        ("training", "lr_scheduler_type", "cosine_with_min_lr"),
        ("training", "trackers", ["wandb"]),
        ("model", "torch_dtype_str", "auto"),
        ("model", "attn_implementation", "eager"),
        ("model", "attn_implementation", "ring_attention"),
        ("fsdp", "tensor_parallel_size", 2),
        ("model", "chunked_loss", 512),
        ("model", "freeze_layers", ["auto"]),
        ("peft", "peft_method", "dora"),
        ("peft", "q_lora", True),
        ("peft", "peft_save_mode", "merged"),
        ("data", "supervise", "assistant"),
        ("data", "truncation", "drop"),
        ("data", "packing", True),
    ],
)
def test_what_is_built_is_not_refused(section, key, value):
    assert not found(**{section: {key: value}})


def test_what_is_auto_is_left_open_where_it_is_a_lever():
    training = {"compile": "auto", "per_device_train_batch_size": "auto", "run_name": "auto"}
    model = {"chunked_loss": "auto", "torch_dtype_str": "auto", "freeze_layers": ["auto"]}
    config = TrainingConfig.model_validate({"training": training, "model": model})
    keys = ("training.per_device_train_batch_size", "training.compile", "model.chunked_loss")
    assert set(left_open(config)) == set(keys)
    assert not found(training=training, model=model)
