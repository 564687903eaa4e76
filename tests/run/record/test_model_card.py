"""The card of an export: what the hub reads of it, its figures, and nothing of this machine."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from framework.memory.units import size
from framework.run.record.model_card import Trained, is_ours, model_card
from tests.run.test_trainer import config, corpus, train  # noqa: F401
from tests.tiny import LLAMA


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("card") / "my-run"
    training = {"max_steps": 2, "use_peft": True, "run_name": "secret | pipe"}
    return train(config(corpus, folder, training=training, architecture=LLAMA, peft={"lora_r": 2}))


def test_an_export_has_a_card_with_the_figures_of_the_run(run, corpus):  # noqa: F811
    text = (run.folder / "final" / "README.md").read_text()
    card = ModelCard(text)  # as the hub reads it
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["tunesmith", "pretrain", "lora"],
    }
    assert text.splitlines()[text.splitlines().index("---", 1) + 2] == "# my-run"
    first, last = run.evals[0], run.evals[-1]
    assert f"| eval_loss | {first['eval_loss']:.4f} | {last['eval_loss']:.4f} |" in text
    assert "| | step 0 | step 2 |" in text
    memory = json.loads((run.folder / "memory.json").read_text())["measured"]
    measured = size(memory["allocated_bytes"] - memory["baseline_bytes"])
    assert f"| allocated | not planned | {measured} |" in text
    assert "AutoPeftModelForCausalLM.from_pretrained" in text
    assert "| training | rows.jsonl | train | detected |" in text
    assert str(corpus.parent) not in text
    assert str(run.folder.parent) not in text


def test_its_recipe_trains_the_same(run):
    text = (run.folder / "final" / "README.md").read_text()
    recipe = yaml.safe_load(text.rpartition("```yaml\n")[2].partition("```")[0])
    assert recipe["training"]["max_steps"] == 2
    assert recipe["peft"]["lora_r"] == 2
    assert recipe["data"]["train"][0]["path"] == "rows.jsonl"
    assert "output_dir" not in recipe["training"]
    assert "gpu" not in recipe


def trained(made):
    memory = {
        "measured": {"counter": "c", "allocated_bytes": 3 * 2**30, "reserved_bytes": 4 * 2**30, "baseline_bytes": 0},
        "predicted": {"peak": {"allocated_bytes": 2 * 2**30, "reserved_bytes": 5 * 2**30}},
    }
    return Trained(made, Report, 5, [], memory, {"packages": {"torch": "2.13"}}, has_adapter=False)


class Report:
    """The part of a data report that is read."""

    class train:
        kept, limit, supervised, supervised_lost, stream = 1234, 32, 6000, 322, None

    eval = None


def test_ids_of_the_hub_are_links_and_plan_stands_next_to_measured(corpus, tmp_path):  # noqa: F811
    made = config(
        corpus,
        tmp_path / "run",
        training={"task": "classification"},
        model={"model_name": "org/base", "load_pretrained_weights": True},
        data={"train": [{"path": "org/rows"}, {"path": str(corpus)}], "labels": ["a", "b"]},
    )
    text = model_card(trained(made), "t")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "org/base"
    assert front["datasets"] == ["org/rows"]
    assert front["pipeline_tag"] == "text-classification"
    assert "| allocated | 2.00 GiB | 3.00 GiB |" in text
    assert "| reserved | 5.00 GiB | 4.00 GiB |" in text
    assert "1,234 rows of at most 32 tokens, 5,678 tokens supervised" in text
    assert "AutoModelForSequenceClassification.from_pretrained" in text


def test_a_card_that_was_changed_is_left_alone(run, tmp_path):
    file = run.folder / "final" / "README.md"
    assert is_ours(file)
    assert is_ours(tmp_path / "README.md"), "there is none"
    for text in (file.read_text() + "mine", "mine", "", file.read_text().replace("pretrain", "chat", 1)):
        (tmp_path / "README.md").write_text(text)
        assert not is_ours(tmp_path / "README.md")
