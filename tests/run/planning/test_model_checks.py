"""Tier B of `check`: what it looks at where a search is still to decide."""

import ast
from pathlib import Path

import pytest

from framework.build.refuse import refuse_impossible
from framework.checks import check_request
from framework.errors import RequestError
from framework.run.planning.fit import decide
from framework.run.planning.model_checks import inspect
from framework.run.rehearsal.rehearse import rehearse
from framework.run.trainer import train
from framework.schema.config import TrainingConfig
from framework.schema.keys import admits_auto, every_key, left_open
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.every import RULES
from tests.grids import first
from tests.run.several import ROOT

RECIPE = """
model:
  architecture: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 128}
  load_pretrained_weights: false
  model_max_length: 64
training: {max_steps: 2, global_batch_size: 8}
"""
OPEN = [key for key in every_key() if admits_auto(key)]
COMPANY = {"training.activation_memory_budget": ["training.compile=true"]}
FOUND = {
    "framework/build/parallel": {
        "store_as", "sharded_blocks", "_refuse_mixed_units", "refuse_unsharded", "refuse_unplanned", "arrange", "_find",
    },
    "framework/build/attention": {"choose_kernel", "_refuse"},
    "framework/build/levers": {
        "arrange_blocks", "modules_to_compile", "require_torchao", "convert_products", "refuse_unknown_to_liger",
        "use_liger_kernels", "_refuse_other_activation", "_refuse_under_autocast", "__init__",
    },
    "framework/build/optimizers": {"matrix_parameters", "_refuse_patterns"},
    "framework/run/rehearsal": {"attend", "record", "_refuse_idle_policy"},
    "framework/run/inputs.py": {"read_inputs", "with_labels", "read_tokenizer", "total_steps"},
    "framework/run/record": {"open_folder", "make_writable", "check_trackers"},
    "framework/run/setup": set(),
}  # fmt: skip
"""Functions that refuse what `check` finds by the model's shape: as it assembles it, asks for several ranks, or has a
forward pass planned."""
OF_THE_START = {
    "choose_allocator": "the environment that the run starts in",
    "_refuse_contradiction": "the environment that the run starts in",
    "_bring_home": "host memory that may be locked there",
    "_mapped": "how much the disk of training.optimizer_offload_folder has free",
    "trackers.__init__": "the account and the server of a tracker",
    **dict.fromkeys(
        ("check_read", "_read", "_sums", "_with_reference", "_origin_of"), "the run that --resume goes on with"
    ),
    "check_adapters_base": "a digest of the weights of the base",
    **dict.fromkeys(("eva.start_from_rows", "_batches_for_start"), "what EVA finds in the rows"),
    **dict.fromkeys(
        ("find_folder", "_recheck_folder", "remove", "_require_free", "_taken"), "other processes, --overwrite"
    ),
}
UNSEARCHED = [
    "training.fp8",
    "training.mixed_precision_dtype",
    "training.optimizer_in_backward",
    "training.gradient_checkpointing_policy",
    "training.allocator.max_split_size_mb",
    "training.allocator.garbage_collection_threshold",
    "model.sdpa_backend",
    "model.enable_liger_kernel",
]


def test_these_are_the_levers_of_a_search():
    assert len(OPEN) > 15
    assert not set(OPEN) & set(UNSEARCHED)


@pytest.mark.parametrize("key", first(6, OPEN))
def test_a_lever_that_is_open_is_looked_at_with_its_plain_value(key, write):
    report = check_request(write(RECIPE), [f"{key}=auto", "gpu=cpu", *COMPANY.get(key, [])])
    assert report.composition is not None, report.problems
    config = report.composition.config
    assert left_open(config) == (key,)
    assert not inspect(config).problems
    assert left_open(decide(config, runs_here=True).config) == ()


@pytest.mark.parametrize("key", UNSEARCHED)
def test_auto_where_nothing_is_searched_is_refused_in_a_sentence(key, write):
    (problem,) = check_request(write(RECIPE), [f"{key}=auto"]).problems
    assert (problem.key, problem.message) == (key, "cannot be 'auto', since no search decides it")


@pytest.mark.parametrize("room", FOUND)
def test_each_refusal_says_whether_check_finds_it(room):
    """A refusal that is added here has to be found by `check`, or to need more than the model's shape."""
    raising = set()
    for file in [ROOT / room] if room.endswith(".py") else (ROOT / room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            own = [each for each in ast.walk(node) if isinstance(each, ast.Raise) and each.exc is not None]
            if isinstance(node, ast.FunctionDef) and any("RequestError" in ast.unparse(each.exc) for each in own):
                raising.add(node.name if f"{file.stem}.{node.name}" not in OF_THE_START else None)
    assert raising - {None, *OF_THE_START} == FOUND[room]


@pytest.mark.parametrize("rule", first(10, RULES), ids=lambda rule: rule.__name__)
def test_check_and_what_trains_go_through_every_rule(rule, write, monkeypatch):
    """Each rule in turn refuses one key."""
    refused = [Conflict(("training.seed",), f"by {rule.__name__}", "nothing")]
    rules = tuple((lambda config: iter(refused)) if each is rule else each for each in RULES)
    monkeypatch.setattr("framework.schema.rules.every.RULES", rules)
    (found,) = check_request(write(RECIPE), ["gpu=cpu"]).problems
    assert (found.key, found.message) == ("training.seed", f"by {rule.__name__}")
    with pytest.raises(RequestError, match=f"by {rule.__name__}"):
        refuse_impossible(TrainingConfig(), "one")


SHARDED = ["gpu=a100_40gb", "gpu.count=2", "fsdp.enable_fsdp=true"]
SHARED = ["fsdp.enable_fsdp=false", "fsdp.tensor_parallel_size=2"]
NEEDS_THE_SHAPE = {
    "a class that is not there": (
        ["fsdp.transformer_layer_cls=GPT2Block"],
        "fsdp.transformer_layer_cls",
        "has no GPT2",
    ),
    "a class within a graph": (
        ["fsdp.transformer_layer_cls=LlamaMLP", "training.compile=true"],
        "fsdp.transformer_layer_cls",
        ", which contains",
    ),
    "an adapter of another dtype than a module next to it": (
        ["peft=lora", "peft.adapter_dtype=bfloat16", "peft.lora_modules_to_save=[input_layernorm]"],
        "model.torch_dtype_str",
        "cannot be sharded together",
    ),
    "a target that is no module": (
        ["peft=lora", "peft.lora_target_modules=[c_attn]"],
        "peft.lora_target_modules",
        "c_attn",
    ),
    "a module that is frozen and not there": (["model.freeze_layers=[h.0]"], "model.freeze_layers", "h.0"),
    "a router loss without routers": (["training.router_aux_loss_coef=0.1"], "training.router_aux_loss_coef", "llama"),
    "a quantized layer whose bytes cannot be split": (
        [
            "peft=qlora",
            "model.architecture.num_attention_heads=1",
            "model.architecture.num_key_value_heads=1",
            "model.architecture.hidden_size=34",
            "model.architecture.intermediate_size=66",
        ],
        "peft.q_lora",
        "that 8 does not divide",
    ),
    "matrices that are not equal parts": (
        [*SHARED, "model.architecture.intermediate_size=63"],
        "fsdp.tensor_parallel_size",
        "are not 2 equal parts",
    ),
    "a plan of transformers' that is not built": (
        [*SHARED, "model.architecture.model_type=olmo2"],
        "fsdp.tensor_parallel_size",
        "which is not supported",
    ),
    "a window over several devices": (
        [
            "fsdp.enable_fsdp=false",
            "model.attn_implementation=ring_attention",
            "model.architecture.model_type=mistral",
            "model.architecture.sliding_window=8",
        ],
        "model.attn_implementation",
        "sees 8 tokens back, and rows are 64 long",
    ),
    "rows that are too long": (["model.model_max_length=100000"], "model.model_max_length", "positions"),
}


@pytest.mark.parametrize("name", NEEDS_THE_SHAPE)
def test_check_finds_what_needs_only_the_shape_of_the_model(name, write, monkeypatch):
    """And a plan refuses the same."""
    monkeypatch.setattr("framework.checks.unmet_requirements", lambda *_, **__: iter(()))
    overrides, key, message = NEEDS_THE_SHAPE[name]
    report = check_request(write(RECIPE.replace("vocab_size: 128", "vocab_size: 128, tie_word_embeddings: false")),
                           [*SHARDED, *overrides])  # fmt: skip
    assert report.composition is not None, report.problems
    problems = inspect(report.composition.config).problems
    assert [problem.key.partition("[")[0] for problem in problems] == [key]
    assert message in str(problems[0])
    with pytest.raises(RequestError) as caught:
        rehearse(report.composition.config)
    assert caught.value.problems == problems


OF_ROWS = [
    "training.task=pretrain",
    "model.architecture.vocab_size=300",
    "model.tokenizer={train: bpe, vocab_size: 300}",
    "data.train=[{path: rows.jsonl}]",
]


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        (["training.output_dir=rows.jsonl"], "training.output_dir", "cannot be a folder: Not a directory"),
        (["training.fallback_dir=rows.jsonl/a"], "training.fallback_dir", "cannot be a folder: Not a directory"),
        (
            [
                "training.max_steps=null",
                "training.num_train_epochs=1",
                "training.async_save=true",
                "training.save_steps=9",
            ],
            "training.async_save",
            "the only save is at the end, after 1 step",
        ),
    ],
)
def test_check_finds_what_a_run_refuses_before_it_loads_weights(arguments, key, message, write):
    recipe = write(RECIPE)
    Path("rows.jsonl").write_text('{"text": "some words of text"}\n' * 8)
    report = check_request(recipe, ["gpu=cpu", *OF_ROWS, *arguments])
    assert report.composition is not None, report.problems
    config = report.composition.config
    (found,) = inspect(config).problems
    assert (found.key, message in found.message) == (key, True)
    with pytest.raises(RequestError) as caught:
        train(config, overwrite=True)
    assert caught.value.problems == (found,)


def test_a_folder_of_another_machine_is_a_warning(write):
    write(RECIPE)
    Path("file").touch()
    report = check_request(Path("r.yaml"), ["gpu=h100_80gb", "training.output_dir=file"])
    assert report.composition is not None, report.problems
    found = inspect(report.composition.config)
    assert not found.problems
    assert [problem.key for problem in found.warnings] == ["training.output_dir"]


def test_columns_that_are_not_read_are_a_warning(write, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some words", "extra": 1, "more": 2}\n' * 4)
    overrides = ["gpu=cpu", "training.task=pretrain", "model.tokenizer.train=bpe", f"data.train=[{{path: {rows}}}]"]
    recipe = write(RECIPE.replace(", vocab_size: 128", "") + "  \n")
    report = check_request(recipe, [*overrides, "model.tokenizer.vocab_size=300"])
    assert report.composition is not None, report.problems
    found = inspect(report.composition.config)
    assert ([*map(str, found.problems)], [problem.message for problem in found.warnings]) == (
        [],
        ["not read: `extra`, `more`"],
    )
