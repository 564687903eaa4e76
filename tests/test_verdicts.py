"""The committed table of recipes and cards (docs/verdicts.md) compared with verdicts computed now."""

import json
import random
from collections import Counter

import pytest

from benchmarks.verdicts import (
    NOT_HERE,
    PAGE,
    RESULTS,
    ROWS,
    classes,
    classes_cards,
    facts,
    page,
    plans_on,
    sized,
    strategy,
    text_of,
    verdicts,
)
from framework.compose.shipped import recipes
from framework.memory.cards import card_names
from framework.run.rehearsal.rehearse import rehearse

KNOWN = json.loads(RESULTS.read_text(encoding="utf-8"))
VERDICTS = KNOWN["verdicts"]
NEAR, NEAR_IN_SPEED = 0.01, 0.02
"""Shares by which a verdict may move: other versions of torch and transformers plan a bit differently."""
SMALLEST = [name for name in VERDICTS if name.startswith("qwen3_0.6b")]
SMALL = [*SMALLEST, *(name for name in VERDICTS if name.startswith(("gemma3_1b", "qwen3_1.7b")))]

AWAY = ("qwen3_8b_full", "h200_141gb")
"""A verdict whose states wait in host memory, which is timed by rules of its own."""


def sample(names, cards, size, seed):
    pairs = [(name, card) for name in sorted(names) for card in sorted(cards)]
    return random.Random(seed).sample(pairs, size)


def quick_and_slow(quick, slow):
    return [*quick, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in slow)]


def probes():
    """For each recipe and class of kernels, the plan behind most verdicts of the class. CI computes one class of one of
    the smallest recipes, at random: all take four minutes of a core, and more of a busy one."""
    lot = random.Random(10)
    for recipe, rows in VERDICTS.items():
        quick = lot.choice(list(classes()))
        for rehearsed, cards in classes().items():
            plans = Counter((rows[card]["strategy"], rows[card]["micro_batch"]) for card in cards)
            marks = () if rehearsed == quick and recipe == SMALLEST[0] else pytest.mark.slow
            name, micro = plans.most_common(1)[0][0]
            yield pytest.param(recipe, rehearsed, name, micro, marks=marks, id=f"{recipe}-{rehearsed}")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rehearsed", "name", "micro"), list(probes()))
def test_one_rehearsal_gives_the_verdicts_of_the_cards_of_its_class(recipe, rehearsed, name, micro):
    rows = {card: VERDICTS[recipe][card] for card in classes()[rehearsed]}
    cards = [card for card, row in rows.items() if (row["strategy"], row["micro_batch"]) == (name, micro)]
    for card, plan in plans_on(sized(strategy(recipe, name, rehearsed), micro), cards).items():
        agrees(plan, rows[card], card)


def agrees(plan, verdict, card):
    assert plan.peak.device_bytes_upper == pytest.approx(verdict["device_bytes_upper"], rel=NEAR), card
    margin = abs(verdict["device_bytes_upper"] / facts(card).usable_bytes - 1)
    assert (plan.peak.device_bytes_upper <= facts(card).usable_bytes) == verdict["fits"] or margin < NEAR
    assert plan.step is not None
    assert plan.step.tokens_per_second == pytest.approx(verdict["tokens_per_second"], rel=NEAR_IN_SPEED), card


def test_every_row_has_a_verdict_for_every_card_and_every_recipe_a_row_or_a_reason():
    assert set(VERDICTS) == set(ROWS)
    assert {recipe for recipe, *_ in ROWS.values()} | set(NOT_HERE) == set(recipes())
    assert set(classes_cards()) == set(card_names()) - {"cpu"}
    assert all(set(rows) == set(classes_cards()) for rows in VERDICTS.values())


def test_the_page_and_the_file_are_what_the_results_give():
    assert PAGE.read_text(encoding="utf-8") == page(KNOWN), "run: python benchmarks/verdicts.py --page"
    assert RESULTS.read_text(encoding="utf-8") == text_of(KNOWN)


def test_a_verdict_fits_when_its_bytes_do():
    for rows in VERDICTS.values():
        for card, row in rows.items():
            assert row["fits"] == (row["device_bytes_upper"] <= facts(card).usable_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "card"),
    quick_and_slow([AWAY], [*sample(SMALLEST, classes_cards(), 1, 5), *sample(VERDICTS, classes_cards(), 12, 6)]),
)
def test_a_plan_with_the_cards_own_facts_says_the_same(recipe, card):
    stored = VERDICTS[recipe][card]
    agrees(rehearse(sized(strategy(recipe, stored["strategy"], card), stored["micro_batch"])), stored, card)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "card"),
    [
        *sample(SMALLEST, classes()["t4_16gb"], 1, 7),
        *sample(SMALL, classes_cards(), 2, 8),
        *sample(VERDICTS, classes_cards(), 2, 9),
    ],
)
def test_a_verdict_from_nothing_is_the_same(recipe, card):
    """Not by its strategy: two that are about as fast may change places with the versions."""
    (rehearsed,) = [name for name, cards in classes().items() if card in cards]
    found, stored = verdicts(recipe, [card], rehearsed)[card], VERDICTS[recipe][card]
    assert found["fits"] == stored["fits"]
    if stored["fits"]:
        assert found["tokens_per_second"] == pytest.approx(stored["tokens_per_second"], rel=NEAR_IN_SPEED)
    else:
        assert found["device_bytes_upper"] == pytest.approx(stored["device_bytes_upper"], rel=NEAR)
