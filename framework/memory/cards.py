"""Facts of cards: those that ship in `conf/gpu`, those of a plain size, and what follows from them. No torch.

Which card this machine has is asked of `nvidia-smi` in a process of its own, so that no CUDA context is made.

A card is here the mapping of a preset's `gpu` section (fields of `framework.schema.gpu.GPUParams`), so that it can be
composed with the rest of a recipe; the functions that draw conclusions take the typed `GPUParams`.
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
"""Share of its nominal size that a card known by size alone is planned with. Every shipped card keeps more (the least
is the T4 with 0.909, error correction included); a test holds them to it."""

SIZE_CAPABILITY = "8.6"
"""What a card known by size alone is taken for: the oldest consumer generation with bfloat16."""

CONTEXT_BYTES = 804_061_184
"""A CUDA context with the kernels of a training step, where a card does not state its own: as measured on an H100
(`conf/gpu/h100_80gb.yaml` says how). Most other cards take less."""

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
_BAD_IF_LARGE = ("multiprocessors", "context_bytes", "cublas_workspace_bytes")


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
    """Of each shipped card the product name that `nvidia-smi` gives it, less the brand, its total in MiB (public logs,
    2023-2026), and our name. Names are patterns of whole names, so that laptop, Ti, D and PCIe variants, which are
    other cards, are not taken for these."""
    found = ((name, _file_of(name).get("nvidia_smi")) for name in card_names())
    return [(shown["product"], shown["mebibytes"], name) for name, shown in found if shown]


@cache
def _file_of(name: str) -> dict[str, Any]:
    text = (shipped("conf") / "gpu" / f"{name}.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def card_of_size(text: str) -> dict[str, Any] | None:
    """Conservative facts of a card known by its size alone (`24gb`, `80 GB`); None if `text` is no size from 1 to 1024.

    Rates stay unknown, because a size says nothing about speed; the plan then gives no step time.
    """
    match = _SIZE.fullmatch(text)
    size = int(match[1]) if match else 0
    if not 1 <= size <= 1024:
        return None
    largest = read_card(_LARGEST_OF_SIZE_CAPABILITY)
    copied = ("multiprocessors", "context_bytes", "cublas_workspace_bytes")
    return {
        "name": f"{size}gb",
        "capacity_bytes": size * GIB,
        "usable_bytes": int(size * GIB * SIZE_USABLE_SHARE),
        "capability": SIZE_CAPABILITY,
        **{fact: largest[fact] for fact in copied},
        "sources": {
            "name": f"known by size alone: planned as a card of capability {SIZE_CAPABILITY}",
            "capacity_bytes": "the size as written",
            "usable_bytes": f"assumed: {SIZE_USABLE_SHARE:.0%} of the size, less than every shipped card keeps",
            "context_bytes": largest["sources"]["context_bytes"],
            "others": f"assumed: as {largest['name']}, the largest shipped card of that capability",
        },
    }


def size_meant(text: str) -> str | None:
    """The size near a number with another unit or none (`40`, `12.5gib`, `24000mb`), as `card_of_size` reads it."""
    match = _ANY_SIZE.fullmatch(text)
    size = int(float(match[1]) / (1000 if (match[2] or "").lower().startswith("m") else 1)) if match else 0
    return f"{size}gb" if 1 <= size <= 1024 else None


def smallest(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The card to plan a list of cards for: the one with the least memory, with `count` the length of the list.

    Shards are equal, so the smallest card is the limit. Where the cards differ, every other fact is as bad as on the
    worst of them: a step waits for the slowest card, and a kernel must exist on all. Raises ValueError for an empty
    list, or one that holds a card without memory of its own (`cpu`).
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
    """The values of a fact, or nothing when one card lacks it: what one card cannot do, the list cannot do."""
    values = [card.get(fact) for card in cards]
    return [] if None in values else values


def capability_of(text: str) -> tuple[int, int]:
    """`"8.9"` as a pair that compares as numbers do."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def source_of(card: GPUParams, fact: str) -> str | None:
    """Where a field's value comes from; the entry `others` speaks for all fields that have none of their own."""
    source = card.sources.get(fact, card.sources.get("others"))
    return None if source is None else str(source)


def supports_bf16(card: GPUParams) -> bool:
    """Whether the card computes in bfloat16 natively: capability 8.0 or newer, or a stated rate."""
    return card.bf16_flops is not None or _is_at_least(card, (8, 0))


def best_autocast(card: GPUParams) -> MixedPrecision:
    """The dtype to compute in next to float32 weights: bf16, else fp16 (needs loss scaling), else none (`cpu`)."""
    if supports_bf16(card):
        return MixedPrecision.BF16
    return MixedPrecision.FP16 if card.fp16_flops is not None or _is_at_least(card, (7, 0)) else MixedPrecision.NONE


def _is_at_least(card: GPUParams, capability: tuple[int, int]) -> bool:
    return card.capability is not None and capability_of(card.capability) >= capability


def context_of(card: GPUParams) -> int:
    """Bytes of the driver's context on a card; of one with memory that states none, a measured card's."""
    if card.context_bytes is None and card.usable_bytes is not None:
        return CONTEXT_BYTES
    return card.context_bytes or 0


USABLE = "usable memory"
_ASSUMED = {
    "usable_bytes": USABLE,
    "context_bytes": "driver context",
    "cublas_workspace_bytes": "cuBLAS workspace",
}
"""Facts that a plan of memory rests on, as a reader knows them."""


CALIBRATED_BY = "doctor --calibrate on"
"""Begins the source of a fact that was measured on the machine at hand."""


def _measured_here(card: GPUParams) -> list[str]:
    """Which numbers of a plan come from a measurement of this machine."""
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
    """What a plan for this card takes for granted, in words for its reader."""
    if card.usable_bytes is None:
        return [f"{card.name}: no memory of its own is known, so nothing is compared with it"]
    said = [f"{card.name}: {card.sources[fact]}" for fact in ("name", "count") if fact in card.sources]
    for fact, words in _ASSUMED.items():
        value, source = getattr(card, fact), source_of(card, fact)
        if value is None and fact == "context_bytes":
            said.append(f"{card.name}: {words} is not stated, taken as an H100's, {CONTEXT_BYTES / MIB:,.0f} MiB")
        elif value is None:
            said.append(f"{card.name}: {words} is unknown and counted as nothing")
        elif source is None or re.search("assumed|not measured|no display", source):
            said.append(f"{card.name}: {words} {value / MIB:,.0f} MiB, {source or 'without a source'}")
    if card.capability is None:
        said.append(f"{card.name}: no CUDA card; kernels are planned as on CUDA and were not measured on it")
    if card.bandwidth_bytes_per_second is None or card.fp32_flops is None:
        said.append(f"{card.name}: its speed is unknown, so no step time is given")
    return [*said, *_measured_here(card)]


_FIELDS = "index,uuid,name,memory.total,compute_cap,mig.mode.current"
_TIMEOUT_SECONDS = 5.0

_LEAST_SHARE, _MOST_SHARE = 0.97, 1.08
"""How far a total may lie from the card's own. Older drivers show 1-2 % less. Switching error correction on takes 6 %,
and must not pass for the whole card; off on a card that has it on by default only leaves more than planned."""


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
        """What `gpu=` would be written as: a shipped card's name, or the size of another card with bfloat16."""
        if self.is_partitioned:  # a process sees one slice of it, of a size that this query does not tell
            return None
        product = re.sub(r"^(NVIDIA )?((Tesla|GeForce) )?", "", self.product)
        for pattern, mebibytes, name in known_products():
            if re.fullmatch(pattern, product) and _LEAST_SHARE <= self.mebibytes / mebibytes <= _MOST_SHARE:
                return name
        has_bf16 = re.fullmatch(r"\d+\.\d+", self.capability) and capability_of(self.capability) >= (8, 0)
        return f"{round(self.mebibytes / 1024)}gb" if has_bf16 else None


def detect() -> str | None:
    """The installed card as `gpu=` takes it: one of our names, or a size such as `10gb` for a card we have no facts of.

    Of several cards it is the smallest, because shards are equal. None: no driver, no visible card, a partitioned
    (MIG) card, or one too old for bfloat16 that we have no facts of.
    """
    return min(visible, key=lambda card: card.mebibytes).name if (visible := installed_cards()) else None


def installed_cards() -> list[InstalledCard]:
    """The cards that CUDA will show to this process; none without a driver."""
    return visible_cards(parse_nvidia_smi(_run_nvidia_smi()), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _run_nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver, or one that hangs: there is no card to plan for
        return ""
    return finished.stdout


def parse_nvidia_smi(text: str) -> list[InstalledCard]:
    """The rows of `nvidia-smi --query-gpu`; lines that are no such row (warnings) are passed over."""
    cards = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == _FIELDS.count(",") + 1 and cells[3].isdigit():
            index, uuid, product, mebibytes, capability, partitioning = cells
            cards.append(InstalledCard(index, uuid, product, int(mebibytes), capability, partitioning == "Enabled"))
    return cards


def visible_cards(cards: list[InstalledCard], setting: str | None) -> list[InstalledCard]:
    """The cards that CUDA will show under a value of CUDA_VISIBLE_DEVICES (None: unset, all).

    As CUDA does, it stops at the first entry that names no card. Indices are taken in `nvidia-smi`'s order.
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
