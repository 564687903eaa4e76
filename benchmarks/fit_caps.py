"""`fit` under memory caps: its proposals, and alternatives from its search space, run on a card.

    python benchmarks/fit_caps.py propose CARD asked.jsonl [SHAPE/CAP_GB ...]     any machine; only plans
    python benchmarks/levers.py measure asked.jsonl measured.jsonl                a machine with the card
    python benchmarks/fit_caps.py summary asked.jsonl measured.jsonl results/fit_caps.json

The cap is `gpu.usable_bytes`, so a proposal fits if the card's memory in use stays below. Rivals are the other settings
that the search timed and found small enough, fastest first, one of each structure, and some drawn at random from its
space. In addition, what a careful user writes by hand: checkpointing of every block, 4 rows, compiled or not.
"""

import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from framework.compose import compose
from framework.memory.resolve import resolve
from framework.memory.search.fastest import Candidate, Search
from framework.run.planning.fit import fit
from framework.schema.config import TrainingConfig

SHAPES = {
    "1b_full": ["model=llama3.2_1b", "training.use_peft=false", "training.global_batch_size=64"],
    "8b_lora": ["model=llama3.1_8b", "peft=lora", "training.global_batch_size=32"],
    "0.6b_full": ["model=qwen3_0.6b", "training.use_peft=false", "training.global_batch_size=64"],
}
COMMON = ["data.eval_fraction=0", "model.model_max_length=2048", "model.load_pretrained_weights=false"]
CAPS = (8, 12, 16, 24, 40, 80)
MARGIN_80 = 79.2e9
"""Usable bytes of 80 GB, for cards that have more."""
RIVALS, BY_LOT = 5, 2
AT_ONCE = 8
CHECKPOINTED = ["training.enable_gradient_checkpointing=true", "training.per_device_train_batch_size=4"]
BY_HAND = {
    "by-hand": CHECKPOINTED,
    "by-hand-compiled": [*CHECKPOINTED, "training.compile=true", "model.chunked_loss=true"],
}


def propose(card: str, out: Path, chosen: list[str]) -> None:
    """One line per config to run; `chosen` names the cells with rivals."""
    cells = [(name, cap, card, f"{name}/{cap}" in chosen) for name in SHAPES for cap in CAPS]
    with ProcessPoolExecutor(AT_ONCE) as pool, out.open("w", encoding="utf-8") as file:
        for lines in pool.map(_cell, cells):
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            print({key: value for key, value in lines[0].items() if key != "config"}, len(lines), flush=True)


def _cell(cell: tuple[str, int, str, bool]) -> list[dict[str, Any]]:
    name, cap, card, has_rivals = cell
    searches: list[Search] = []
    run = Search.run

    def kept(search: Search) -> Search:
        searches.append(search)
        return run(search)

    Search.run = kept  # type: ignore[method-assign]
    usable = f"gpu.usable_bytes={int(min(cap * 1e9, MARGIN_80))}"
    config = compose("finetune_local", [*SHAPES[name], f"gpu={card}", usable, *COMMON]).config
    start = time.perf_counter()
    found = fit(config, runs_here=True)
    facts = {
        "fits": found.fits,
        "overrides": found.overrides,
        "upper_bytes": found.plan.peak.device_bytes_upper,
        "tokens_per_second": found.plan.step.tokens_per_second if found.plan.step else None,
        "tried": found.tried,
        "seconds": time.perf_counter() - start,
    }
    lines = [{"name": f"{name}/{cap}/proposal", **facts, "config": found.config.model_dump(mode="json")}]
    if has_rivals:
        for number, rival in enumerate(_rivals(searches, found.config)):
            lines.append({"name": f"{name}/{cap}/rival-{number}", "config": rival.model_dump(mode="json")})
        for word, changes in BY_HAND.items():
            written = compose("finetune_local", [*SHAPES[name], f"gpu={card}", usable, *COMMON, *changes]).config
            lines.append({"name": f"{name}/{cap}/{word}", "config": resolve(written).model_dump(mode="json")})
    return lines if found.fits else lines[:1]


def _rivals(searches: list[Search], proposal: TrainingConfig) -> list[TrainingConfig]:
    """The fastest by their estimates, one of each structure, then a random sample of likely fits."""
    ranked: list[tuple[float, Search, Candidate]] = []
    for search in searches:
        points = [(seconds, item) for item, upper, seconds in search.points() if upper <= search.space.usable]
        best = {item.number: (seconds, item) for seconds, item in sorted(points, reverse=True)}
        ranked += [(seconds, search, item) for seconds, item in best.values()]
    ranked.sort(key=lambda point: point[0])
    others = [
        Candidate(number, size)
        for number, estimate in searches[0].estimates.items()
        for size in searches[0].space.sizes
        if estimate.upper(size) <= searches[0].space.usable
    ]
    lot = random.Random(0).sample(others, min(BY_LOT, len(others)))
    configs = [search.space.config(item) for _, search, item in ranked[: RIVALS + 1]]
    configs += [searches[0].space.config(item) for item in lot]
    distinct = {config.model_dump_json(): config for config in configs}
    distinct.pop(proposal.model_dump_json(), None)
    return list(distinct.values())[: RIVALS + BY_LOT]


def summary(asked: Path, measured: Path, out: Path) -> None:
    """For each cell the proposal, planned and measured, and the best measured setting within the cap.

    A line of `measured` may name the `call` that measured it; figures are compared within one call.
    """
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    calls: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, measured.read_text().splitlines()):
        calls.setdefault(row.get("call", ""), {})[row["name"]] = row["measured"]
    proposals = {line["name"]: line for line in lines if line["name"].endswith("/proposal")}
    cells = [_compared(line, proposals, calls) for line in proposals.values()]
    some = next(row for rows in calls.values() for row in rows.values() if "error" not in row)
    document = {
        key: some[name] for key, name in (("machine", "device_name"), ("date", "date"), ("packages", "packages"))
    }
    out.write_text(json.dumps({**document, "cells": cells}, indent=1) + "\n")
    for cell in cells:
        print({key: value for key, value in cell.items() if key not in ("measured", "overrides")})


def _compared(line: dict[str, Any], proposals: dict[str, Any], calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A cell in the call that measured most rows in addition to its proposal."""
    cell, usable = line["name"].removesuffix("/proposal"), line["config"]["gpu"]["usable_bytes"]
    facts = {key: value for key, value in line.items() if key not in ("name", "config")}
    document: dict[str, Any] = {"cell": cell, "usable_bytes": usable, **facts}
    ran = [rows for rows in calls.values() if "error" not in rows.get(line["name"], {"error": "not run"})]
    if not ran:
        return {**document, "measured": {"error": "not run"}}
    found = max(((_rivals_of(line, proposals, rows), rows) for rows in ran), key=lambda pair: len(pair[0]))
    rivals, rows = found
    mine = rows[line["name"]]
    document |= {"measured": mine, "within_cap": mine["device_bytes"] <= usable, "rivals": len(rivals)}
    if rivals:
        document["of_the_best"] = mine["tokens_per_second"] / max(mine["tokens_per_second"], *rivals)
    by_hand = {word: rows.get(f"{cell}/{word}", {"error": "not run"}) for word in BY_HAND}
    ratios = {
        w: mine["tokens_per_second"] / row["tokens_per_second"] for w, row in by_hand.items() if "error" not in row
    }
    return {**document, **({"over": ratios} if ratios else {})}


def _rivals_of(line: dict[str, Any], proposals: dict[str, Any], rows: dict[str, Any]) -> list[float]:
    """Tokens/s of settings measured within the cap: the cell's rivals, and proposals for smaller caps of the shape with
    the same training result."""
    shape, cap, _ = line["name"].split("/")
    usable = line["config"]["gpu"]["usable_bytes"]
    found = []
    for name, row in rows.items():
        of_shape, of_cap, which = name.split("/")
        smaller = proposals.get(name) if which == "proposal" and int(of_cap) < int(cap) else None
        same = smaller is not None and _learns(smaller) == _learns(line)
        if of_shape == shape and "error" not in row and row["device_bytes"] <= usable:
            found += [row["tokens_per_second"]] if same or (of_cap == cap and which.startswith("rival")) else []
    return found


def _learns(line: dict[str, Any]) -> tuple[Any, Any]:
    return line["config"]["model"]["torch_dtype_str"], line["config"]["training"]["optimizer"]


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "propose":
        propose(arguments[0], Path(arguments[1]), arguments[2:])
    else:
        summary(*map(Path, arguments))


if __name__ == "__main__":
    main()
