"""The band of uncertainty of a plan."""

import pytest

from framework.memory.bands import UNCERTAINTY, Band
from framework.memory.cards import read_card
from framework.memory.planning import choose_band
from framework.schema.config import TrainingConfig

ADAPTED = {"use_peft": True}


@pytest.mark.parametrize(
    ("card", "training", "peft", "operator", "band"),
    [
        ("h100_80gb", {}, {}, "addmm", Band.PLAIN),
        ("h200_141gb", {}, {}, "addmm", Band.PLAIN),
        ("h100_80gb", {}, {}, "_safe_softmax", Band.MATHEMATICAL),
        ("a100_80gb", {}, {}, "_safe_softmax", Band.UNMEASURED),
        ("h100_80gb", ADAPTED, {"q_lora": True, "q_lora_bits": 4}, "addmm", Band.PLAIN),
        ("h100_80gb", ADAPTED, {"q_lora": True, "q_lora_bits": 8}, "addmm", Band.INT8_BASE),
        ("h100_80gb", {}, {"q_lora": True, "q_lora_bits": 8}, "addmm", Band.PLAIN),
        ("h100_80gb", {"optimizer": "paged_adamw_8bit"}, {}, "addmm", Band.LOW_BIT_OPTIMIZER),
        ("h100_80gb", {"compile": True}, {}, "addmm", Band.COMPILED),
        ("h200_141gb", {}, {}, "convolution", Band.CONVOLUTION),
        ("a100_80gb", {"compile": True}, {}, "convolution", Band.CONVOLUTION),
    ],
)
def test_band(card: str, training: dict, peft: dict, operator: str, band: Band) -> None:
    config = TrainingConfig.model_validate({"training": training, "peft": peft, "gpu": read_card(card)})
    assert choose_band(config, {operator}) is band


def test_every_band_covers_the_worst_row_that_it_names() -> None:
    """LLM.int8 over the 8B of benchmarks/results/levers_h200.json: what was taken is under the upper end."""
    upper = UNCERTAINTY[Band.INT8_BASE].upper(34_466_000_000, 36_190_552_064, 804_061_184)
    assert upper > 39_349_714_944


@pytest.mark.parametrize(
    ("band", "allocated", "reserved", "taken"),
    [
        pytest.param(Band.CONVOLUTION, 275_574_784, 354_418_688, 1_217_200_128, id="textcnn"),
        pytest.param(Band.CONVOLUTION, 774_639_616, 847_249_408, 1_743_585_280, id="tcn"),
        pytest.param(Band.COMPILED, 561_991_168, 689_963_008, 1_569_521_664, id="gpt2"),
        pytest.param(Band.COMPILED, 2_356_427_264, 2_531_262_464, 3_568_107_520, id="gemma"),
    ],
)
def test_a_band_covers_what_was_taken(band: Band, allocated: int, reserved: int, taken: int) -> None:
    """benchmarks/results/tasks_h200.json: cuDNN's workspace is not in the plan. drawn_third_h200.json: qlora-05 with a
    filled cache of the compiler, and full-06."""
    assert UNCERTAINTY[band].upper(allocated, reserved, 804_061_184) > taken
