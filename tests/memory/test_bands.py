"""Which band of uncertainty a plan has."""

import pytest

from framework.memory.cards import read_card
from framework.memory.ledger import UNCERTAINTY, Band
from framework.memory.planning import choose_band
from framework.schema.config import TrainingConfig

ADAPTED = {"use_peft": True}


@pytest.mark.parametrize(
    ("card", "training", "peft", "mathematical", "band"),
    [
        ("h100_80gb", {}, {}, False, Band.PLAIN),
        ("h200_141gb", {}, {}, False, Band.PLAIN),
        ("h100_80gb", {}, {}, True, Band.MATHEMATICAL),
        ("a100_80gb", {}, {}, True, Band.UNMEASURED),
        ("h100_80gb", ADAPTED, {"q_lora": True, "q_lora_bits": 4}, False, Band.PLAIN),
        ("h100_80gb", ADAPTED, {"q_lora": True, "q_lora_bits": 8}, False, Band.INT8_BASE),
        ("h100_80gb", {}, {"q_lora": True, "q_lora_bits": 8}, False, Band.PLAIN),
        ("h100_80gb", {"optimizer": "paged_adamw_8bit"}, {}, False, Band.LOW_BIT_OPTIMIZER),
        ("h100_80gb", {"compile": True}, {}, False, Band.COMPILED),
    ],
)
def test_band(card: str, training: dict, peft: dict, mathematical: bool, band: Band) -> None:
    config = TrainingConfig.model_validate({"training": training, "peft": peft, "gpu": read_card(card)})
    assert choose_band(config, mathematical) is band


def test_every_band_covers_the_worst_row_that_it_names() -> None:
    """LLM.int8 over the 8B of benchmarks/results/levers_h200.json: what was taken is under the upper end."""
    upper = UNCERTAINTY[Band.INT8_BASE].upper(34_466_000_000, 36_190_552_064, 804_061_184)
    assert upper > 39_349_714_944
