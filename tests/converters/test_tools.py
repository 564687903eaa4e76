"""Conversion of the keys of each tool, in small texts: our values have the meaning that theirs have there."""

from pathlib import Path

import pytest
import yaml

from framework.checks import check_request
from framework.converters import Conversion, convert
from framework.converters.translation import Why
from framework.errors import RequestError

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
datasets: [{path: tatsu-lab/alpaca, type: alpaca, split: "train[:10%]"}]
adapter: qlora
load_in_4bit: true
lora_target_linear: true
lora_r: 32
lora_alpha: 16
micro_batch_size: 2
batch_size: 8
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 0.1
bf16: auto
gradient_checkpointing: yes
tf32: on
val_set_size: 0.05
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
lora_rank: 16
dataset: dpo_en_demo
template: llama3
cutoff_len: 1024
max_samples: 500
bf16: true
pref_beta: 0.2
deepspeed: examples/deepspeed/ds_z3_config.json
"""
OUMI = """\
model: {model_name: meta-llama/Llama-3.1-8B, torch_dtype_str: bfloat16, model_max_length: 4096,
  freeze_layers: [embeddings]}
data:
  train:
    collator_name: text_completions_only_with_padding
    train_target: FINAL_ASSISTANT_TURN
    datasets:
      - dataset_name: PromptResponseDataset
        dataset_kwargs: {hf_dataset_path: some/rows, prompt_column: question, response_column: completion}
training: {trainer_type: TRL_SFT, lr_scheduler_type: cosine_with_min_lr, learning_rate: 1e-4, save_steps: 0,
  lr_scheduler_kwargs: {min_lr_rate: 0.1}, enable_wandb: true, optimizer: paged_adamw_8bit}
fsdp: {enable_fsdp: true, sharding_strategy: HYBRID_SHARD, forward_prefetch: true}
"""
TORCHTUNE = """\
output_dir: /tmp/out
model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj],
  apply_lora_to_mlp: true, lora_rank: 8, lora_alpha: 16}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /tmp/Llama-3.1-8B/,
  output_dir: "${output_dir}/model"}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: true}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger}
batch_size: 4
epochs: 2
max_steps_per_epoch: 50
clip_grad_norm: null
dtype: bf16
"""
LITGPT = """\
checkpoint_dir: checkpoints/microsoft/phi-3
precision: bf16-true
quantize: bnb.nf4
lora_r: 4
lora_query: true
lora_key: false
lora_value: true
lora_projection: true
lora_mlp: false
data: {class_path: litgpt.data.Alpaca2k, init_args: {mask_prompt: true, val_split_fraction: 0.05}}
train: {global_batch_size: 10, micro_batch_size: 4, log_interval: 6, epochs: 2, max_seq_length: 512, min_lr: 6e-5}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2e-4, betas: [0.9, 0.95]}}
"""
TEXTS = {"Axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "Oumi": OUMI, "torchtune": TORCHTUNE, "litgpt": LITGPT}


@pytest.fixture
def converted(tmp_path):
    def run(text: str) -> tuple[Conversion, dict]:
        file = tmp_path / "theirs.yml"
        file.write_text(text)
        found = convert(file)
        return found, yaml.safe_load(found.recipe.replace("e-0", "e-"))

    return run


@pytest.fixture
def refusal(tmp_path):
    def run(text: str) -> RequestError:
        file = tmp_path / "theirs.yml"
        file.write_text(text)
        with pytest.raises(RequestError) as caught:
            convert(file)
        return caught.value

    return run


def reasons(found: Conversion, key: str) -> list[tuple[Why, str]]:
    return [(row.why, row.text) for row in found.left if row.key == key]


@pytest.mark.parametrize("tool", TEXTS)
def test_the_tool_is_recognized_by_its_keys_and_its_recipe_passes_the_check(tool, converted, tmp_path) -> None:
    found, recipe = converted(TEXTS[tool])
    assert found.tool == tool
    file = tmp_path / "ours.yaml"
    file.write_text(found.recipe)
    shared = ["gpu.count=2"] if "fsdp" in recipe else []
    assert check_request(file, ["gpu=h100_80gb", *shared]).problems == ()


def test_axolotl(converted) -> None:
    found, recipe = converted(AXOLOTL)
    training = recipe["training"]
    assert training["gradient_accumulation_steps"] == 4  # 8 rows / 2
    assert training["warmup_ratio"] == 0.1  # below 1 it is a share there
    assert "warmup_steps" not in training
    assert training["num_train_epochs"] == 1  # its default
    assert training["optimizer"] == "adamw_8bit"
    assert training["enable_gradient_checkpointing"] is True
    assert training["tf32"] is True  # `on` of YAML 1.1
    assert recipe["model"]["torch_dtype_str"] == "bfloat16"
    assert recipe["peft"] == {
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_target_modules": ["all-linear"],
        "q_lora": True,
        "use_bnb_nested_quant": True,
    }
    assert recipe["data"]["train"] == [{"path": "tatsu-lab/alpaca", "split": "train[:10%]", "format": "alpaca"}]
    assert recipe["data"]["eval_fraction"] == 0.05
    assert found.carried["warmup_steps"] == ("training.warmup_ratio",)


def test_full_weights_of_axolotl_are_bfloat16_and_sharded_ones_have_masters(converted) -> None:
    full = "base_model: some/model\nbf16: true\nmicro_batch_size: 1\nlearning_rate: 1e-4\n"
    _, recipe = converted(full)
    assert recipe["model"]["torch_dtype_str"] == "bfloat16"
    assert "mixed_precision_dtype" not in recipe["training"]
    _, recipe = converted(f"{full}fsdp_config: {{offload_params: true, reshard_after_forward: false}}\n")
    assert "torch_dtype_str" not in recipe["model"]
    assert recipe["training"]["mixed_precision_dtype"] == "bf16"
    assert recipe["fsdp"] == {"enable_fsdp": True, "sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}


def test_rows_held_out_by_number(converted) -> None:
    _, recipe = converted("base_model: a/b\nval_set_size: 200\ndatasets: [{path: c/d, type: alpaca}]\n")
    assert recipe["data"]["eval"] == [{"path": "c/d", "format": "alpaca", "split": "train[:200]"}]
    assert recipe["data"]["train"] == [{"path": "c/d", "format": "alpaca", "split": "train[200:]"}]


def test_trackers_of_axolotl_their_project_and_the_name_of_the_run(converted) -> None:
    _, recipe = converted("base_model: a/b\nwandb_project: letters\nwandb_name: first\n")
    assert recipe["training"]["trackers"] == ["wandb"]
    assert recipe["training"]["tracker_project"] == "letters"
    assert recipe["training"]["run_name"] == "first"
    _, recipe = converted("base_model: a/b\nwandb_project:\nuse_swanlab: true\nswanlab_project: letters\n")
    assert recipe["training"]["trackers"] == ["swanlab"]
    assert recipe["training"]["tracker_project"] == "letters"


@pytest.mark.parametrize("enabled", ["false", "null", "true"])
def test_what_a_switch_turns_off_asks_for_nothing(enabled, converted) -> None:
    found, _ = converted(f"{TORCHTUNE}profiler: {{enabled: {enabled}, wait_steps: 5}}\n")
    (why,) = (why for why, _ in reasons(found, "profiler.wait_steps"))
    assert why is (Why.ABSENT if enabled == "true" else Why.DEFAULT)


def test_an_adapter_that_is_trained_on(converted) -> None:
    _, recipe = converted(AXOLOTL + "lora_model_dir: runs/first\npeft_layers_to_transform: [0, 1]\n")
    assert (recipe["peft"]["adapter_path"], recipe["peft"]["layers_to_transform"]) == ("runs/first", [0, 1])
    _, recipe = converted(LLAMA_FACTORY + "adapter_name_or_path: saves/sft\n")
    assert recipe["peft"]["adapter_path"] == "saves/sft"
    _, recipe = converted(LLAMA_FACTORY.replace("stage: dpo", "stage: sft") + "neftune_noise_alpha: 5\n")
    assert recipe["training"]["neftune_noise_alpha"] == 5


def test_tokens_that_are_added_positions_that_are_stretched_and_templates(converted) -> None:
    rope = "overrides_of_model_config: {rope_scaling: {type: yarn, factor: 4.0}}\n"
    tokens = "tokens: ['<a>', '<b>']\nresize_token_embeddings_to_32x: true\nchat_template: phi_35\n"
    _, recipe = converted(AXOLOTL + tokens + rope)
    assert recipe["model"]["chat_template"] == "phi3"
    assert recipe["model"]["added_tokens"] == ["<a>", "<b>"]
    assert recipe["model"]["resize_embeddings"] == 32
    assert recipe["model"]["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    plain = LLAMA_FACTORY.replace("deepspeed: examples/deepspeed/ds_z3_config.json\n", "")
    found, recipe = converted(plain + "add_tokens: <a>,<b>\nresize_vocab: true\nrope_scaling: yarn\n")
    assert recipe["model"]["added_tokens"] == ["<a>", "<b>"]
    assert recipe["model"]["resize_embeddings"] is True
    [(why, text)] = reasons(found, "rope_scaling")
    assert why is Why.WRITE
    assert "rope_type: yarn" in text
    body = "model: {model_name: a/b, adapter_model: first, model_kwargs: {rope_scaling: {type: linear, factor: 2}}}\n"
    rest = "data:" + OUMI.partition("data:")[2].replace("trainer_type", "use_peft: true, trainer_type")
    _, recipe = converted(body + rest)
    assert recipe["model"]["rope_scaling"] == {"rope_type": "linear", "factor": 2}
    assert recipe["peft"]["adapter_path"] == "first"


def test_texts_that_are_too_long(converted) -> None:
    """Rows are dropped there by default; texts of `completion` are split into several."""
    source = "base_model: a/b\ndatasets: [{path: c/d, type: %s}]\n"
    assert converted(source % "alpaca")[1]["data"]["truncation"] == "drop"
    assert "truncation" not in converted(source % "completion")[1]["data"]
    assert "truncation" not in converted(source % "alpaca" + "excess_length_strategy: truncate\n")[1]["data"]


def test_conversations_of_axolotl(converted) -> None:
    source = (
        "{path: c/d, type: chat_template, field_messages: chats, message_property_mappings: {role: from, content: %s}}"
    )
    _, recipe = converted(f"base_model: a/b\ndatasets: [{source % 'value'}]\n")
    assert recipe["data"]["train"] == [{"path": "c/d", "format": "sharegpt", "columns": {"conversations": "chats"}}]
    _, recipe = converted(f"base_model: a/b\ndatasets: [{source % 'content'}]\n")
    assert recipe["data"]["train"] == [{"path": "c/d", "format": "messages", "columns": {"messages": "chats"}}]


def test_llama_factory(converted) -> None:
    found, recipe = converted(LLAMA_FACTORY)
    training = recipe["training"]
    assert training["task"] == "preference"
    assert training["preference"] == {"beta": 0.2, "precompute_reference": True}  # weights are sharded
    assert training["enable_gradient_checkpointing"] is True  # on unless it is switched off
    assert recipe["model"]["chat_template"] == "llama3"
    assert recipe["peft"] == {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["all-linear"]}
    assert recipe["fsdp"] == {"enable_fsdp": True}
    assert recipe["data"]["train"] == [{"path": "data/dpo_en_demo.json", "split": "train[:500]"}]
    assert reasons(found, "do_train")[0][0] is Why.DEFAULT


def test_oumi(converted) -> None:
    found, recipe = converted(OUMI)
    assert recipe["defaults"] == [{"model": "llama3.1_8b"}]  # of that name, so that a plan needs no network
    assert recipe["model"] == {"torch_dtype_str": "bfloat16", "model_max_length": 4096, "freeze_layers": ["embeddings"]}
    assert recipe["training"]["min_learning_rate"] == pytest.approx(1e-5)
    assert recipe["training"]["trackers"] == ["wandb"]
    assert recipe["training"]["optimizer"] == "adamw_torch_fused"
    assert "cannot be sharded" in reasons(found, "training.optimizer")[0][1]
    assert recipe["data"]["supervise"] == "last"
    columns = {"prompt": "question"}
    assert recipe["data"]["train"] == [{"path": "some/rows", "format": "prompt_completion", "columns": columns}]
    assert reasons(found, "training.save_steps") == [(Why.DEFAULT, "the end is saved, and nothing before it")]


def test_torchtune(converted) -> None:
    found, recipe = converted(TORCHTUNE)
    training = recipe["training"]
    assert recipe["model"]["model_name"] == "/tmp/Llama-3.1-8B"
    assert training["max_steps"] == 100
    assert training["weight_decay"] == 0.01  # torch's default
    assert training["lr_scheduler_type"] == "constant"  # there is no schedule
    assert training["max_grad_norm"] == 0
    assert training["mixed_precision_dtype"] == "none"
    assert training["trackers"] == ["wandb"]
    assert recipe["peft"]["lora_target_modules"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert recipe["peft"]["q_lora"] is True
    assert recipe["data"]["supervise"] == "all"
    assert found.carried["optimizer.fused"] == ("training.optimizer",)


def test_litgpt(converted) -> None:
    _, recipe = converted(LITGPT)
    training = recipe["training"]
    assert recipe["model"]["model_name"] == "microsoft/phi-3"
    assert training["gradient_accumulation_steps"] == 2  # 10 rows / 4, the rest dropped
    assert "global_batch_size" not in training
    assert training["logging_steps"] == 3  # 6 micro-batches
    assert training["lr_scheduler_type"] == "cosine"  # finetuning does not read min_lr
    assert training["adam_beta2"] == 0.95
    assert training["max_grad_norm"] == 0
    assert recipe["peft"]["lora_target_modules"] == ["qkv_proj", "o_proj"]
    assert recipe["peft"]["q_lora"] is True
    assert "use_bnb_nested_quant" not in recipe["peft"]
    assert recipe["data"]["supervise"] == "assistant"


def test_tokens_of_litgpt_are_steps(converted) -> None:
    text = """\
model_name: pythia-14m
data: TinyStories
train: {global_batch_size: 8, micro_batch_size: 4, max_tokens: 409600, min_lr: 6e-5}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 6e-4}}
"""
    _, recipe = converted(text)
    assert recipe["training"]["max_steps"] == 100  # 409600 / (8 rows x 512 positions)
    assert recipe["training"]["min_learning_rate"] == pytest.approx(6e-5)
    assert recipe["model"]["architecture"]["model_type"] == "gpt_neox"
    assert recipe["model"]["load_pretrained_weights"] is False


def test_what_does_not_hold_here_is_left_and_reported(converted) -> None:
    text = (
        AXOLOTL.replace("lora_r: 32", "lora_r: many") + "frobnicate: 3\nqat: {group_size: 32}\nseed: 42\nwandb_name:\n"
    )
    found, recipe = converted(text)
    assert "lora_r" not in recipe["peft"]
    assert reasons(found, "lora_r") == [(Why.WRITE, "peft.lora_r, a whole number, at least 1")]
    assert reasons(found, "frobnicate") == [(Why.ABSENT, "")]
    assert reasons(found, "qat.group_size") == [(Why.NOT_OURS, "quantisation-aware training")]
    assert reasons(found, "seed") == [(Why.DEFAULT, "training.seed: 42")]
    assert reasons(found, "wandb_name") == [(Why.DEFAULT, "empty")]
    line = text.splitlines().index("frobnicate: 3") + 1
    (message,) = (str(row) for row in found.left if row.key == "frobnicate")
    assert message.endswith(f":{line}: frobnicate: 3: no equivalent")


def test_what_is_trained_goes_before_what_saves_memory(converted) -> None:
    """A chunked loss does without the head's adapter: the adapter stays."""
    text = AXOLOTL + "cut_cross_entropy: true\nlora_modules_to_save: [lm_head]\n"
    found, recipe = converted(text)
    assert recipe["peft"]["lora_modules_to_save"] == ["lm_head"]
    assert "chunked_loss" not in recipe["model"]
    assert "the chunked loss uses the head's weight directly" in reasons(found, "cut_cross_entropy")[0][1]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        (AXOLOTL + "rl: grpo\n", "rl", "rollouts"),
        (AXOLOTL + "processor_type: AutoProcessor\n", "processor_type", "images or sound"),
        (LLAMA_FACTORY.replace("stage: dpo", "stage: ppo"), "stage", "rollouts"),
        (LLAMA_FACTORY.replace("do_train: true", "do_predict: true"), "do_predict", "trains nothing"),
        (LLAMA_FACTORY + "image_max_pixels: 262144\n", "image_max_pixels", "images"),
        ("model_name_or_path: a/b\ntemplate: qwen\ninfer_backend: vllm\n", "infer_backend", "trains nothing"),
        (OUMI.replace("TRL_SFT", "TRL_GRPO"), "training.trainer_type", "what the model generates"),
        ("model: {model_name: a/b}\ntasks: [{evaluation_backend: lm_harness}]\n", "tasks", "an evaluation"),
        (TORCHTUNE + "grpo_samples: 16\n", "grpo_samples", "rollouts"),
        ("model: {_component_: torchtune.models.gemma.gemma_2b}\ntasks: [a]\n", "model", "trains nothing"),
        ("base_model: a/b\nbase_model: c/d\n", "base_model", "written twice"),
    ],
)
def test_what_is_not_ours_is_refused_with_key_and_line(text, key, message, refusal) -> None:
    error = refusal(text)
    assert error.exit_code == 2
    (problem,) = error.problems
    assert problem.key == key
    assert message in problem.message
    assert problem.where is not None
    line = next(number for number, row in enumerate(text.splitlines(), 1) if key.rpartition(".")[2] in row)
    assert int(problem.where.rpartition(":")[2]) >= line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- a\n", "must hold a mapping"),
        ("", "is empty"),
        ("foo: 1\n", "no training file of Oumi, Axolotl, LLaMA-Factory, torchtune or litgpt"),
        ("training: {max_steps: 3}\n", "a recipe of tunesmith already"),
        ("a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\n"
         "c: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c]\n", "more than 3000 values"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(text, message, refusal) -> None:
    (problem,) = refusal(text).problems
    assert message in problem.message


def test_an_unknown_tool_is_reported_with_what_was_looked_for(refusal) -> None:
    (problem,) = refusal("foo: 1\n").problems
    assert problem.expected is not None
    for sign in ("_component_", "base_model", "model_name_or_path", "train.micro_batch_size", "data.train.datasets"):
        assert sign in problem.expected


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RequestError, match="No such file"):
        convert(Path("/nowhere/at/all.yml"))


def test_references_are_followed_and_endless_ones_end(converted) -> None:
    _, recipe = converted("base_model: a/b\nname: x\noutput_dir: runs/${name}\nlearning_rate: 1e-4\n")
    assert recipe["training"]["output_dir"] == "runs/x"
    found, _ = converted("base_model: a/b\nname: ${name}\noutput_dir: ${name}/${name}\n")
    assert "name" in {row.key for row in found.left}


def test_references_that_double_are_not_followed_to_the_end(converted) -> None:
    """Seven lines that would be 25 million characters."""
    lines = [f"k{index + 1}: {('${k' + str(index) + '}') * 12}" for index in range(5)]
    found, _ = converted("\n".join(["base_model: a/b", f"k0: {'x' * 99}", *lines, "output_dir: ${k5}"]))
    assert len(found.recipe) < 10_000


def test_what_a_reference_leads_nowhere_for_is_to_be_written(converted) -> None:
    found, recipe = converted(TORCHTUNE.replace("/tmp/out", "${oc.env:HOME}/out"))
    assert "output_dir" not in recipe["training"]
    assert reasons(found, "output_dir") == [(Why.WRITE, "training.output_dir: the reference in it leads nowhere")]


TINY_LITGPT = """\
checkpoint_dir: checkpoints/some/model
train: {{global_batch_size: {rows}, micro_batch_size: 4, max_seq_length: {length}}}
optimizer: {{class_path: torch.optim.AdamW, init_args: {{}}}}
data: {{class_path: litgpt.data.Alpaca2k}}
devices: {devices}
"""


def test_litgpt_on_several_devices_shards_and_drops_the_rests_of_both_divisions(converted) -> None:
    _, recipe = converted(TINY_LITGPT.format(rows=64, devices=4, length=512))
    assert recipe["training"]["global_batch_size"] == 64
    assert recipe["training"]["enable_gradient_checkpointing"] is True
    assert recipe["fsdp"] == {"enable_fsdp": True}
    found, recipe = converted(TINY_LITGPT.format(rows=20, devices=2, length=512))  # 20 // 2 // 4 = 2 of 4 rows on each
    assert recipe["training"]["gradient_accumulation_steps"] == 2
    assert "20 rows a step are 16" in found.recipe
    _, recipe = converted(TINY_LITGPT.format(rows=64, devices=1, length=512))
    assert "fsdp" not in recipe


def test_litgpt_has_defaults_of_its_rows_and_its_optimizer(converted) -> None:
    found, recipe = converted(TINY_LITGPT.format(rows=64, devices=1, length="null"))
    assert recipe["data"]["eval_fraction"] == 0.05
    assert (recipe["training"]["learning_rate"], recipe["training"]["weight_decay"]) == (0.001, 0.01)
    assert reasons(found, "train.max_seq_length")[0][0] is Why.WRITE
    _, recipe = converted(LITGPT)
    assert recipe["training"]["optimizer"] == "paged_adamw_32bit"  # of a quantised base


def test_defaults_of_the_others_that_differ_from_ours_are_written(converted) -> None:
    axolotl = "base_model: some/model\nlearning_rate: 1e-4\n"
    assert converted(axolotl)[1]["training"]["warmup_ratio"] == 0.03
    assert converted(axolotl + "warmup_steps: 10\n")[1]["training"]["warmup_steps"] == 10
    assert "warmup_ratio" not in converted(axolotl + "lr_scheduler: constant\n")[1]["training"]
    assert converted(axolotl + "rl: simpo\n")[1]["training"]["preference"]["beta"] == 0.1
    factory = "model_name_or_path: some/model\ndo_train: true\n"
    assert converted(factory)[1]["model"]["torch_dtype_str"] == "bfloat16"
    assert converted(factory + "stage: pt\n")[1]["data"]["packing"] is True
    assert converted(factory + "stage: pt\npacking: false\n")[1].get("data") is None
    assert converted(factory + "neat_packing: true\n")[1]["data"]["packing"] is True
    simpo = converted(factory + "stage: dpo\npref_loss: simpo\n")[1]["training"]["preference"]
    assert simpo == {"loss_type": "simpo", "beta": 0.1}
    galore = converted(factory + "finetuning_type: full\nuse_galore: true\ngalore_scale: 4\n")[1]["training"]
    assert (galore["projection_rank"], galore["projection_scale"]) == (16, 4)
    oumi = "model: {model_name: some/model}\ntraining: {trainer_type: TRL_SFT, use_peft: true}\n"
    assert converted(oumi)[1]["model"]["torch_dtype_str"] == "float32"
    spelled = oumi.replace("model}", "model, torch_dtype_str: bf16}")
    assert converted(spelled)[1]["model"]["torch_dtype_str"] == "bfloat16"


def test_nothing_is_evaluated_in_between_unless_the_strategy_says_so(converted) -> None:
    factory = "model_name_or_path: a/b\ndo_train: true\ndataset: x\nval_size: 0.1\neval_steps: 50\n"
    oumi = OUMI.replace("save_steps: 0", "save_steps: 0, eval_steps: 50")
    oumi = oumi.replace("  train:", "  validation: {datasets: [{dataset_name: a/b}]}\n  train:")
    for text, key, more in (
        (factory, "eval_steps", "eval_strategy: steps\n"),
        (oumi, "training.eval_steps", "eval_strategy: steps"),
    ):
        found, recipe = converted(text)
        assert "eval_steps" not in recipe["training"]
        assert reasons(found, key)[0][0] is Why.DEFAULT
        with_strategy = text + more if text is factory else text.replace("eval_steps", f"{more}, eval_steps")
        assert converted(with_strategy)[1]["training"]["eval_steps"] == 50


def test_epochs_and_shares_of_a_run_are_distances(converted) -> None:
    factory = "model_name_or_path: a/b\ndo_train: true\ndataset: x\nval_size: 0.1\neval_strategy: epoch\n"
    assert converted(factory)[1]["training"]["eval_steps"] == "epoch"
    oumi = OUMI.replace("save_steps: 0", "save_steps: 0, save_epoch: true")
    assert converted(oumi)[1]["training"]["save_steps"] == "epoch"
    axolotl = "base_model: a/b\ndatasets: [{path: x, type: completion}]\nval_set_size: 0.1\nnum_epochs: 2\n"
    found, recipe = converted(axolotl + "evals_per_epoch: 4\nsaves_per_epoch: 1\nearly_stopping_patience: 3\n")
    training = recipe["training"]
    assert (training["eval_steps"], training["save_steps"], training["early_stopping_patience"]) == (0.125, "epoch", 3)
    found, recipe = converted(axolotl + "max_steps: 50\nevals_per_epoch: 4\nsaves_per_epoch: 0\n")
    assert "save_steps" not in recipe["training"]
    assert reasons(found, "evals_per_epoch")[0][0] is Why.WRITE
    assert converted(axolotl + "eval_steps: 0.05\n")[1]["training"]["eval_steps"] == 0.05


def test_torchtunes_optimizers_of_torchao_are_torchaos(converted) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW, lr: 3e-4, fused: true", "torchao.optim.AdamW8bit")
    _, recipe = converted(text)
    assert recipe["training"]["optimizer"] == "adamw_torchao_8bit"
    assert recipe["training"]["learning_rate"] == 0.001


def test_minus_one_step_is_no_length(converted) -> None:
    for text, key in (
        (AXOLOTL + "max_steps: -1\n", "max_steps"),
        (LLAMA_FACTORY + "max_steps: -1\n", "max_steps"),
        (OUMI.replace("save_steps: 0", "save_steps: 0, max_steps: -1"), "training.max_steps"),
    ):
        found, recipe = converted(text)
        assert reasons(found, key) == [(Why.DEFAULT, "off: the epochs count")]
        assert "max_steps" not in recipe["training"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("base_model: a/b\nval_set_size: many\n", "val_set_size"),
        ("base_model: a/b\nadapter: 7\n", "adapter"),
        ("model_name_or_path: a/b\ndo_train: true\nstage: [dpo]\n", "stage"),
        ("model_name_or_path: a/b\ndo_train: true\nval_size: 1e400\n", "val_size"),
        ("model: {model_name: a/b}\ntraining: {trainer_type: 5}\n", "training.trainer_type"),
        ("model: {model_name: a/b}\ntraining: {trainer_type: TRL_SFT, save_steps: soon}\n", "training.save_steps"),
    ],
)
def test_a_value_of_another_kind_is_not_called_the_default(text, key, converted) -> None:
    found, _ = converted(text)
    ((why, messages),) = reasons(found, key)
    assert why is Why.ABSENT
    assert messages.startswith("not read: a ")


@pytest.mark.parametrize(
    "text",
    [
        TORCHTUNE.replace("alpaca_dataset", "alpaca_dataset, partition: 1-9/0"),
        LITGPT.replace("checkpoint_dir: checkpoints/microsoft/phi-3", "model_name: tiny-llama-1.1b"),
        AXOLOTL.replace("batch_size: 8", "batch_size: 1e400"),
        LLAMA_FACTORY.replace("max_samples: 500", "max_samples: 1e400"),
        LITGPT.replace("global_batch_size: 10", "global_batch_size: 1e400"),
        OUMI.replace("dataset_kwargs:", "sample_count: 1e400\n        dataset_kwargs:"),
    ],
)
def test_numbers_that_are_none_or_endless_are_no_fault_of_ours(text, converted) -> None:
    assert converted(text)[0].recipe


def test_a_shape_whose_name_is_a_list_is_refused(refusal) -> None:
    text = "model_name: [x]\ntrain: {micro_batch_size: 8}\noptimizer: AdamW\n"
    (problem,) = refusal(text).problems
    assert problem.key == "model_name"


@pytest.mark.parametrize(
    ("rows", "made", "supervise"),
    [
        (
            "chat_dataset, source: a/b, conversation_column: turns, conversation_style: sharegpt",
            {"format": "sharegpt", "columns": {"conversations": "turns"}},
            None,
        ),
        (
            "chat_dataset, source: a/b, conversation_column: messages, conversation_style: OpenAI, train_on_input: on",
            {"format": "messages"},
            "all",
        ),
        (
            "instruct_dataset, source: a/b, column_map: {input: question}",
            {"format": "prompt_completion", "columns": {"prompt": "question", "completion": "output"}},
            None,
        ),
        (
            "text_completion_dataset, source: a/b, column: body",
            {"format": "text", "columns": {"text": "body"}},
            None,
        ),
    ],
)
def test_torchtunes_builders_name_form_and_columns(rows, made, supervise, converted) -> None:
    found, recipe = converted(TORCHTUNE.replace("alpaca_dataset", rows))
    assert recipe["data"]["train"] == [{"path": "a/b", **made}]
    assert recipe["data"].get("supervise") == supervise
    assert not [row.key for row in found.left if row.key.startswith("dataset.") and row.why is Why.ABSENT]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peft_init_lora_weights: gaussian", {"lora_init": "gaussian"}),
        ("peft_init_lora_weights: eva", {"lora_init": "eva"}),
    ],
)
def test_starts_of_axolotls_adapters(text, expected, converted) -> None:
    base = "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_alpha: 16\ndatasets: [{path: c/d, type: alpaca}]\n"
    _, recipe = converted(base + text)
    assert expected.items() <= recipe["peft"].items()


def test_rotations_of_llama_factory(converted) -> None:
    text = "stage: sft\nmodel_name_or_path: a/b\nfinetuning_type: oft\noft_block_size: 16\n"
    text += "oft_target: q_proj,v_proj\ndataset: c\n"
    _, recipe = converted(text)
    assert recipe["peft"] == {"peft_method": "oft", "oft_block_size": 16, "lora_target_modules": ["q_proj", "v_proj"]}


def test_rates_by_name_named_sets_and_noise(converted) -> None:
    axolotl = """
        base_model: Qwen/Qwen3-0.6B
        datasets: [{path: a.jsonl, type: alpaca}]
        embedding_lr: 0.00001
        lr_groups:
          - {name: values, modules: [v_proj, o_proj], lr: 0.0001}
    """
    groups = converted(axolotl)[1]["training"]["parameter_groups"]
    expected = [("v_proj", 1e-4), ("o_proj", 1e-4), ("embed_tokens", 1e-5)]
    assert [(each["match"], each["learning_rate"]) for each in groups] == expected
    factory = """
        model_name_or_path: Qwen/Qwen3-0.6B
        stage: sft
        template: qwen
        dataset: rows
        eval_dataset: code, chat
        eval_on_each_dataset: true
    """
    made = converted(factory)[1]["data"]["eval"]
    assert [(each["eval_set"], each["path"]) for each in made] == [
        ("code", "data/code.json"),
        ("chat", "data/chat.json"),
    ]
    oumi = """
        model: {model_name: Qwen/Qwen3-0.6B}
        data: {train: {datasets: [{dataset_name: text_sft, dataset_path: a.jsonl}]}}
        training:
          trainer_type: TRL_SFT
          trainer_kwargs: {neftune_noise_alpha: 5, label_smoothing_factor: 0.1}
          dataloader_num_workers: 0
    """
    found, recipe = converted(oumi)
    assert [why for why, _ in reasons(found, "training.dataloader_num_workers")] == [Why.DEFAULT]
    training = recipe["training"]
    assert (training["neftune_noise_alpha"], training["label_smoothing"]) == (5, 0.1)
