"""Heads by task: which model is built, what of a checkpoint it takes, and what may be new in it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from framework.build.adapters.adapter import attach_adapter
from framework.build.assembly import Assembly, assemble
from framework.build.loading.model import build_model, read_architecture
from framework.build.losses.loss import model_inputs
from framework.build.model.heads import head_modules, reads_both_ways
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.build.verify.adapter import coverage
from framework.errors import RequestError
from framework.schema.config import TrainingConfig
from tests.grids import thinned
from tests.tiny import BERT, GPT2, LLAMA, MODERNBERT, tiny_assembly, tiny_config

CPU = real_place(torch.device("cpu"))
CLASSES = {"labels": ["one", "two", "three"]}


def classifier(architecture, **sections):
    training = {"task": "classification", **sections.pop("training", {})}
    return tiny_config(architecture, training=training, data=sections.pop("data", CLASSES), **sections)


def pretrained(folder, **sections):
    training = {"task": "classification", "per_device_train_batch_size": 2, **sections.pop("training", {})}
    model = {"model_name": str(folder), **sections.pop("model", {})}
    return settle(TrainingConfig(training=training, model=model, data=CLASSES, **sections))


def reading(assembly: Assembly, key: str):
    return next(item for item in verify(assembly) if item.key == key)


@pytest.mark.parametrize(("architecture", "adapted"), thinned([BERT, MODERNBERT, LLAMA, GPT2], [False, True]))
def test_the_task_builds_a_model_with_a_head_for_its_classes(architecture, adapted):
    peft = {"lora_target_modules": ["all-linear"]} if adapted else {}
    assembly = tiny_assembly(classifier(architecture, training={"use_peft": adapted}, peft=peft))
    config = assembly.model.config
    assert (config.num_labels, config.problem_type) == (3, "single_label_classification")
    assert config.id2label == {0: "one", 1: "two", 2: "three"}
    assert config.label2id == {"one": 0, "two": 1, "three": 2}
    head = reading(assembly, "training.task")
    assert head.found == "classification, 3 outputs"
    trained = {name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad}
    assert all(
        any(f"{top}." in name for name in trained)
        for top in head_modules(assembly.adapter.model.get_base_model() if adapted else assembly.model)
    )
    if adapted:
        assert coverage(assembly.model)["head"] == 1
        assert assembly.adapter.model.peft_config["default"].task_type == "SEQ_CLS"


@pytest.mark.parametrize(
    ("task", "data", "kind", "outputs"),
    [
        ("classification", {}, "single_label_classification", 2),
        ("classification", {"multi_label": True, "labels": ["a", "b", "c"]}, "multi_label_classification", 3),
        ("regression", {}, "regression", 1),
        ("regression", {"labels": ["price", "age"]}, "regression", 2),
        ("reward", {}, "regression", 1),
    ],
)
def test_outputs_by_task(task, data, kind, outputs):
    config = read_architecture(classifier(LLAMA, training={"task": task}, data=data))
    assert (config.num_labels, config.problem_type) == (outputs, kind)


def test_a_decoder_takes_a_checkpoint_with_a_head_of_tokens_and_says_what_is_new(tmp_path):
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    source.save_pretrained(tmp_path / "lm")
    config, architecture = pretrained(tmp_path / "lm")
    assembly = assemble(config, architecture, CPU, 10)
    assert assembly.new_weights == ("score.weight",)
    assert "new and random: score.weight" in reading(assembly, "training.task").source
    body = {name: tensor for name, tensor in source.state_dict().items() if name != "lm_head.weight"}
    built = assembly.model.state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in body.items())
    assembly.model.save_pretrained(tmp_path / "classifier")  # which then has one
    assert build_model(*pretrained(tmp_path / "classifier"), CPU)[1] == ()


def test_an_encoder_takes_a_checkpoint_of_masked_tokens_whose_pooler_is_new_too(tmp_path):
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**BERT)).save_pretrained(tmp_path)
    model, new = build_model(*pretrained(tmp_path), CPU)
    assert set(new) == {f"{part}.{kind}" for part in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")}
    assert model.config.num_labels == 3


def test_any_other_absent_weight_is_an_error(tmp_path):
    shallow = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 1}))
    shallow.save_pretrained(tmp_path)
    config, architecture = pretrained(tmp_path)
    architecture.num_hidden_layers = 2
    architecture.layer_types = None
    with pytest.raises(RequestError, match=r"would stay random, first model\.layers\.1"):
        build_model(config, architecture, CPU)


def test_a_decoder_is_pooled_at_its_last_token_whatever_pads_the_row():
    assembly = tiny_assembly(classifier({**LLAMA, "pad_token_id": 0}))
    assembly.model.eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.int64)], 1)
    rows = {"input_ids": torch.cat([padded, padded + 9]), "attention_mask": (padded > 0).long().repeat(2, 1)}
    with torch.no_grad():
        alone = assembly.model(input_ids=ids).logits
        inputs = model_inputs(assembly.model, rows)
        assert "attention_mask" not in inputs, "no token of a decoder sees the padding behind it"
        assert torch.allclose(assembly.model(**inputs).logits[0], alone[0], atol=1e-6)


@pytest.mark.parametrize("architecture", [BERT, MODERNBERT], ids=lambda item: item["model_type"])
def test_an_encoder_does_not_see_the_padding(architecture):
    assembly = tiny_assembly(classifier(architecture))
    assembly.model.eval()
    for parameter in assembly.model.parameters():  # starting weights are so small that other tokens hardly matter
        parameter.data.mul_(4)
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = torch.cat([ids, torch.full((1, 3), 9)], 1)
    batch = {"input_ids": padded, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]])}
    with torch.no_grad():
        alone = assembly.model(input_ids=ids).logits
        assert torch.allclose(assembly.model(**model_inputs(assembly.model, batch)).logits, alone, atol=1e-4)
        assert not torch.allclose(assembly.model(input_ids=padded).logits, alone, atol=1e-3)
    assert reads_both_ways(assembly.model.config)


@pytest.mark.parametrize(
    ("architecture", "task", "key"),
    [
        (BERT, "sft", "model.architecture.is_decoder"),
        (MODERNBERT, "pretrain", "model.architecture.model_type"),
        ({**BERT, "is_decoder": True}, "classification", "model.architecture.is_decoder"),
        ({"model_type": "t5", "d_model": 32, "vocab_size": 128}, "classification", "model.architecture.model_type"),
        ({"model_type": "vit"}, "classification", "model.architecture.model_type"),
        ({**LLAMA, "num_labels": 4}, "classification", "model.architecture.num_labels"),
    ],
)
def test_models_without_the_head_of_the_task_are_refused(architecture, task, key):
    config = tiny_config(architecture, training={"task": task})
    with pytest.raises(RequestError) as error:
        read_architecture(config)
    assert [problem.key for problem in error.value.problems] == [key]


def test_a_head_next_to_an_adapter_is_trained_even_where_other_modules_are_named():
    peft = {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["embed_tokens"]}
    config = classifier(LLAMA, training={"use_peft": True}, peft=peft)
    model, _ = build_model(config, read_architecture(config), CPU)
    adapted = attach_adapter(config.peft, model, CPU, False, {}, 0).model
    whole = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad and "lora" not in name}
    assert whole == {
        "base_model.model.model.embed_tokens.modules_to_save.default.weight",
        "base_model.model.score.modules_to_save.default.weight",
    }


@pytest.mark.parametrize("architecture", [BERT, LLAMA], ids=lambda item: item["model_type"])
def test_the_head_of_a_quantized_base_is_not_quantized(architecture):
    pytest.importorskip("bitsandbytes")
    wide = {**architecture, "hidden_size": 64, "intermediate_size": 128}
    peft = {"q_lora": True, "lora_target_modules": ["all-linear"]}
    assembly = tiny_assembly(classifier(wide, training={"use_peft": True}, peft=peft))
    inside = {
        name: module
        for top in head_modules(assembly.adapter.model.get_base_model()).values()
        for name, module in top.named_modules()
    }
    assert not {type(module).__name__ for module in inside.values()} & {"Linear4bit", "Linear8bitLt"}
    assert reading(assembly, "peft.q_lora").found == "4-bit nf4"
    trained = [name for name, parameter in assembly.model.named_parameters() if parameter.requires_grad]
    assert any("modules_to_save" in name for name in trained)
