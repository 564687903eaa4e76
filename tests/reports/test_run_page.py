"""The page of a run: every figure comes from its files, missing ones are named, and it refers to nothing else."""

import json
import math
from dataclasses import replace

import pytest

from framework.reports.run_files import read_run
from framework.reports.run_page import LONGEST, run_page
from tests.grids import slow
from tests.memory.explain.test_moves import FULL
from tests.reports.plans import GIB, PLAN, on
from tests.reports.runs import ENVIRONMENT, REPAIR, evaluation, export, make_run, step, write_memory
from tests.reports.test_page import Reader


def text(page: str) -> str:
    return " ".join(" ".join(Reader(page).words).split())


def page_of(folder) -> str:
    return run_page(read_run(folder))


def drawings(page: str) -> list[str]:
    return [str(found["aria-label"]) for tag, found in Reader(page).tags if tag == "svg"]


PLOTS = [
    "Allocated bytes by phase, planned and measured",
    *["Loss against steps"] * 2,  # one of them for a phone
    *["Memory against steps"] * 2,
    "Tokens a second, all devices",
    "Gradient norm, before clipping",
    "Learning rate",
]


@pytest.fixture
def done(tmp_path):
    lines = [evaluation(0, 3.5), *(step(number) for number in range(1, 6)), evaluation(5, 2.25)]
    folder = make_run(tmp_path / "mine", lines, max_steps=5)
    write_memory(folder, 5)
    export(folder)
    return folder


def test_everything_is_reported(done):
    page = page_of(done)
    found = text(page)
    assert drawings(page) == PLOTS
    for assumption in (
        "mine: done, 5 of 5 steps made",
        "recipe mine",
        "tunesmith train mine gpu=rtx4090_24gb",
        "1bfc1f2a-dirty",
        "torch 2.13.0",
        "accumulation 4 = 8 global / (2 per device x 1 device)",
        "backward 18.50 GiB 18.00 GiB +2.78%",
        "optimizer step 10.00 GiB -",
        "eval - 7.00 GiB",
        "peak of the run 18.50 GiB 18.00 GiB +2.78%",
        "500 ms -20.00%",
        "measured, median of 5 steps 625 ms",
        "Training: 2.95 at step 5. Held-out rows: 3.5 at step 0, 2.25 at step 5, 2.25 at the least (step 5).",
        "planned to be allocated: 18.50 GiB",
        "planned to be reserved: 19.50 GiB",
        "usable on rtx4090_24gb, of 25.00 GiB in all: 24.00 GiB",
        "0 bytes 10.00 GiB 20.00 GiB",
        "NVIDIA GeForce RTX 4090",
        "max_steps: 5",
        *PLAN.assumptions,
        *PLAN.warnings,
    ):
        assert assumption in found, assumption
    assert "peft" not in found.partition("max_steps")[0], "a package that is not installed has no version"
    assert "Missing or incomplete files" not in found


def test_it_refers_to_nothing_outside_itself(done):
    reader = Reader(page_of(done))
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "use"}
    assert not [name for _, found in reader.tags for name in found if name in ("src", "href", "action", "style")]


def test_each_plot_has_a_name_and_a_table(done):
    page = page_of(done)
    tags = [tag for tag, _ in Reader(page).tags]
    after = [tags[at:] for at, tag in enumerate(tags) if tag == "svg"]
    assert all(rest[1] == "title" for rest in after)
    names = [*drawings(page), ""]
    last = [rest for rest, name, following in zip(after, names, names[1:], strict=False) if name != following]
    assert len(last) == len(set(PLOTS))
    assert all("table" in rest[: rest.index("svg", 1) if "svg" in rest[1:] else None] for rest in last)


def test_on_the_cpu_memory_is_not_drawn_and_that_is_reported(tmp_path):
    lines = [step(1), step(2)]
    folder = make_run(tmp_path / "mine", lines, on(None, "cpu"), {**ENVIRONMENT, "device": "cpu"})
    for has_memory in (False, True):
        if has_memory:
            write_memory(folder, 2, baseline=GIB)
        page = page_of(folder)
        assert "Memory against steps" not in drawings(page)
        assert "a run on the CPU uses no memory of a card" in text(page)
    assert PLOTS[0] not in drawings(page)
    assert "backward 18.50 GiB 18.00 GiB" in text(page)
    assert "%" not in text(page).partition("Time of a step")[0].partition("Memory by phase")[2]
    assert "18.50 GiB for tensors only" in text(page)


def test_a_failure_has_its_cause_and_its_moves(tmp_path):
    folder = make_run(tmp_path / "mine", [step(1)], max_steps=5)
    (folder / "oom.txt").write_text(f"phase: backward\nstep: 2\n\ntorch.OutOfMemoryError: {FULL}\n")
    found = text(page_of(folder))
    assert "mine: out of memory in step 2, 1 of 5 steps made" in found
    assert "out of memory in backward (step 2): more memory is needed at that moment than there is" in found
    assert "1.50 GiB free" in found
    assert "Override saves in backward training training.optimizer=x time 2.00 GiB same" in found


def test_a_run_without_steps_says_what_there_is_not(tmp_path):
    folder = make_run(tmp_path / "mine", [])
    page = page_of(folder)
    assert drawings(page) == []
    for message in (
        "no step made",
        "there is nothing to draw",
        "only the plan",
        "backward 18.50 GiB",
        "metrics.jsonl: ",
    ):
        assert message in text(page)
    for name in ("config.yaml", "plan.json"):
        (folder / name).unlink()
    found = text(page_of(folder))
    assert "there is no plan" in found
    assert "config.yaml: No such file" in found


def test_repairs_are_listed_and_drawn(done):
    write_memory(done, 5, repairs=[REPAIR])
    page = page_of(done)
    assert "training.per_device_train_batch_size 4 -> 2 (backward of step 3): step undone and retried" in text(page)
    assert [tag for tag, found in Reader(page).tags if tag == "path" and found["class"] == "moment"] == ["path"] * 2
    assert "the plan is for the last size" in text(page)


def test_one_evaluation_is_reported_once(tmp_path):
    folder = make_run(tmp_path / "mine", [evaluation(0, 3.5), step(1)])
    assert "Held-out rows: 3.5 at step 0. " in text(page_of(folder))


def test_earlier_stops_are_named(done):
    (done / "oom-step-00000003.txt").write_text(f"phase: backward\nstep: 3\n\ntorch.OutOfMemoryError: {FULL}\n")
    found = text(page_of(done))
    assert "mine: done, 5 of 5 steps made" in found
    assert f"tunesmith explain {done / 'oom-step-00000003.txt'}" in found


def test_memory_that_grew_is_reported(done):
    write_memory(done, 5, growth={"per_step": 40 << 20, "step": 5, "full_at": 90})
    assert "Memory that stays allocated grew by 40.0 MiB per step" in text(page_of(done))


def test_a_card_far_larger_than_the_run_is_reported_and_not_drawn(tmp_path):
    for usable, is_drawn in ((90, True), (110, False)):
        page = page_of(make_run(tmp_path / str(usable), [step(1), step(2)], on(usable)))
        assert ('class="limit"' in page) is is_drawn
        assert f"{usable}.00 GiB" in text(page)
    page = page_of(make_run(tmp_path / "unknown", [step(1), step(2)], on(None)))
    assert "How much of rtx4090_24gb is usable is not known" in text(page)


def test_values_that_are_not_finite_are_reported(tmp_path):
    lines = [step(number, **({"loss": math.nan} if number > 2 else {})) for number in range(1, 10)]
    found = text(page_of(make_run(tmp_path / "mine", lines)))
    assert "Not finite, marked at the upper edge: training loss at steps 3, 4, 5, 6, 7 and 2 more." in found
    lines = [step(number, loss=math.inf, grad_norm=None) for number in (1, 2)]
    found = text(page_of(make_run(tmp_path / "all", lines)))
    assert "Not drawn: no value is finite." in found
    assert "Not drawn: metrics.jsonl has no such metric." in found


def test_the_table_of_a_plot_has_its_least_and_greatest_values(tmp_path):
    lines = [step(number, loss={333: 99.5, 444: 0.25}.get(number, 2.0)) for number in range(1, 1001)]
    found = text(page_of(make_run(tmp_path / "mine", lines)))
    assert "333 99.5" in found
    assert "444 0.25" in found
    assert "334 2" not in found


@pytest.mark.parametrize("count", [1, 10_000, slow(100_000)])
def test_runs_of_any_length_make_a_small_page(tmp_path, count):
    folder = make_run(tmp_path / "mine", [], max_steps=count)
    with (folder / "metrics.jsonl").open("w") as file:
        for number in range(1, count + 1):
            file.write(f"{json.dumps(step(number, loss=2 + math.sin(number), grad_norm=1 + number % 97))}\n")
            if number % 100 == 0:
                file.write(f"{json.dumps(evaluation(number, 2.0))}\n")
    page = page_of(folder)
    assert len(page.encode()) < 400_000
    assert f"{count:,} of {count:,} step" in text(page)
    assert f"{count:,} 2 2" in text(page) or count == 1, "the last evaluation has a row: its loss and its perplexity"


def test_a_long_config_is_cut_and_that_is_reported(done):
    names = "".join(f"- class number {number}\n" for number in range(60_000))
    (done / "config.yaml").write_text(f"data:\n  labels:\n{names}")
    page = page_of(done)
    assert len(page) < 400_000
    assert f"(the first {LONGEST:,} of " in text(page)


def test_names_are_text_and_never_markup(done):
    odd = "<script>alert(1)</script>"
    environment = {**ENVIRONMENT, "command": ["tunesmith", "train", odd], "git": odd, "packages": {"torch": odd}}
    (done / "environment.json").write_text(json.dumps(environment))
    (done / "plan.json").write_text(json.dumps(replace(PLAN, assumptions=(odd,)).to_json()))
    write_memory(done, 5, repairs=[{**REPAIR, "key": odd}], timeline=[
        {"name": odd, "predicted_bytes": 1, "measured_bytes": 2}
    ])  # fmt: skip
    (done / "metrics.jsonl").write_text(json.dumps({**evaluation(1, 2.0), f"f1.{odd}": 0.5}) + "\n")
    (done / "oom.txt").write_text(f"phase: backward\nstep: 2\n\ntorch.OutOfMemoryError: {FULL} {odd}\n")
    page = page_of(done)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5
    Reader(page)


def test_evaluations_by_named_sets_and_samples(tmp_path):
    sets = {"eval_loss/code": 2.5, "eval_loss/chat": 1.5, "perplexity/code": 12.18, "python/mine": 7.0}
    lines = [step(1), {**evaluation(1, 2.0), **sets}, step(2), {**evaluation(2, 1.9), **sets, "eval_loss/chat": 1.25}]
    folder = make_run(tmp_path / "r", lines)
    samples = [{"step": each, "prompt": "<b>", "completion": f"after {each}"} for each in (1, 2)]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in samples) + '{"step": 3, "pro')
    message = text(page_of(folder))
    assert "All held-out rows Step eval loss perplexity python/mine 1 2 2 7 2 1.9 2 7" in message
    assert "Loss of each set Step code chat 1 2.5 1.5 2 2.5 1.25" in message
    assert "Each set, at step 2 Set eval loss perplexity code 2.5 12.18 chat 1.25 -" in message
    assert "Greedy completions at step 2. <b> after 2 Before Step 1 after 1" in message
