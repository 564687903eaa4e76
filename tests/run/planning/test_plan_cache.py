"""Plans that are kept: of the same step, whatever of the card is usable."""

from dataclasses import replace

import pytest

from framework.memory.cards import read_card
from framework.memory.planning import make_plan
from framework.run.planning import plan_cache, plan_pool
from framework.run.rehearsal.rehearse import record
from framework.schema.choices import TorchDtype
from framework.schema.config import TrainingConfig
from tests.tiny import LLAMA


def config(rows=1, **card):
    architecture = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    return TrainingConfig(
        model={"architecture": architecture, "load_pretrained_weights": False, "model_max_length": 32},
        training={"per_device_train_batch_size": rows, "global_batch_size": 2},
        gpu={**read_card("h100_80gb"), **card},
    )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("usable", [10**6, 40 * 10**9])
@pytest.mark.parametrize("source", ["written", "assumed: the most that a test takes"])
def test_a_plan_serves_another_limit_and_is_what_would_be_planned_for_it(usable, source):
    first = config()
    plan_cache.write(first, make_plan(record(first)))
    other = config(usable_bytes=usable, sources={**first.gpu.sources, "usable_bytes": source})
    found = plan_cache.read(other)
    assert found is not None
    assert found.fits == (usable > 10**9)
    expected = make_plan(record(other))
    assert set(found.assumptions) == set(expected.assumptions)
    assert replace(found, assumptions=()) == replace(expected, assumptions=())


def test_the_plan_of_a_folder_is_that_of_the_files_in_it(tmp_path):
    folder, made = tmp_path / "model", make_plan(record(config()))
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    asked = config().model_copy(update={"model": config().model.model_copy(update={"model_name": str(folder)})})
    plan_cache.write(asked, made)
    assert plan_cache.read(asked) == made
    (folder / "config.json").write_text('{"hidden_size": 64}')
    assert plan_cache.read(asked) is None


def test_the_plan_of_a_model_whose_config_a_hub_has_is_not_kept():
    model = config().model.model_copy(update={"model_name": "some/model", "architecture": None})
    asked = config().model_copy(update={"model": model})
    plan_cache.write(asked, make_plan(record(config())))
    assert plan_cache.read(asked) is None


def test_what_is_planned_otherwise_is_not_read():
    plan_cache.write(config(), make_plan(record(config())))
    assert plan_cache.read(config(rows=2)) is None
    assert plan_cache.read(config(usable_bytes=None)) is None
    assert plan_cache.read(config(capacity_bytes=10**10)) is None


def changed(section="training", **values):
    asked = config()
    part = getattr(asked, section).model_copy(update=values)
    return asked.model_copy(update={section: part})


@pytest.mark.parametrize(
    "other",
    [
        changed(learning_rate=1.0, warmup_steps=5, output_dir="/elsewhere", logging_steps=7),
        changed(global_batch_size=None, gradient_accumulation_steps=2),
        changed("model", chunked_loss=1024),
        changed("model", chunked_loss=True),
        changed("model", torch_dtype_str=TorchDtype.FLOAT32),
    ],
)
def test_other_words_for_the_same_run_have_its_plan(other):
    assert plan_cache.question(other) == plan_cache.question(config())
    assert make_plan(record(other)) == make_plan(record(config()))


def test_a_batch_that_does_not_divide_is_another_question():
    assert plan_cache.question(changed(global_batch_size=3, per_device_train_batch_size=2)) != ""


def test_equal_questions_are_asked_once_and_answered_for_each_card(monkeypatch):
    asked, made = [], make_plan(record(config()))
    answer = {"plan": made.to_json()}
    monkeypatch.setattr(plan_pool.Rehearsals, "_ask", lambda _, configs: asked.extend(configs) or [answer])
    same = changed("model", chunked_loss=1024)
    smaller = same.model_copy(update={"gpu": same.gpu.model_copy(update={"usable_bytes": 10**6})})
    with plan_pool.Rehearsals(use_cache=False) as rehearsals:
        plans = rehearsals.plans([config(), same, smaller])
    assert len(asked) == 1
    assert [plan.fits for plan in plans] == [True, True, False]
    assert plans[1] == made
