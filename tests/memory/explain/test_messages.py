"""Every known wording: kind, cause, and each figure exact."""

import re
from pathlib import Path

import pytest
import yaml

from framework.errors import RequestError
from framework.memory.explain import explain_evidence
from framework.memory.explain.evidence import Evidence
from framework.memory.explain.text import explanation_lines

CASES = yaml.safe_load(Path(__file__).with_name("messages.yaml").read_text())
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FIELDS = {
    "request": "request_bytes",
    "capacity": "capacity_bytes",
    "free": "free_bytes",
    "allocated": "allocated_bytes",
    "unallocated": "reserved_unallocated_bytes",
    "others": "other_process_bytes",
}


def size(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * UNITS[unit])


def expected(case: dict, name: str) -> int | None:
    """A size, or for `X_of` the first less all others."""
    if f"{name}_of" in case:
        first, *rest = map(size, case[f"{name}_of"])
        return first - sum(rest)
    return size(case[name]) if name in case else None


def test_there_are_enough_and_each_is_named_once():
    assert len(CASES) >= 60
    assert len({case["name"] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_wording(case):
    document = explain_evidence(Evidence(case["text"])).to_json()
    assert document["kind"] == case.get("kind", "out_of_memory")
    assert document["cause"] == case["cause"]
    found = {name: document[field] for name, field in FIELDS.items()}
    wanted = {name: expected(case, name) for name in FIELDS}
    for name in FIELDS:  # a difference of rounded sizes may be a byte off the rounded difference
        assert found[name] == pytest.approx(wanted[name], abs=1 if f"{name}_of" in case else 0), name
    if "phase" in case:
        assert document["phase"] == case["phase"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_wording_in_the_middle_of_a_log(case):
    """Lines around it change nothing: neither a run's progress before, nor other errors after."""
    before = "step 11/40  loss 2.3170  lr 1.00e-05  6,914 tok/s  988 MiB\nSaving model checkpoint to runs/a/step-10\n"
    after = (
        "\nwandb: Waiting for W&B process to finish... (failed 1).\nTraceback (most recent call last):\nValueError: x\n"
    )
    plain = explain_evidence(Evidence(case["text"])).to_json()
    assert explain_evidence(Evidence(before + case["text"] + after)).to_json() == plain


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: shapes (3, 4) and (5, 6) do not match",
        "step 40/500  loss 2.1180  lr 1.90e-05  1,024 tok/s  988 MiB",
        "Tip: if you encounter CUDA out of memory, try to set --tile with a smaller number.",
        "kill the process when the memory is not needed any more; loss: 1.2, info: none",
        "Process finished with exit code 0",
        "Starting; best_val_loss: inf, best loss: inf",
        "make: *** [Makefile:10: train] Error 1",
        "Segmentation fault (core dumped)",
        "RuntimeError: CUDA error: device-side assert triggered",
    ],
)
def test_a_text_of_no_known_kind_is_refused_without_figures(text):
    with pytest.raises(RequestError, match="no known kind of failure") as raised:
        explain_evidence(Evidence(text))
    assert raised.value.exit_code == 2
    assert not re.search(r"\d", str(raised.value))


def test_a_long_log_is_read_to_its_message_and_its_stack():
    progress = "step 3/9  loss 2.3170  lr 1.00e-05  6,914 tok/s  988 MiB\n" * 20_000
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    loss.backward()\n'
    found = explain_evidence(Evidence(progress + stack + CASES[0]["text"]))
    assert (found.message.line, found.phase) == (20_003, "backward")


def test_the_ranks_that_ran_out_are_named_the_first_first():
    """A hang of the others is an echo, and not of that kind."""
    lines = (
        "[rank2]: Watchdog caught collective operation timeout",
        f"[rank3]: {CASES[0]['text'].strip()}",
        f"[rank0]: {CASES[0]['text'].strip()}",
    )
    found = explain_evidence(Evidence("\n".join(lines)))
    assert found.message.writers == ("rank3", "rank0")
    assert "  first of rank3; then of rank0" in explanation_lines(found)
    assert explain_evidence(Evidence(CASES[0]["text"])).message.writers == ()


WRITERS = {
    "colours": lambda line: re.sub(r" (\w+)", "\x1b[1;31m \\1\x1b[0m", line),
    "Windows": lambda line: f"{line}\r",
    "torchrun": "[rank0]: {}".format,
    "srun --label": "3: {}".format,
    "a container's runtime": "2026-11-28T10:00:00.123456789Z stderr F {}".format,
    "journald": "Nov 28 10:00:00 node7 train.service[4242]: {}".format,
    "Ray": "\x1b[36m(train_fn pid=4242, ip=10.0.0.3)\x1b[0m {}".format,
}
WHOLE_RECORDS = (
    "records of a container",
    "an error file of torchrun",
    "coloured, ranks and times in front, two ranks mixed",
)
"""Cases whose lines have a writer already."""


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_who_wrote_the_lines_changes_nothing_of_what_they_say(writer):
    for case in CASES:
        if case["name"] in WHOLE_RECORDS or (case["name"].startswith("progress bars") and writer != "Windows"):
            continue
        plain = explain_evidence(Evidence(case["text"])).to_json()
        text = "\n".join(map(writer, case["text"].splitlines()))
        assert explain_evidence(Evidence(text)).to_json() == plain, case["name"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_message_that_was_cut_says_less_and_nothing_else(case):
    """Memory of other processes is what was named so far, never what the missing figures would have explained."""
    text, words = case["text"].rstrip(), case["text"].split(" ")
    whole = explain_evidence(Evidence(text)).to_json()
    for count in range(1, len(words)):
        cut = " ".join(words[:count])
        try:
            document = explain_evidence(Evidence(cut)).to_json()
        except RequestError:
            continue
        for name in FIELDS:
            field = document[FIELDS[name]]
            if name == "others" and field is not None:
                assert field <= (whole[FIELDS[name]] or 0), cut
            else:
                assert field in (None, whole[FIELDS[name]]), cut
