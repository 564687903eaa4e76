"""Added tokens: the rows that they start from, what trains them, and that plan and run have as many."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from framework import load
from framework.build.assembly import assemble
from framework.build.place import real_place
from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.checks import TRAIN, check_request
from framework.errors import RequestError, VerificationFailed
from framework.run import trainer
from framework.run.checkpoints.merge import merge_run
from framework.run.inputs import read_inputs
from framework.run.predict import Request, predict
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from tests.folders import save_model
from tests.grids import thinned
from tests.run.test_trainer import train

TOKENS = 267
"""Vocabulary size of the tokenizer that `save_model` trains."""
NEW = ("<tool>", "hello hello")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    save_model(folder / "exact", vocab_size=TOKENS)
    save_model(folder / "tied", vocab_size=TOKENS, tie_word_embeddings=True)
    save_model(folder / "spare", vocab_size=320)
    save_model(folder / "short", vocab_size=200)
    return folder


def config(folder: Path, base: str = "exact", peft: dict[str, Any] | None = None, **model: Any) -> TrainingConfig:
    return TrainingConfig(
        model={"model_name": str(folder / base), "model_max_length": 32, **({"added_tokens": NEW} | model)},
        training={"use_peft": peft is not None, "per_device_train_batch_size": 4, "mixed_precision_dtype": "none"},
        peft={"lora_target_modules": ["q_proj"], "lora_r": 4, **(peft or {})},
    )


def built(config: TrainingConfig) -> Any:
    return assemble(*settle(config), real_place(torch.device("cpu")), 10)


def matrices(model: Any) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.mark.parametrize(("base", "rows"), [("exact", 269), ("tied", 269), ("spare", 320)])
def test_rows_of_new_tokens_start_at_the_mean_of_what_spelled_them(folder, base, rows):
    assembly = built(config(folder, base))
    before = matrices(AutoModelForCausalLM.from_pretrained(folder / base))
    tokenizer = AutoTokenizer.from_pretrained(folder / base)
    for old, now in zip(before, matrices(assembly.model), strict=True):
        assert now.shape[0] == rows
        torch.testing.assert_close(now[:TOKENS], old[:TOKENS], rtol=0, atol=0)
        for number, token in enumerate(NEW):
            parts = tokenizer(token, add_special_tokens=False)["input_ids"]
            assert len(parts) > 1
            expected = sum(old[part] for part in parts) / len(parts)
            torch.testing.assert_close(now[TOKENS + number], expected, rtol=1e-6, atol=1e-7)
    assert (assembly.model.lm_head.weight is assembly.model.get_input_embeddings().weight) is (base == "tied")
    assert assembly.model.config.vocab_size == rows
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["model.added_tokens"].found == "2 at the mean of their parts"


def test_rows_that_start_elsewhere_stop_the_run(folder):
    assembly = built(config(folder))
    assembly.model.lm_head.weight.data[TOKENS + 1, 3] += 1
    with pytest.raises(VerificationFailed, match=r"model.added_tokens"):
        verify(assembly)


@pytest.mark.parametrize(("multiple", "rows"), [(True, 267), (64, 320)])
def test_a_longer_tokenizer_gets_rows_when_asked(folder, multiple, rows):
    assembly = built(
        config(folder, "short", tokenizer_name=str(folder / "exact"), added_tokens=(), resize_embeddings=multiple)
    )
    old = AutoModelForCausalLM.from_pretrained(folder / "short").lm_head.weight
    head = assembly.model.lm_head.weight
    assert head.shape[0] == rows
    torch.testing.assert_close(head[200:], old.mean(0).expand(rows - 200, -1))


def test_a_longer_tokenizer_is_refused_with_the_key_that_resizes(folder, tmp_path):
    (tmp_path / "rows.txt").write_text("hello\n")
    asked = config(folder, "short", tokenizer_name=str(folder / "exact"), added_tokens=())
    data = asked.data.model_validate({"train": [{"path": str(tmp_path / "rows.txt")}]})
    with pytest.raises(RequestError, match=r"model.resize_embeddings: true"):
        read_inputs(asked.model_copy(update={"data": data}))


@pytest.mark.parametrize(
    ("peft", "base"), thinned([None, {}, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}], ["exact", "tied"])
)
def test_the_plan_has_as_many_weights_as_the_run(folder, base, peft):
    asked = config(folder, base, peft)
    assembly, planned = built(asked), record(settle(asked)[0]).footprint
    parameters = list(assembly.model.parameters())
    assert planned.total_parameters == sum(item.numel() for item in parameters)
    assert planned.trainable_parameters == sum(item.numel() for item in parameters if item.requires_grad)


def test_an_adapter_trains_the_new_rows_unless_the_recipe_says_otherwise(folder):
    assembly = built(config(folder, peft={}))
    trained = {name: item for name, item in assembly.model.named_parameters() if item.requires_grad}
    rows = [item for name, item in trained.items() if "trainable_tokens_delta" in name]
    assert [tuple(item.shape) for item in rows] == [(2, 32), (2, 32)]  # embedding and head
    readings = {reading.key: reading for reading in verify(assembly)}
    assert readings["peft.trainable_token_indices"].found == "267, 268"
    assert readings["peft.peft_method"].holds
    none = built(config(folder, peft={"trainable_token_indices": ()}))
    assert not any("trainable_tokens" in name for name, _ in none.model.named_parameters())


def test_ids_that_are_no_tokens_are_refused(folder):
    with pytest.raises(RequestError, match="300 is not a token of this model"):
        built(config(folder, peft={"trainable_token_indices": (5, 300)}, added_tokens=()))


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("model: {load_pretrained_weights: false, architecture: {model_type: llama}}", "model.added_tokens"),
        ("training: {use_peft: true}\npeft: {peft_method: prompt}", "model.added_tokens"),
        ("training: {use_peft: true}\npeft: {peft_method: ia3}", "model.added_tokens"),
        ("training: {use_peft: true}\nfsdp: {enable_fsdp: true}\ngpu: {count: 2}", "model.added_tokens"),
    ],
)
def test_what_has_no_place_for_new_rows_is_refused_before_anything_is_read(write, body, key):
    report = check_request(write(f"{body}\n"), ["model.added_tokens=['<a>']", "model.model_name=org/x"], needs=TRAIN)
    assert key in [problem.key for problem in report.problems]


@pytest.mark.parametrize("written", [["<a>", "<a>"], [" "]])
def test_a_token_that_is_none_is_refused(folder, written):
    with pytest.raises(RequestError, match="added_tokens"):
        settle(config(folder, added_tokens=tuple(written)))


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_they_go_through_save_resume_merge_and_predict(folder, tmp_path, monkeypatch, adapted):
    monkeypatch.setattr(trainer, "SAMPLE_NEW_TOKENS", 1)
    rows = [{"prompt": "hello <tool> ", "completion": "world"} for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.yaml").write_text(
        f"model: {{model_name: {folder / 'exact'}, model_max_length: 32, added_tokens: ['<tool>']}}\n"
        f"training: {{use_peft: {str(adapted).lower()}, max_steps: 2, save_steps: 1, learning_rate: 0.1,\n"
        f"  per_device_train_batch_size: 4, output_dir: {tmp_path / 'run'}}}\n"
        "peft: {lora_r: 4, lora_target_modules: [q_proj]}\n"
        f"data: {{train: [{{path: {tmp_path / 'rows.jsonl'}}}]}}\n"
    )
    train(load(tmp_path / "r.yaml"))
    train(load(tmp_path / "run" / "config.yaml", ["training.max_steps=3"]), resume=True, allow=["training.max_steps"])
    final = tmp_path / "run" / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer("<tool>", add_special_tokens=False)["input_ids"] == [TOKENS]
    plain = merge_run(tmp_path / "run").folder if adapted else final
    model = AutoModelForCausalLM.from_pretrained(plain)
    base = AutoModelForCausalLM.from_pretrained(folder / "exact")
    old = base.get_input_embeddings().weight
    now = model.get_input_embeddings().weight
    assert now.shape[0] == TOKENS + 1
    parts = AutoTokenizer.from_pretrained(folder / "exact")("<tool>", add_special_tokens=False)["input_ids"]
    assert (now[TOKENS] - old[parts].mean(0)).abs().max() > 0.05  # rate 0.1, three steps
    if adapted:
        torch.testing.assert_close(now[:TOKENS], old, rtol=0, atol=0)
        base.resize_token_embeddings(TOKENS + 1)
        with_peft = PeftModel.from_pretrained(base, final).eval()
        ids = torch.tensor([[1, TOKENS, 5]])
        torch.testing.assert_close(with_peft(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        saved = load_file(final / "adapter_model.safetensors")
        assert sum("trainable_tokens" in name for name in saved) == 2
    (tmp_path / "ask.jsonl").write_text('{"prompt": "hello <tool> "}\n')
    [answer] = predict(tmp_path / "run", str(tmp_path / "ask.jsonl"), Request(new_tokens=2))
    assert isinstance(answer["completion"], str)
