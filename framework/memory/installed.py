"""Which card this machine has, asked of `nvidia-smi` in a process of its own, so that no CUDA context is made."""

import os
import re
import subprocess
from dataclasses import dataclass

from framework.memory.cards import capability_of, known_products

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
