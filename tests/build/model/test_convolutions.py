"""TextCNN and TCN: their outputs, that they behave like any other model, and refused settings."""

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification

from framework.build.model.convolutions import NormedConvolution
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.errors import RequestError
from framework.installation import shipped
from framework.run.step import train_step
from framework.schema.config import TrainingConfig
from tests.tiny import tiny_assembly, tiny_config

TEXTCNN = {"model_type": "textcnn", "hidden_size": 32, "num_filters": 16, "vocab_size": 128}
TCN = {"model_type": "tcn", "hidden_size": 16, "num_channels": 24, "num_hidden_layers": 3, "vocab_size": 128}
BOTH = pytest.mark.parametrize("architecture", [TEXTCNN, TCN], ids=lambda item: item["model_type"])


def build(architecture):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**architecture, num_labels=3)).eval()


@BOTH
def test_padding_does_not_change_the_answer_to_a_row(architecture):
    model, ids = build(architecture), torch.arange(1, 19).view(2, 9)
    padded = torch.cat([ids, torch.full((2, 4), 7)], 1)
    mask = (torch.arange(13) < 9).long().expand(2, 13)
    with torch.no_grad():
        alone, padded_logits = model(input_ids=ids).logits, model(input_ids=padded, attention_mask=mask).logits
        unmasked = model(input_ids=padded).logits
    assert torch.allclose(alone, padded_logits, atol=1e-6)
    assert not torch.allclose(alone, unmasked, atol=1e-3)


@BOTH
def test_every_token_matters(architecture):
    model, ids = build(architecture), torch.arange(1, 13).view(1, 12)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        changed = [
            not torch.equal(model(input_ids=ids.index_fill(1, torch.tensor([at]), 99)).logits, before)
            for at in range(12)
        ]
    assert sum(changed) >= 11


@BOTH
def test_a_saved_model_is_the_same_when_loaded(architecture, tmp_path):
    model, ids = build(architecture), torch.arange(1, 13).view(1, 12)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


@BOTH
def test_it_learns_and_is_verified(architecture):
    training = {"task": "classification", "learning_rate": 1e-2}
    assembly = tiny_assembly(tiny_config(architecture, training=training, data={"labels": ["a", "b", "c"]}))
    kernel = next(item for item in verify(assembly) if item.key == "model.attn_implementation")
    assert kernel.found == "none: convolutions"
    ids = torch.randint(3, 128, (9, 16), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = torch.arange(9) % 3 + 3
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100), "targets": (torch.arange(9) % 3).float()[:, None]}
    losses = [train_step(assembly, [batch], step).loss for step in range(1, 21)]
    assert losses[-1] < 0.7 * losses[0]


def test_textcnn_takes_the_highest_value_of_each_filter_over_its_windows():
    model, ids = build(TEXTCNN), torch.arange(1, 10).view(1, 9)
    with torch.no_grad():
        found = model.body(ids)[0, :16]
        vectors = torch.cat([model.body.embeddings.tokens(ids)[0], torch.zeros(2, 32)])
        layer = model.body.convolutions[0]
        windows = torch.stack([vectors[at : at + 3].T.flatten() for at in range(9)])
        by_hand = (windows @ layer.weight.flatten(1).T + layer.bias).relu().amax(0)
    assert torch.allclose(found, by_hand, atol=1e-6)


def test_a_convolution_of_tcn_sees_nothing_behind_a_token_and_has_filters_of_the_given_length():
    layer = NormedConvolution(4, 6, 3, 2)
    with torch.no_grad():
        layer.direction.normal_()
        layer.norm.fill_(2)
        layer.bias.zero_()
        values = torch.randn(1, 4, 10)
        changed = values.clone()
        changed[:, :, 6] += 1
        before, after = layer(values), layer(changed)
        impulse = torch.zeros(1, 4, 10)
        impulse[0, 0, 0] = 1
    moved = (before != after).any(1)[0].nonzero().flatten().tolist()
    assert moved == [6, 8]
    assert before.shape == (1, 6, 10)
    weight = layer.direction * (layer.norm / layer.direction.norm(dim=(1, 2), keepdim=True))
    assert torch.allclose(weight.flatten(1).norm(dim=1), torch.full((6,), 2.0))
    assert torch.allclose(layer(impulse)[0, :, 0], weight[:, 0, 2])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("textcnn", 8192 * 300 + 300 * 100 * (3 + 4 + 5) + 300 + 300 * 2 + 2),
        # blocks of two convolutions with a length and a bias a filter; the first is next to a 1x1 convolution
        ("tcn", 8192 * 128 + (128 + 11 * 256) * 256 * 3 + 12 * 2 * 256 + (128 + 1) * 256 + 256 * 2 + 2),
    ],
)
def test_the_shipped_ones_have_the_parameters_of_their_papers_layers(name, parameters):
    content = yaml.safe_load((shipped("conf") / "model" / f"{name}.yaml").read_text())["model"]
    config = TrainingConfig(model=content, training={"task": "classification"})
    _, architecture = settle(config)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(architecture)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"use_peft": True}}, "training.use_peft"),
        ({"model": {"attn_implementation": "eager"}}, "model.attn_implementation"),
        ({"model": {"sdpa_backend": "math"}}, "model.sdpa_backend"),
        ({"training": {"task": "sft"}}, "model.architecture.model_type"),
    ],
)
def test_what_it_has_nothing_for_is_refused(sections, key):
    training = {"task": "classification", **sections.get("training", {})}
    model = {"architecture": TEXTCNN, "load_pretrained_weights": False, **sections.get("model", {})}
    with pytest.raises(RequestError) as error:
        settle(TrainingConfig(training=training, model=model))
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize(
    "training", [{"enable_gradient_checkpointing": True}, {"activation_offload": True}, {"compile": True}]
)
def test_textcnn_has_no_blocks(training):
    config = tiny_config(TEXTCNN, training={"task": "classification", **training})
    with pytest.raises(RequestError, match="has no known transformer blocks"):
        tiny_assembly(config)
