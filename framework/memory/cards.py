"""Facts of cards: the shipped ones in `conf/gpu`, cards known by size only, and conclusions from them. No torch.

This machine's card is queried from `nvidia-smi` in a subprocess, so that no CUDA context is created.

A card is a mapping with the fields of a preset's `gpu` section (`framework.schema.gpu.GPUParams`), so that it can be
composed with the rest of a recipe; functions that draw conclusions take the typed `GPUParams`.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from framework.installation import shipped
from framework.schema.choices import MixedPrecision
from framework.schema.gpu import GPUParams

GIB = 2**30
MIB = 2**20

SIZE_USABLE_SHARE = 0.9
"""Usable share assumed for a card known by size only. Every shipped card has more (the T4 has least with 0.909, with
error correction); a test checks that."""

SIZE_CAPABILITY = "8.6"
"""Capability assumed for a card known by size only: the oldest consumer generation with bfloat16."""

CONTEXT_BYTES = 804_061_184
"""Bytes of a CUDA context with the kernels of a training step for cards that do not state them: as measured on an H100
(`conf/gpu/h100_80gb.yaml` describes how). Most other cards need less."""

_LARGEST_OF_SIZE_CAPABILITY = "a6000_48gb"
_SIZE = re.compile(r"\s*(\d{1,4})\s*(?:gb|gib|g)\s*", re.IGNORECASE)
_ANY_SIZE = re.compile(r"\s*(\d{1,7}(?:\.\d+)?)\s*([gm]i?b?)?\s*", re.IGNORECASE)
_BAD_IF_SMALL = (
    "capacity_bytes",
    "usable_bytes",
    "bandwidth_bytes_per_second",
    "fp32_flops",
    "tf32_flops",
    "bf16_flops",
    "fp16_flops",
    "fp8_flops",
    "link_bytes_per_second",
    "host_link_bytes_per_second",
)
_BAD_IF_LARGE = ("multiprocessors", "context_bytes", "cublas_workspace_bytes", "l2_cache_bytes")


def card_names() -> list[str]:
    """The shipped cards, sorted by name."""
    return sorted(path.stem for path in (shipped("conf") / "gpu").glob("*.yaml"))


def read_card(name: str) -> dict[str, Any]:
    """The facts of a shipped card. Raises KeyError for a name that is not in `card_names()`."""
    if name not in card_names():
        raise KeyError(name)
    facts: dict[str, Any] = deepcopy(_file_of(name)["gpu"])
    return facts


def known_products() -> list[tuple[str, int, str]]:
    """For each shipped card its `nvidia-smi` product name without the brand, its total in MiB (public logs, 2023-2026),
    and its name here. The patterns match whole names, because laptop, Ti, D and PCIe variants are different cards."""
    found = ((name, _file_of(name).get("nvidia_smi")) for name in card_names())
    return [(shown["product"], shown["mebibytes"], name) for name, shown in found if shown]


@cache
def _file_of(name: str) -> dict[str, Any]:
    text = (shipped("conf") / "gpu" / f"{name}.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # an eighth of the time, of all cards 60 ms
    content: dict[str, Any] = loader(text).get_single_data()
    return content


def card_of_size(text: str) -> dict[str, Any] | None:
    """Conservative facts of a card known by size only (`24gb`, `80 GB`); None if `text` is not a size from 1 to 1024.

    Rates remain unknown, because a size does not determine speed; the plan then has no step time.
    """
    match = _SIZE.fullmatch(text)
    size = int(match[1]) if match else 0
    if not 1 <= size <= 1024:
        return None
    largest = read_card(_LARGEST_OF_SIZE_CAPABILITY)
    return {
        "name": f"{size}gb",
        "capacity_bytes": size * GIB,
        "usable_bytes": int(size * GIB * SIZE_USABLE_SHARE),
        "capability": SIZE_CAPABILITY,
        **{fact: largest[fact] for fact in _BAD_IF_LARGE},
        "sources": {
            "name": f"known by size only: planned as a card of capability {SIZE_CAPABILITY}",
            "capacity_bytes": "the size as written",
            "usable_bytes": f"assumed: {SIZE_USABLE_SHARE:.0%} of the size, less than every shipped card keeps",
            "context_bytes": largest["sources"]["context_bytes"],
            "others": f"assumed: as {largest['name']}, the largest shipped card of that capability",
        },
    }


def size_meant(text: str) -> str | None:
    """The size that a number with another unit or none (`40`, `12.5gib`, `24000mb`) probably means, in the form that
    `card_of_size` reads."""
    match = _ANY_SIZE.fullmatch(text)
    size = int(float(match[1]) / (1000 if (match[2] or "").lower().startswith("m") else 1)) if match else 0
    return f"{size}gb" if 1 <= size <= 1024 else None


def smallest(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The card to plan for a list of cards: the one with the least memory, with `count` set to the list's length.

    Shards are equal, so the smallest card is the limit. Every other fact is the worst of all cards: a step waits for
    the slowest card, and a kernel must exist on all. Raises ValueError for an empty list, or one with a device without
    memory of its own (`cpu`).
    """
    if not cards or any(card.get("usable_bytes") is None for card in cards):
        raise ValueError("a list of cards needs cards with memory of their own")
    chosen = min(cards, key=lambda card: int(card["usable_bytes"]))
    if all(card == chosen for card in cards):
        return {**chosen, "count": len(cards)}
    worst = {fact: min(values) for fact in _BAD_IF_SMALL if (values := _known_on_all(cards, fact))}
    worst |= {fact: max(values) for fact in _BAD_IF_LARGE if (values := _known_on_all(cards, fact))}
    if capabilities := _known_on_all(cards, "capability"):
        worst["capability"] = min(capabilities, key=capability_of)
    names = ", ".join(card["name"] for card in cards)
    limit = f"mixed list {names}: equal shares, so {chosen['name']} is the limit, and other facts are the worst of all"
    return {"name": chosen["name"], **worst, "count": len(cards), "sources": {**chosen["sources"], "count": limit}}


def _known_on_all(cards: Sequence[dict[str, Any]], fact: str) -> list[Any]:
    """The values of a fact on all cards; empty if one card lacks it, since the list then lacks it too."""
    values = [card.get(fact) for card in cards]
    return [] if None in values else values


def capability_of(text: str) -> tuple[int, int]:
    """`"8.9"` as a pair that compares numerically."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def source_of(card: GPUParams, fact: str) -> str | None:
    """Source of a field's value; the entry `others` applies to all fields without their own."""
    source = card.sources.get(fact, card.sources.get("others"))
    return None if source is None else str(source)


def supports_bf16(card: GPUParams) -> bool:
    """Whether the card supports bfloat16 natively: capability 8.0 or newer, or a stated rate."""
    return card.bf16_flops is not None or _is_at_least(card, (8, 0))


def best_autocast(card: GPUParams) -> MixedPrecision:
    """The autocast dtype for float32 weights: bf16, else fp16 (needs loss scaling), else none (`cpu`)."""
    if supports_bf16(card):
        return MixedPrecision.BF16
    return MixedPrecision.FP16 if card.fp16_flops is not None or _is_at_least(card, (7, 0)) else MixedPrecision.NONE


def _is_at_least(card: GPUParams, capability: tuple[int, int]) -> bool:
    return card.capability is not None and capability_of(card.capability) >= capability


def context_of(card: GPUParams) -> int:
    """Bytes of the driver's context on a card; the measured card's if it has memory but states none."""
    if card.context_bytes is None and card.usable_bytes is not None:
        return CONTEXT_BYTES
    return card.context_bytes or 0


USABLE = "usable memory"
_ASSUMED = {
    "usable_bytes": USABLE,
    "context_bytes": "driver context",
    "cublas_workspace_bytes": "cuBLAS workspace",
}
"""Facts used by a memory plan, with readable names."""


CALIBRATED_BY = "doctor --calibrate on"
"""Prefix of the source of a fact that was measured on this machine."""


def _measured_here(card: GPUParams) -> list[str]:
    """The facts of a plan that were measured on this machine."""
    facts = [name for name in type(card).model_fields if name not in ("name", "count", "sources")]
    measured = [
        name
        for name in facts
        if getattr(card, name) is not None and (source_of(card, name) or "").startswith(CALIBRATED_BY)
    ]
    if not measured:
        return []
    where = (source_of(card, measured[0]) or "").removeprefix(CALIBRATED_BY).split(":")[0].strip()
    return [f"measured by doctor --calibrate ({where}): {', '.join(measured)}"]


def assumptions(card: GPUParams) -> list[str]:
    """Assumptions of a plan about this card, as text."""
    if card.usable_bytes is None:
        return [f"{card.name}: no memory of its own is known, so nothing is compared with it"]
    lines = [f"{card.name}: {card.sources[fact]}" for fact in ("name", "count") if fact in card.sources]
    for fact, fact_name in _ASSUMED.items():
        value, source = getattr(card, fact), source_of(card, fact)
        if value is None and fact == "context_bytes":
            lines.append(f"{card.name}: {fact_name} is not stated, taken as an H100's, {CONTEXT_BYTES / MIB:,.0f} MiB")
        elif value is None:
            lines.append(f"{card.name}: {fact_name} is unknown and counted as nothing")
        elif source is None or re.search("assumed|not measured|no display", source):
            lines.append(f"{card.name}: {fact_name} {value / MIB:,.0f} MiB, {source or 'without a source'}")
    if card.capability is None:
        lines.append(f"{card.name}: no CUDA card; kernels are planned as on CUDA and were not measured on it")
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        lines.append(f"{card.name}: its speed is unknown, so no step time is given")
    return [*lines, *_measured_here(card)]


_FIELDS = "index,uuid,name,memory.total,compute_cap,mig.mode.current"
_TIMEOUT_SECONDS = 5.0

_LEAST_SHARE, _MOST_SHARE = 0.97, 1.08
"""Tolerance of a card's total memory. Older drivers show 1-2 % less. Enabled error correction takes 6 %, which must not
pass as the whole card; disabled on a card that has it by default it only leaves more than planned."""


@dataclass(frozen=True)
class InstalledCard:
    """One row of `nvidia-smi`."""

    index: str
    uuid: str
    product: str
    mebibytes: int
    capability: str
    is_partitioned: bool

    @property
    def name(self) -> str | None:
        """Value for `gpu=`: a shipped card's name, or the size of another card with bfloat16."""
        if self.is_partitioned:  # a process sees one slice of it, whose size this query does not show
            return None
        product = re.sub(r"^(NVIDIA )?((Tesla|GeForce) )?", "", self.product)
        for pattern, mebibytes, name in known_products():
            if re.fullmatch(pattern, product) and _LEAST_SHARE <= self.mebibytes / mebibytes <= _MOST_SHARE:
                return name
        has_bf16 = re.fullmatch(r"\d+\.\d+", self.capability) and capability_of(self.capability) >= (8, 0)
        return f"{round(self.mebibytes / 1024)}gb" if has_bf16 else None


def detect() -> str | None:
    """The installed card as a value for `gpu=`: a shipped name, or a size such as `10gb` for an unknown card.

    With several cards it is the smallest, because shards are equal. None: no driver, no visible card, a partitioned
    (MIG) card, or an unknown one too old for bfloat16.
    """
    return min(visible, key=lambda card: card.mebibytes).name if (visible := installed_cards()) else None


def installed_cards() -> list[InstalledCard]:
    """The cards visible to this process; none without a driver."""
    return visible_cards(parse_nvidia_smi(_run_nvidia_smi()), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _run_nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver, or one that hangs
        return ""
    return finished.stdout


def parse_nvidia_smi(text: str) -> list[InstalledCard]:
    """Parse the rows of `nvidia-smi --query-gpu`; other lines (warnings) are skipped."""
    cards = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == _FIELDS.count(",") + 1 and cells[3].isdigit():
            index, uuid, product, mebibytes, capability, partitioning = cells
            cards.append(InstalledCard(index, uuid, product, int(mebibytes), capability, partitioning == "Enabled"))
    return cards


def visible_cards(cards: list[InstalledCard], setting: str | None) -> list[InstalledCard]:
    """The cards visible under a value of CUDA_VISIBLE_DEVICES (None: unset, all).

    As in CUDA, parsing stops at the first entry that names no card. Indices are in `nvidia-smi`'s order.
    """
    if setting is None:
        return cards
    visible: list[InstalledCard] = []
    for entry in (entry.strip() for entry in setting.split(",")):
        named = [card for card in cards if entry == card.index or (len(entry) > 4 and card.uuid.startswith(entry))]
        if len(named) != 1:
            break
        visible += named
    return visible
