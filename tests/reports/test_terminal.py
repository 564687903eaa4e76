"""A plan in a terminal."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from framework.memory.ledger import Plan, ShardDtypes
from framework.reports.plan_text import duration, signed_size, size, verdict
from framework.reports.terminal import ASCII, BLOCKS, plan_lines, strokes_for
from framework.run.planning.measurements import Measured
from tests.reports.plans import BACKWARD, GIB, PLAN, on

GOLDEN = Path(__file__).with_name("plan.txt")
MEASURED = Measured("NVIDIA GeForce RTX 4090", 18 * GIB, 20 * GIB, 20 * GIB, 0.4, 5120.0, {}, 1.0, "2.13.0")


def shown(plan: Plan = PLAN, measured: Measured | None = None, width: int = 80) -> str:
    return "".join(f"{line.plain}\n" for line in plan_lines("tiny", plan, measured, width))


def printed(**console: object) -> str:
    out = StringIO()
    for line in plan_lines("tiny", PLAN):
        Console(file=out, soft_wrap=True, highlight=False, **console).print(line)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_plan_reads_as_it_always_did() -> None:
    assert shown(measured=MEASURED) == GOLDEN.read_text()


@pytest.mark.parametrize("width", [72, 80, 120])
def test_no_line_is_longer_than_the_terminal_or_ends_in_spaces(width: int) -> None:
    lines = shown(measured=MEASURED, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 12, "the bars use the room there is"
    assert not [line for line in lines if line != line.rstrip()]


def test_colour_is_for_terminals_alone_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in printed()
    assert "\x1b[36m" in printed(force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(force_terminal=True, color_system="standard")


@pytest.mark.parametrize(
    ("usable", "fits", "arguments"),
    [
        (24, True, "fits on it: up to 21.00 GiB of 24.00 GiB usable, 3.00 GiB left"),
        (21, True, "fits on it: up to 21.00 GiB of 21.00 GiB usable, 0 bytes left"),
        (20.5, False, "is not sure to fit on it: needs up to 21.00 GiB, 20.50 GiB is usable, 512.0 MiB missing"),
        (12, False, "does not fit on it: needs up to 21.00 GiB, 12.00 GiB is usable, 9.00 GiB missing"),
    ],
)  # fmt: skip
def test_the_verdict_compares_the_upper_end(usable: float, fits: bool, arguments: str) -> None:
    found = verdict(on(usable, "it"))
    assert (found.fits, found.headline) == (fits, arguments)
    assert found.fits == on(usable).fits
    assert found.details[1] == "The peak is in backward; its largest term is activations, 8.00 GiB (40%)."


def test_without_a_card_it_says_what_the_figures_mean() -> None:
    text = shown(on(None, "cpu"))
    assert "is planned for this machine's CPU: tensors take 20.00 GiB of main memory" in text
    assert "There is no card to compare with." in text
    assert "usable" not in text
    assert "upper end" not in text
    assert "torch counters" not in text


def bar(text: str, name: str) -> str:
    line = next(line for line in text.splitlines() if line.startswith(name))
    return line[26:]


def test_bars_are_in_proportion_and_the_line_is_where_the_card_ends() -> None:
    text = shown(on(42))
    backward, load = bar(text, "backward"), bar(text, "load")
    room = 80 - len("optimizer step") - 13
    assert backward.index(BLOCKS.limit) == load.index(BLOCKS.limit) == room
    assert backward.count(BLOCKS.used) == round(room * 18.5 / 42)
    assert backward.count(BLOCKS.held) == round(room * 20 / 42) - round(room * 18.5 / 42)
    over = bar(shown(on(10)), "backward")
    assert over.index(BLOCKS.limit) == round(room * 10 / 21)
    assert over.rindex(BLOCKS.held) > over.index(BLOCKS.limit)


def test_what_lies_beyond_the_line_is_red() -> None:
    line = next(line for line in plan_lines("tiny", on(10)) if line.plain.startswith("backward"))
    limit = line.plain.index(BLOCKS.limit)
    red = [span for span in line.spans if span.style == "red"]
    assert min(span.start for span in red) == limit + 1
    fitting = next(line for line in plan_lines("tiny", on(24)) if line.plain.startswith("backward"))
    assert not [span for span in fitting.spans if span.style == "red"]


def test_unknown_speed_and_length_are_reported() -> None:
    assert "step            the speed of rtx4090_24gb is not known" in shown(replace(PLAN, step=None, run_hours=None))
    assert "not known: training.max_steps is not set" in shown(replace(PLAN, run_hours=None))
    without = shown(replace(PLAN, step=None), MEASURED).splitlines()
    assert ["step", "not", "known", "400", "ms"] in [line.split() for line in without]


def test_characters_follow_the_encoding() -> None:
    assert strokes_for("utf-8") == BLOCKS
    assert strokes_for("latin-1") == strokes_for("nonsense") == ASCII
    text = "".join(line.plain for line in plan_lines("tiny", PLAN, strokes=ASCII))
    text.encode("ascii")


def test_the_table_adds_up() -> None:
    rows = [line.split() for line in shown().splitlines()]
    start = next(number for number, row in enumerate(rows) if row[:2] == ["At", "the"]) + 1
    end = next(number for number, row in enumerate(rows) if row[:1] == ["together"])
    figures = [float(next(word for word in row if "." in word)) for row in rows[start:end]]
    assert len(figures) == sum(count > 0 for count in BACKWARD.to_json().values())
    assert sum(figures) == float(rows[end][1]) == 20
    assert figures == sorted(figures, reverse=True)


def test_sizes_and_times() -> None:
    assert [size(count) for count in (0, 512, 2048, 3 * 2**20, 3 * GIB, 2000 * GIB)] == [
        "0 bytes", "512 bytes", "2.0 KiB", "3.0 MiB", "3.00 GiB", "2,000.00 GiB",
    ]  # fmt: skip
    assert [signed_size(count) for count in (GIB, -GIB, 0)] == ["+1.00 GiB", "-1.00 GiB", "0"]
    assert [duration(seconds) for seconds in (0.0712, 2.5, 600, 36000)] == ["71.2 ms", "2.5 s", "10 min", "10.0 h"]


def test_the_dtypes_of_shards_are_a_table() -> None:
    trained = ShardDtypes("trained", "float32", "bfloat16", "float32", "float32")
    text = shown(replace(PLAN, shards=(trained, ShardDtypes("frozen", "bfloat16", "bfloat16"))))
    assert [line.split() for line in text.splitlines() if "bfloat16" in line or "stored" in line] == [
        ["Shards", "of", "weights", "stored", "computed", "reduced", "stepped"],
        ["trained", "float32", "bfloat16", "float32", "float32"],
        ["frozen", "bfloat16", "bfloat16", "-", "-"],
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert "Shards" not in shown()
