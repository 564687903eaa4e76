"""Two plans side by side."""

from dataclasses import replace

from framework.reports.comparison import by_effect, comparison_document, comparison_lines, remainder
from framework.run.planning.what_if import Cause, Comparison
from tests.reports.plans import GIB, PLAN, gib, use

SMALL = replace(PLAN, peak=use("optimizer_step", 9, gib(weights=2, optimizer=4, temporaries=2, overhead=0.5)))
MIDDLE = replace(PLAN, peak=use("loss", 15, gib(weights=2, optimizer=4, activations=7.5, overhead=0.5)))
LARGER = replace(PLAN, peak=use("backward", 25, gib(weights=2, optimizer=4, activations=15.5, overhead=0.5)))
COMPARISON = Comparison(
    PLAN,
    SMALL,
    (
        Cause(("training.optimizer",), LARGER),
        Cause(("model.torch_dtype_str", "training.mixed_precision_dtype"), MIDDLE),
        Cause(("model.chunked_loss",), None, "it cannot be"),
    ),
    ("peft.lora_r",),
)


def text(comparison: Comparison = COMPARISON) -> str:
    return "".join(f"{line.plain}\n" for line in comparison_lines(comparison))


def test_terms_and_causes() -> None:
    rows = [" ".join(line.split()) for line in text().splitlines()]
    assert "weights 2.00 GiB 2.00 GiB 0" in rows
    assert "activations 8.00 GiB 0 bytes -8.00 GiB" in rows
    assert "together 20.00 GiB 8.50 GiB -11.50 GiB" in rows
    assert "upper end 21.00 GiB 9.00 GiB -12.00 GiB" in rows
    assert "in backward optimizer step" in rows
    assert "training.optimizer +2.00 GiB +4.00 GiB backward" in rows
    assert "model.torch_dtype_str, training.mixed_precision_dtype -6.00 GiB -6.00 GiB loss" in rows
    assert "model.chunked_loss: not possible by themselves, it cannot be" in text()
    assert "not planned separately: peft.lora_r" in text()
    assert not [row for row in rows if row.startswith("communication")], "terms that neither has are left out"


def test_the_remainder_is_what_no_change_does_alone() -> None:
    assert remainder(COMPARISON) == -7.5 * GIB
    assert "-7.50 GiB more comes from" in text()
    one = Comparison(PLAN, SMALL, (Cause(("training.optimizer",), SMALL),), ())
    assert remainder(one) == 0
    assert "more comes from" not in text(one)
    assert "alone" not in text(Comparison(PLAN, PLAN, (), ()))


def test_the_largest_effect_comes_first_and_the_impossible_last() -> None:
    order = ["model.torch_dtype_str", "training.optimizer", "model.chunked_loss"]
    assert [cause.keys[0] for cause in by_effect(COMPARISON)] == order


def test_the_document() -> None:
    document = comparison_document(COMPARISON)
    assert document["device_bytes"] == {"a": 20 * GIB, "b": 8.5 * GIB, "difference": -11.5 * GIB}
    assert document["terms"]["activations"] == {"a": 8 * GIB, "b": 0, "difference": -8 * GIB}
    assert sum(term["difference"] for term in document["terms"].values()) == document["device_bytes"]["difference"]
    assert document["causes"][1] == {
        "keys": ["training.optimizer"],
        "device_bytes": 2 * GIB,
        "device_bytes_upper": 4 * GIB,
        "refusal": None,
    }
    assert document["causes"][2]["refusal"] == "it cannot be"
    assert document["not_planned_alone"] == ["peft.lora_r"]
    assert document["a"] == PLAN.to_json()
