"""Verdicts: whether `chat` with nine models and three ways to train fits each shipped card, and its speed.

Written to results/verdicts.json and docs/verdicts.md.

python benchmarks/verdicts.py [ROW ..]        the named rows, else all (an hour of one core)
python benchmarks/verdicts.py --page          only the page, from the results

A row is rehearsed once for each class of kernels: with few layers at three micro-batches (memory/search/estimate), then
as a whole with the most promising settings. The cards of a class are computed from the same record;
tests/test_verdicts.py plans some with their own facts.
"""

import argparse
import datetime
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from framework.compose.request import load
from framework.installation import shipped
from framework.memory.cards import card_names, read_card
from framework.memory.ledger import Plan
from framework.memory.planning import plan_of_peaks, replayed
from framework.memory.requirements import with_values
from framework.memory.resolve import resolve
from framework.memory.search.estimate import Estimate, deepened, depths_of, with_depth
from framework.memory.search.fastest import without_evaluation
from framework.memory.search.free_keys import freedom, opened
from framework.memory.search.space import micro_batches, with_rows
from framework.memory.trace import Kind, Rehearsal
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "verdicts.json", ROOT / "docs" / "verdicts.md"
GIB = 2**30

OLD_KERNELS = ("7.0", "7.5")
"""Capabilities without bfloat16 and without torch's flash attention: rehearsed as a T4. All others, including MI300X,
are rehearsed as an A6000, which keeps the same in memory, up to the tolerance of tests/test_verdicts.py."""
STRATEGIES = ("plain", "no_logits", "balanced", "low_memory", "lowest_memory")
"""From fast to small: all logits at once, only `model.chunked_loss`, and three `training=` groups."""
WRITTEN = "written"
"""The only strategy of a recipe that leaves nothing open."""
LETTERS = {"plain": "P", "no_logits": "N", "balanced": "B", "low_memory": "L", "lowest_memory": "M", WRITTEN: "W"}
MODELS = (
    *("gemma3_1b", "gemma3_4b", "olmo2_7b", "phi4_mini_4b", "qwen3_0.6b", "qwen3_1.7b", "qwen3_4b", "qwen3_8b"),
    "smollm3_3b",
)
WAYS = {"full": "none", "lora": "lora", "qlora": "qlora"}
"""Way to train -> its `peft=`."""
ROWS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("classify", "quickstart")},
    **{f"{model}_{way}": ("chat", f"model={model}", f"peft={WAYS[way]}") for model in MODELS for way in WAYS},
}
"""Row -> the recipe and its overrides."""
NOT_HERE = {
    "finetune_hub": "its model is not in the package",
    "finetune_local": "its model is not in the package",
    **dict.fromkeys(("distill", "preference", "text"), "`tunesmith plan` answers, with the card and the model"),
}
"""Shipped recipe without a row -> why."""
SIZES = (1, 4, 16)
"""Micro-batches that are rehearsed."""
TOLD = ("strategy", "micro_batch", "fits", "device_bytes_upper", "tokens_per_second")


def strategies(row: str) -> tuple[str, ...]:
    """Strategies compared for a row: the keys that `training=fastest` leaves open, else the recipe as written."""
    recipe, *_ = ROWS[row]
    is_open = "training: fastest" in (shipped("recipes") / f"{recipe}.yaml").read_text(encoding="utf-8")
    return STRATEGIES if is_open else (WRITTEN,)


def strategy(row: str, name: str, gpu: str) -> TrainingConfig:
    """The recipe of a row with one of its strategies."""
    recipe, *overrides = ROWS[row]
    group = ["training=" + name] if name in STRATEGIES[2:] else []
    config = opened(load(recipe, [*overrides, *group, f"gpu={gpu}"]))
    chunked = {"plain": False, "no_logits": True}
    return with_values(config, {"model.chunked_loss": chunked[name]}) if name in chunked else config


def sizes(config: TrainingConfig, name: str) -> list[int]:
    """Micro-batches that a strategy allows."""
    if name in ("low_memory", "lowest_memory", WRITTEN):
        return [config.batch.per_device]
    return micro_batches(config, config.batch.global_size, freedom(()))


def sized(config: TrainingConfig, micro: int) -> TrainingConfig:
    return with_rows(config, config.batch.global_size, micro, freedom(()))


@cache
def facts(card: str) -> GPUParams:
    return GPUParams(**read_card(card))


def classes() -> dict[str, list[str]]:
    """The rehearsed card -> the cards that it represents."""
    found: dict[str, list[str]] = {"t4_16gb": [], "a6000_48gb": []}
    for card in card_names():
        if facts(card).usable_bytes:
            found["t4_16gb" if facts(card).capability in OLD_KERNELS else "a6000_48gb"].append(card)
    return found


def plans_on(config: TrainingConfig, cards: Sequence[str]) -> dict[str, Plan]:
    """One rehearsal, and its costs on each card that runs the same kernels."""
    rehearsal = record(config)
    moved = {card: moved_to(rehearsal, facts(card)) for card in cards}
    peaks = {there.config.gpu.cublas_workspace_bytes: there for there in moved.values()}
    peaks = {size: replayed(there) for size, there in peaks.items()}
    return {card: plan_of_peaks(there, peaks[there.config.gpu.cublas_workspace_bytes]) for card, there in moved.items()}


def moved_to(rehearsal: Rehearsal, card: GPUParams) -> Rehearsal:
    """The rehearsal as on another card that runs the same kernels: its facts, and cuBLAS's workspaces of its size."""
    there = replace(rehearsal, config=rehearsal.config.model_copy(update={"gpu": card}))
    before, after = rehearsal.config.gpu.cublas_workspace_bytes, card.cublas_workspace_bytes
    if before == after or before is None or after is None:
        return there
    trace = rehearsal.trace
    ended = {~event for event in trace.events if event < 0}
    kept = {number for number, size in enumerate(trace.sizes) if size == before and number not in ended}
    taken = [number for number in kept if trace.kinds[number] is Kind.TEMPORARIES]
    sizes = list(trace.sizes)
    for number in taken:
        sizes[number] = after
    return replace(there, trace=replace(trace, sizes=sizes))


def estimates(config: TrainingConfig, tried: Sequence[int], cards: Sequence[str]) -> dict[str, Estimate]:
    """Estimates of a structure on each card at any micro-batch."""
    found = {card: Estimate() for card in cards}
    depths = depths_of(config)
    for size in [size for size in SIZES if size in tried] or tried:
        at_size = without_evaluation(sized(config, size))
        few = plans_on(with_depth(at_size, depths.few) if depths else at_size, cards)
        more = plans_on(with_depth(at_size, depths.more), cards) if depths else few
        for card in cards:
            found[card].shallow[size] = deepened(few[card], more[card], depths)
    return found


@dataclass
class Board:
    """Estimates for a recipe on the cards of one class. `known`: strategy -> card -> estimate."""

    cards: Sequence[str]
    configs: Mapping[str, TrainingConfig]
    known: Mapping[str, Mapping[str, Estimate]]

    def best(self, card: str) -> dict[str, Any]:
        """The fastest strategy and micro-batch that fit by the estimates, or those that need least memory."""
        usable = facts(card).usable_bytes or 0
        rows = [
            _row(name, micro, self.known[name][card], usable, config)
            for name, config in self.configs.items()
            for micro in sizes(config, name)
        ]
        return min(rows, key=_rank)

    def settle(self) -> dict[str, dict[str, Any]]:
        """Plan the best one as a whole, which corrects its estimate, until every best one was planned."""
        while True:
            found = {card: self.best(card) for card in self.cards}
            wanted = {(row["strategy"], row["micro_batch"]) for row in found.values() if not row["planned"]}
            if not wanted:
                return {card: {key: row[key] for key in TOLD} for card, row in found.items()}
            name, micro = min(wanted)
            for card, plan in plans_on(sized(self.configs[name], micro), self.cards).items():
                self.known[name][card].planned[micro] = plan


def verdicts(row: str, cards: Sequence[str], rehearsed: str) -> dict[str, dict[str, Any]]:
    """Card -> the fastest strategy that fits it, or the one that needs least memory; each planned as a whole."""
    configs = {name: strategy(row, name, rehearsed) for name in strategies(row)}
    known = {name: estimates(config, sizes(config, name), cards) for name, config in configs.items()}
    return Board(cards, configs, known).settle()


def _row(name: str, micro: int, estimate: Estimate, usable: int, config: TrainingConfig) -> dict[str, Any]:
    upper, seconds = estimate.upper(micro), estimate.seconds(micro)
    tokens = config.batch.global_size * resolve(config).longest
    return {
        "strategy": name,
        "micro_batch": micro,
        "planned": micro in estimate.planned,
        "fits": upper <= usable,
        "device_bytes_upper": round(upper),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
    }


def _rank(row: Mapping[str, Any]) -> tuple[bool, float]:
    return not row["fits"], -(row["tokens_per_second"] or math.inf) if row["fits"] else row["device_bytes_upper"]


def made(names: Sequence[str]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Verdicts of each row."""
    for name in names:
        rows = {}
        for rehearsed, cards in classes().items():
            rows |= verdicts(name, cards, rehearsed)
        yield name, dict(sorted(rows.items()))


INTRODUCTION = """\
# Does it fit?

Made by `make verdicts` (`benchmarks/verdicts.py`, an hour of one core); do not edit. Planned, not measured, for
one card and rows of the recipe's length; {versions}, {date}.
A line is `tunesmith train chat model=MODEL peft=none` (full), `peft=lora` or `peft=qlora`.

Each cell: GiB (the upper end of the plan's band), thousand tokens a second, and how: P nothing set, N no logits
(`model.chunked_loss`), B `training=balanced`, L `training=low_memory`, M `training=lowest_memory`, with the rows of a
forward pass behind it; the fastest of these five that fits. A dash: none fits. `training=fastest`, which the recipe
ships with, searches more than this (compiled blocks, every n-th checkpoint), so expect at least that speed.

The table was made before the step times of elementwise kernels were fitted again on the same day: speeds of today's
plans differ (Gemma 3 1B with QLoRA on a T4, the one row that was compared: 11 % more tokens, bytes within 1 %).

CI checks that every shipped card is in the table and that the page is what the results
(`benchmarks/results/verdicts.json`) give; `make test-all` makes plans again (`tests/test_verdicts.py`). For other
recipes use `tunesmith plan`.
"""


def page(document: Mapping[str, Any]) -> str:
    """The text of docs/verdicts.md: one table per way to train, one line per model, one column per card."""
    found, lines = document["verdicts"], [INTRODUCTION.format(**document)]
    for way in WAYS:
        lines += _table(
            f"## {way}", {name.removesuffix(f"_{way}"): found[name] for name in found if way_of(name) == way}
        )
    lines += _table(
        "## As written: W, with the rows of a forward pass behind it",
        {name: found[name] for name in found if way_of(name) not in WAYS},
    )
    return "\n".join(lines).rstrip() + "\n"


def way_of(row: str) -> str:
    """How a row trains, from the end of its name."""
    return row.rpartition("_")[2]


def _table(title: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    cards = sorted(classes_cards(), key=lambda card: facts(card).usable_bytes or 0)
    head = ["model", *map(_heading, cards)]
    cells = [[name, *(_cell(found[card]) for card in cards)] for name, found in sorted(rows.items())]
    return [title, "", *("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)), ""]


def classes_cards() -> list[str]:
    return [card for cards in classes().values() for card in cards]


def _heading(card: str) -> str:
    name, _, memory = card.rpartition("_")
    return f"{name.replace('_', ' ')} {memory.removesuffix('gb')}"


def _cell(row: Mapping[str, Any]) -> str:
    if not row["fits"]:
        return "-"
    letter = LETTERS[row["strategy"]]
    speed = f" {row['tokens_per_second'] / 1000:.1f}k" if row["tokens_per_second"] else ""
    return f"{row['device_bytes_upper'] / GIB:.1f}{speed} {letter}{row['micro_batch']}"


def text_of(document: Mapping[str, Any]) -> str:
    """The results as a file: one line per row and card."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in document.items() if key != "verdicts"]
    lines.append(' "verdicts": {')
    for name, rows in sorted(document["verdicts"].items()):
        cells = [f"   {json.dumps(card)}: {json.dumps(row, sort_keys=True)}" for card, row in sorted(rows.items())]
        lines += [f"  {json.dumps(name)}: {{", ",\n".join(cells), "  },"]
    return "{\n" + "\n".join(lines).removesuffix(",") + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"verdicts": {}}
    if not asked.page:
        known |= {
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "machine": f"planned on {platform.machine()}, no card",
            "date": datetime.date.today().isoformat(),
        }
        began = time.process_time()
        for name, rows in made(asked.rows or list(ROWS)):
            known["verdicts"][name] = rows
            seconds = time.process_time() - began
            print(
                f"{seconds:.0f} s", name, {card: _cell(row) for card, row in rows.items()}, file=sys.stderr, flush=True
            )
            RESULTS.write_text(text_of(known))
    PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
