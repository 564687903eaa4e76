"""`predict`: answers in file order, equal to the model's own; faults of rows are reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from framework.cli import main
from framework.compose import load
from framework.run import predict as predicting
from framework.run import trainer
from framework.run.predict import Request, predict
from tests.folders import save_model
from tests.tiny import BERT, GPT2, LLAMA

TEXTS = ["a red apple", "the blue sky is wide and far above the hills", "green grass", "blue", "red red red apple tree"]
TRAINING = {"per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(folder, architecture, rows, task, **sections):
    """A run of a few steps on `rows`."""
    from framework.schema.config import TrainingConfig

    shape = {key: value for key, value in architecture.items() if key != "vocab_size"}
    model = {"architecture": shape, "load_pretrained_weights": False, "model_max_length": 64}
    config = TrainingConfig(
        training={**TRAINING, "task": task, "output_dir": str(folder / "run"), **sections.pop("training", {})},
        model={**model, "tokenizer": {"train": "bpe", "vocab_size": 300}, **sections.pop("model", {})},
        data={"train": [{"path": lines(folder / "rows.jsonl", rows), **sections.pop("source", {})}]},
        **sections,
    )
    trainer.train(config, planner=None, quiet=True)
    return folder / "run"


def answers_of(capsys, *arguments):
    assert main(["predict", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *arguments):
    assert main(["predict", *map(str, arguments)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


def labelled(label):
    return [{"text": f"{text} {number}", "label": label(number)} for number, text in enumerate(TEXTS * 4)]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    rows = labelled(lambda number: ["fruit", "sky", "lawn"][number % 3])
    return train(tmp_path_factory.mktemp("classifier"), BERT, rows, "classification")


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    rows = [{"prompt": f"{text}:", "completion": f" {text.upper()}"} for text in TEXTS * 4]
    return train(tmp_path_factory.mktemp("writer"), GPT2, rows, "sft")


def test_classes_and_their_probabilities_are_those_of_the_model_in_file_order(
    classifier, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(predicting, "MOST_ROWS", 2)
    answers = answers_of(capsys, classifier, lines(tmp_path / "asked.jsonl", [{"text": text} for text in TEXTS]))
    model = AutoModelForSequenceClassification.from_pretrained(classifier / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier / "final")
    assert len(answers) == len(TEXTS)
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"][:64]])
        with torch.no_grad():
            shares = model(input_ids=ids).logits[0].softmax(0)
        assert answer["probabilities"] == pytest.approx(
            dict(zip(["fruit", "lawn", "sky"], shares.tolist(), strict=True)), abs=1e-5
        )
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].get)


def test_labels_of_the_texts_are_not_read_and_an_exported_folder_is_enough(classifier, tmp_path, capsys):
    bare = lines(tmp_path / "bare.jsonl", [{"text": text} for text in TEXTS])
    labeled = lines(tmp_path / "labeled.jsonl", [{"text": text, "label": "unheard of"} for text in TEXTS])
    expected = answers_of(capsys, classifier, bare)
    assert answers_of(capsys, classifier, labeled) == expected
    assert answers_of(capsys, classifier / "final", bare) == expected
    shutil.copytree(classifier / "final", tmp_path / "alone")
    alone = answers_of(capsys, tmp_path / "alone", bare)
    assert [answer["label"] for answer in alone] == [answer["label"] for answer in expected]


def test_an_adapter_comes_with_its_base(tmp_path, capsys):
    rows = labelled(lambda number: ["fruit", "sky"][number % 2])
    peft = {"lora_target_modules": ["all-linear"]}
    run = train(tmp_path, LLAMA, rows, "classification", training={"use_peft": True, "max_steps": 20}, peft=peft)
    asked = lines(tmp_path / "asked.jsonl", rows)
    answers = answers_of(capsys, run, asked)
    assert main(["merge", str(run)]) == 0
    assert "AutoModelForSequenceClassification.from_pretrained loads it" in capsys.readouterr().out
    merged = answers_of(capsys, run / "merged", asked)
    for one, other in zip(answers, merged, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
    shutil.copytree(run / "final", tmp_path / "alone")
    assert "how many classes" in refused(capsys, tmp_path / "alone", asked)


def test_several_classes_and_numbers(tmp_path, capsys):
    (tmp_path / "several").mkdir()
    (tmp_path / "numbers").mkdir()
    rows = labelled(lambda number: [["fruit"], ["sky", "fruit"], []][number % 3])
    several = train(tmp_path / "several", BERT, rows, "classification")
    answers = answers_of(capsys, several, lines(tmp_path / "asked.jsonl", rows[:3]))
    for answer in answers:
        assert answer["labels"] == [name for name, share in answer["probabilities"].items() if share > 0.5]
        assert set(answer["probabilities"]) == {"fruit", "sky"}
    rows = labelled(lambda number: [number / 10, -number])
    numbers = train(tmp_path / "numbers", BERT, rows, "regression")
    answers = answers_of(capsys, numbers, lines(tmp_path / "asked.jsonl", rows[:3]))
    assert all(set(answer["values"]) == {"value_0", "value_1"} for answer in answers)


def test_a_model_of_few_positions_is_asked_without_an_option(writer, tmp_path, capsys):
    asked = lines(tmp_path / "asked.jsonl", [{"prompt": TEXTS[0]}])
    (answer,) = answers_of(capsys, writer, asked)
    assert answer["finished"] or answer["tokens"] == 64  # half of its 128


def test_completions_are_the_likeliest_tokens_whatever_else_is_in_the_batch(writer, tmp_path, capsys):
    asked = lines(tmp_path / "asked.jsonl", [{"prompt": f"{text}:"} for text in TEXTS])
    answers = answers_of(capsys, writer, asked, "--max-new-tokens", "6")
    model = AutoModelForCausalLM.from_pretrained(writer / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(writer / "final")
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = torch.tensor([tokenizer(f"{text}:")["input_ids"]])
        for _ in range(answer["tokens"]):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        assert answer["completion"] == tokenizer.decode(ids[0, len(tokenizer(f"{text}:")["input_ids"]) :])
        assert answer["finished"] or answer["tokens"] == 6
    plain = lines(tmp_path / "plain.jsonl", [{"text": f"{text}:"} for text in TEXTS])
    assert answers_of(capsys, writer, plain, "--max-new-tokens", "6") == answers


def test_a_score_is_the_log_probability_of_what_training_learns(writer, tmp_path, capsys):
    rows = [{"prompt": f"{text}:", "completion": f" {text[:7].upper()}"} for text in TEXTS[::-1]]
    answers = answers_of(capsys, writer, lines(tmp_path / "asked.jsonl", rows), "--score")
    model = AutoModelForCausalLM.from_pretrained(writer / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(writer / "final")
    for row, answer in zip(rows, answers, strict=True):
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id][:64]
        start = len(tokenizer(row["prompt"])["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        expected = -F.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum").item()
        assert answer == {"log_likelihood": pytest.approx(expected, rel=1e-4), "tokens": len(ids) - start}


def test_of_a_pair_both_answers_are_scored_and_single_ones_as_well(tmp_path, capsys):
    rows = [{"prompt": f"{text}:", "chosen": f" {text[:7]}", "rejected": f" {text}"} for text in TEXTS]
    run = train(tmp_path, LLAMA, rows, "preference", training={"max_steps": 2})
    pairs = answers_of(capsys, run, tmp_path / "rows.jsonl", "--score")
    for answer in ("chosen", "rejected"):
        alone = [{"prompt": row["prompt"], "completion": row[answer]} for row in rows]
        scores = answers_of(capsys, run, lines(tmp_path / "alone.jsonl", alone), "--score")
        for pair, one in zip(pairs, scores, strict=True):
            assert pair[answer] == {**one, "log_likelihood": pytest.approx(one["log_likelihood"], rel=1e-4)}


def test_a_preference_run_writes_as_any_model_of_tokens(tmp_path, capsys):
    """For rows as in training, and for bare prompts; for pairs and judged answers."""
    pairs = [{"asked": f"{text}:", "good": f" {text[:7]}", "bad": f" {text}"} for text in TEXTS]
    judged = [
        {"asked": f"{text}:", "said": f" {text[:7]}", "fine": number % 2 == 0} for number, text in enumerate(TEXTS)
    ]
    mapped = {"prompt": "asked", "chosen": "good", "rejected": "bad"}
    also = {"prompt": "asked", "completion": "said", "label": "fine"}
    kto = {"loss_type": "kto"}
    for name, rows, columns, form, loss in (
        ("pairs", pairs, mapped, "preference", {}), ("judged", judged, also, "unpaired", {"preference": kto}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        source = {"columns": columns, "format": form}
        run = train(tmp_path / name, LLAMA, rows, "preference", source=source, training={"max_steps": 2, **loss})
        asked = answers_of(capsys, run, tmp_path / name / "rows.jsonl", "--max-new-tokens", "4")
        bare = lines(tmp_path / "bare.jsonl", [{"asked": row["asked"]} for row in rows])
        assert answers_of(capsys, run, bare, "--max-new-tokens", "4") == asked
        assert all(set(answer) == {"completion", "tokens", "finished"} for answer in asked)
        answered = lines(tmp_path / "answered.jsonl", [{"asked": row["asked"], "completion": " no"} for row in rows])
        assert all("log_likelihood" in one for one in answers_of(capsys, run, answered, "--score"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A reward model that likes capitals."""
    rows = [{"prompt": f"{text}:", "chosen": f" {text.upper()}", "rejected": f" {text}"} for text in TEXTS * 2]
    training = {"max_steps": 20, "learning_rate": 3e-3}
    return train(tmp_path_factory.mktemp("judge"), LLAMA, rows, "reward", training=training)


def rewards_of(run, texts):
    """The output of transformers for each text by itself, with the end token."""
    model = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    found = []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, 0].item())
    return found


def test_a_reward_run_tells_the_reward_of_pairs_and_of_single_answers(judge, tmp_path, capsys):
    rows = [{"prompt": f"{text}:", "chosen": f" {text[:9].upper()}", "rejected": f" {text[:9]}"} for text in TEXTS]
    pairs = answers_of(capsys, judge, lines(tmp_path / "pairs.jsonl", rows))
    for answer in ("chosen", "rejected"):
        expected = rewards_of(judge, [row["prompt"] + row[answer] for row in rows])
        assert [pair[answer]["reward"] for pair in pairs] == pytest.approx(expected, abs=1e-4)
        alone = [{"prompt": row["prompt"], "completion": row[answer]} for row in rows]
        rewards = answers_of(capsys, judge, lines(tmp_path / "alone.jsonl", alone))
        assert [one["reward"] for one in rewards] == pytest.approx(expected, abs=1e-4)
        assert all(set(one) == {"reward"} for one in rewards)
    assert sum(pair["chosen"]["reward"] > pair["rejected"]["reward"] for pair in pairs) >= 4


def test_an_exported_reward_model_alone_is_known_for_one(judge, tmp_path, capsys):
    asked = lines(tmp_path / "asked.jsonl", [{"prompt": f"{text}:", "completion": " YES"} for text in TEXTS])
    shutil.copytree(judge / "final", tmp_path / "alone")
    expected = [one["reward"] for one in answers_of(capsys, judge, asked)]
    assert [one["reward"] for one in answers_of(capsys, tmp_path / "alone", asked)] == pytest.approx(expected, abs=1e-5)


def test_what_a_reward_run_cannot_judge_is_refused(judge, tmp_path, capsys):
    assert "leave it out" in refused(capsys, judge, lines(tmp_path / "a.jsonl", [{"text": "a"}]), "--score")
    message = refused(capsys, judge, lines(tmp_path / "b.jsonl", [{"question": "a", "reply": "b"}]))
    assert "no row format of the task reward matches" in message
    half = lines(tmp_path / "c.jsonl", [{"prompt": "a", "chosen": "b", "rejectd": "c"}])
    assert "rejectd" in refused(capsys, judge, half)
    unanswered = lines(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}])
    assert "d.jsonl:2" in refused(capsys, judge, unanswered)
    assert "no rows" in refused(capsys, judge, lines(tmp_path / "e.jsonl", []))


def test_a_batch_that_does_not_fit_is_halved(classifier, tmp_path, monkeypatch):
    asked = lines(tmp_path / "asked.jsonl", [{"text": text} for text in TEXTS])
    expected, judging, sizes = list(predict(classifier, asked)), predicting._judging, []

    def tight(asked):
        ask = judging(asked)

        def narrow(rows):
            sizes.append(len(rows))
            if len(rows) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return ask(rows)

        return narrow

    monkeypatch.setattr(predicting, "_judging", tight)
    assert [answer["label"] for answer in predict(classifier, asked)] == [answer["label"] for answer in expected]
    assert sizes == [5, 2, 2, 1]


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"text": "fine"}, {"text": 7}], "expected text, not int 7"),
        ([{"text": "fine"}, {"text": None}], "there is no prompt"),
        ([{"body": "fine"}], "there is no column `text`"),
        ([], "has no rows"),
    ],
)
def test_broken_rows_are_refused_with_their_place(classifier, tmp_path, capsys, rows, word):
    message = refused(capsys, classifier, lines(tmp_path / "asked.jsonl", rows))
    assert word in message
    assert len(rows) < 2 or "asked.jsonl:2" in message or "row 2" in message or "line 2" in message


def test_what_cannot_be_asked_is_refused(classifier, writer, tmp_path, capsys):
    asked = lines(tmp_path / "asked.jsonl", [{"text": text} for text in TEXTS])
    assert "--score" in refused(capsys, classifier, asked, "--score")
    assert "is not a folder" in refused(capsys, tmp_path / "nowhere", asked)
    misspelt = classifier.with_name(f"{classifier.name}s")
    assert f"did you mean {classifier}\n" in refused(capsys, misspelt, asked)
    assert "has neither a model nor a run in it" in refused(capsys, tmp_path, asked)
    assert "nothere.jsonl" in refused(capsys, classifier, tmp_path / "nothere.jsonl")
    assert "can take" in refused(capsys, writer, asked, "--max-new-tokens", "126")
    assert "128 positions" in refused(capsys, writer, asked, "--max-new-tokens", "128")
    for run, more in ((classifier, ()), (writer, ("--score",))):
        assert "no text is generated" in refused(capsys, run, asked, "--max-new-tokens", "6", *more)
    shutil.copytree(writer, tmp_path / "unfinished", ignore=shutil.ignore_patterns("final"))
    assert "has not finished" in refused(capsys, tmp_path / "unfinished", asked)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"prompt": "What?"}, {"other": "x", "id": 1}], "the row has no column `prompt`; it has other, id"),
        ([{"prompt": "What?"}, {"prompt": None}], "column `prompt` is empty: there is no prompt"),
        ([{"question": "What?", "id": 1}], "did you mean `prompt` in place of `question`"),
        ([{"mesages": []}], "did you mean `messages` in place of `mesages`"),
    ],
)
def test_a_row_that_asks_for_nothing_is_reported_with_its_columns(writer, tmp_path, capsys, rows, word):
    message = refused(capsys, writer, lines(tmp_path / "asked.jsonl", rows))
    assert word in message
    assert len(rows) < 2 or "asked.jsonl:2" in message


def test_the_run_reads_rows_as_it_did_in_training(tmp_path, capsys):
    rows = [{"body": row["text"], "topic": row["label"]} for row in labelled(lambda number: "ab"[number % 2])]
    source = {"columns": {"text": "body", "label": "topic"}}
    run = train(
        tmp_path, {"model_type": "textcnn", "hidden_size": 16, "num_filters": 8}, rows, "classification", source=source
    )
    assert len(answers_of(capsys, run, lines(tmp_path / "asked.jsonl", [{"body": text} for text in TEXTS]))) == len(
        TEXTS
    )
    assert load(str(run / "config.yaml")).data.labels == ("a", "b")
    assert list(predict(run, str(tmp_path / "asked.jsonl"), Request())) == answers_of(
        capsys, Path(run), tmp_path / "asked.jsonl"
    )


def test_chats_without_a_template_are_refused_once(tmp_path, capsys):
    base = save_model(tmp_path / "base")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    rows = lines(tmp_path / "rows.jsonl", [{"messages": turns}] * 12)
    for arguments in ((), ("--score",)):
        message = refused(capsys, base, rows, *arguments)
        assert message.count("the rows are chats and the tokenizer has no chat template") == 1
        assert "apply_chat_template" not in message
