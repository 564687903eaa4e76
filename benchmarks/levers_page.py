"""Writer of docs/levers.md, from the levers table and its measurements (results/levers_h200.json, if present).

python benchmarks/levers_page.py
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.memory.levers import LEVERS, Lever, Setting, format_value

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "levers.md", ROOT / "benchmarks" / "results" / "levers_h200.json"
GIB = 2**30


@dataclass(frozen=True)
class Claim:
    """Claims of the source notes in numbers or as a rule, the finding, and the measured rows that show it."""

    said: str
    seed: str
    found: str
    rows: tuple[str, ...] = ()


CLAIMS = (
    Claim(
        "Checkpointing costs 20-25 % of throughput",
        "001",
        "Corrected: 16-18 % in full fine-tuning of the 1B, 30-42 % with LoRA of the 8B: a cheaper backward with "
        "the same forward (docs/evidence/speed.md, and the rows).",
        ("m1/enable_gradient_checkpointing=true", "m2/enable_gradient_checkpointing=true"),
    ),
    Claim("Checkpointing does little noticeable harm to speed", "000", "Refuted by the same rows."),
    Claim(
        "Checkpointing lets the batch double or quadruple",
        "001",
        "Only once the logits are gone too: with a full-size loss they are the peak, not activations (docs/evidence/"
        "speed.md).",
        ("m1/chunked_loss=1024",),
    ),
    Claim(
        "Adam and its kind keep 8 bytes a parameter, almost half of weights, gradients and states",
        "001",
        "Confirmed for float32 weights (8 of 16); of bfloat16 weights it is 4 of 8: docs/optimizers.md.",
    ),
    Claim("Adafactor needs 4 bytes", "001", "Refuted: 0.003 for the 1B.", ("m1/optimizer=adafactor",)),
    Claim("Lion needs 4 bytes", "001", "Confirmed for float32 weights; 2 for bfloat16 ones.", ("m1/optimizer=lion",)),
    Claim(
        "AnyPrecisionAdamW: 8 bytes in all instead of 18",
        "001",
        "Confirmed with stochastic rounding; 10 with Kahan summation; 18 is 16 and the copy of autocast.",
        ("m1/optimizer=anyprecision_adamw", "m1/rounding=kahan"),
    ),
    Claim(
        "8-bit Adam needs 2 bytes instead of 8",
        "001",
        "Nearly: 2.03 with its scales. Against bfloat16 states (4) it halves them, and costs time.",
        ("m1/optimizer=adamw_8bit",),
    ),
    Claim(
        "AdamW doubles the optimizer's memory against SGD",
        "003",
        "Corrected: two states against none (one with momentum).",
        ("m1/optimizer=sgd",),
    ),
    Claim(
        "True half precision halves memory against 32-bit",
        "003",
        "Nearly: weights, gradients and states halve; float32 logits of the loss do not.",
        ("m1/base",),
    ),
    Claim(
        "Mixed precision halves the memory of tensors",
        "002",
        "Refuted for weights, which gain a copy of 2 bytes; activations of matrix products halve. Seed 003 is right: "
        "it saves little.",
        ("m1/mixed_precision_dtype=bf16",),
    ),
    Claim(
        "A micro-batch of 2-4 greatly reduces memory",
        "000, 003, 004",
        "Confirmed for activations and logits, which are in proportion; weights and states do not move.",
        ("m1/per_device_train_batch_size=4", "m1/per_device_train_batch_size=1"),
    ),
    Claim(
        "Accumulation simulates larger batches with a small footprint",
        "000, 002",
        "Confirmed.",
        ("m1/gradient_accumulation_steps=4",),
    ),
    Claim(
        "A shorter maximum length is a large improvement",
        "000, 004",
        "Confirmed, in proportion.",
        ("m1/model_max_length=1024",),
    ),
    Claim(
        "Fused optimizers save memory",
        "004",
        "Confirmed against `adamw_torch`, whose temporaries are as large as the trained weights: they show where the "
        "optimizer step is the peak.",
        ("m1/optimizer=adamw_torch",),
    ),
    Claim(
        "Emptying the cache every 50 steps saves memory",
        "004",
        "Refuted: the allocated peak is the same.",
        ("m1/empty_device_cache_steps=1", "m1/empty_device_cache_steps=10"),
    ),
    Claim(
        "Paged Adam saves memory",
        "004",
        "Corrected: it moves states out of torch's counters; the card holds them until it is full.",
        ("m1/optimizer=paged_adamw_32bit", "m1/optimizer=paged_adamw_8bit"),
    ),
    Claim(
        "sdpa or flash attention saves memory", "004", "Confirmed against `eager`.", ("m1/attn_implementation=sdpa",)
    ),
    Claim("Compilation saves memory", "004", "Confirmed, and it is faster.", ("m1/compile=true", "m2/compile=true")),
    Claim(
        "Liger kernels save memory",
        "004",
        "Confirmed, and faster, here without its loss: `model.chunked_loss` is the loss without logits.",
        ("m1/enable_liger_kernel=true", "m2/enable_liger_kernel=true"),
    ),
    Claim(
        "Freezing layers saves memory",
        "004",
        "Confirmed: gradients, states, and activations below the lowest trained layer.",
        ("m1/freeze_layers=embed_tokens+layers.0",),
    ),
    Claim(
        "LoRA drastically reduces memory",
        "002",
        "Confirmed for gradients and states; activations do not shrink.",
    ),
    Claim(
        "Offloading states to the host or NVMe saves GPU memory",
        "002",
        "Confirmed; the price is two copies of them over the link every step.",
        ("m1/optimizer_offload=host", "m1/optimizer_offload=nvme"),
    ),
)


def page() -> str:
    """The whole page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    by_row = _by_row(results)
    parts = [
        *_head(results),
        *(line for lever in LEVERS for line in _section(lever, by_row)),
        *_claims(by_row, results),
    ]
    return "\n".join(parts) + "\n"


def _by_row(results: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Measurements by the row's name: every row's figures, and comparisons by key and value."""
    if results is None:
        return {}
    return {row["row"]: row for row in results["figures"]} | {
        f"{item['row'].partition('/')[0]} {item['key']}={item['value']}": item for item in results["settings"]
    }


def _head(results: Mapping[str, Any] | None) -> Iterator[str]:
    yield "# Memory levers\n"
    yield "Written by `python benchmarks/levers_page.py` from `framework/memory/levers/`; a test keeps it so."
    yield "`tunesmith levers KEY` prints a row. Settings go from free to dear and are compared with the first.\n"
    if results is None:
        yield "This version is not measured yet (`benchmarks/levers.py`); times below say where they are from.\n"
        return
    error = results["allocated_error_per_cent"]
    yield (
        f"**Measured** on one {results['machine']}, torch {results['packages'].get('torch')}, {results['date'][:10]}: "
        f"{results['rows']} rows over two shapes, full fine-tuning of a 1B in pure bfloat16 (m1: 4 x 2048 tokens) and "
        f"LoRA of an 8B (m2: 1 x 2048). The plan, made before but for `notes` there, was off by {error['median']} % of "
        f"the allocated peak in the median and {error['max']} % at most. Every figure: "
        "`benchmarks/results/levers_h200.json`.\n"
    )


def _section(lever: Lever, by_row: Mapping[str, Any]) -> Iterator[str]:
    yield f"## `{lever.key}`\n"
    yield f"{lever.line} Shrinks: {', '.join(lever.shrinks) or 'nothing by itself'}. Read back: {lever.reader}.\n"
    yield "| setting | needs | training | time | measured |\n| --- | --- | --- | --- | --- |"
    for setting in lever.settings:
        plain = setting is lever.settings[0]
        changes = "-" if plain else setting.changes or "exact"
        cells = (f"`{format_value(setting.value)}`", _needs(setting), changes, setting.time or "-")
        yield f"| {' | '.join(cells)} | {_measured(lever, setting, by_row)} |"
    yield ""


def _needs(setting: Setting) -> str:
    required = [f"`{key}={format_value(value)}`" for key, value in setting.requires.items()]
    return ", ".join([*(part for part in (setting.hardware, setting.package) if part), *required]) or "-"


def _measured(lever: Lever, setting: Setting, by_row: Mapping[str, Any]) -> str:
    value = (
        "+".join(map(format_value, setting.value))
        if setting.value and isinstance(setting.value, tuple)
        else format_value("none" if setting.value is None else setting.value)
    )
    found = []
    for shape in ("m1", "m2"):
        item = by_row.get(f"{shape} {lever.key}={value}")
        if item is not None and "against_first" in item:
            found.append(f"{shape}: {_difference(item['against_first'])}")
    return "; ".join(found) or "-"


def _difference(figures: Mapping[str, Any]) -> str:
    saved = figures["saved_bytes"] / GIB
    faster = figures["tokens_per_second_per_cent"]
    return f"{-saved:+.2f} GiB ({-figures['saved_per_cent']:+.0f} %), {faster:+.1f} % tokens/s"


def _is_named_for_its_row(item: Mapping[str, Any]) -> bool:
    """A row may measure settings of several keys; a claim refers to the one that the row is named after."""
    return bool(item["row"].partition("/")[2] == f"{item['key'].rpartition('.')[2]}={item['value']}")


def _claims(by_row: Mapping[str, Any], results: Mapping[str, Any] | None) -> Iterator[str]:
    yield "## What the sources of this project claim\n"
    yield "| claim | source | found | measured here |\n| --- | --- | --- | --- |"
    items = [item for key, item in by_row.items() if " " in key]
    compared = {item["row"]: item for item in sorted(items, key=_is_named_for_its_row)}
    for claim in CLAIMS:
        shown = [
            f"{name}: {_difference(compared[name].get('against_first') or compared[name]['against_shape'])}"
            for name in claim.rows
            if name in compared and ("against_first" in compared[name] or "against_shape" in compared[name])
        ]
        yield f"| {claim.said} | {claim.seed} | {claim.found} | {'; '.join(shown) or '-'} |"
    if results is not None:
        yield "\n## Not measured\n"
        yield from (f"- `{name}`: {' '.join(reason.split())}" for name, reason in results["not_measured"].items())


if __name__ == "__main__":
    PAGE.write_text(page())
