"""Figures that follow from those of other structures, against plans of their own."""

import pytest

from framework.compose import load
from framework.memory.requirements import with_values
from framework.memory.search.estimate import Estimate, Figures
from framework.memory.search.fastest import Candidate, Search, Space
from framework.memory.search.free_keys import freedom, opened
from framework.memory.search.space import (
    CHECKPOINTS,
    CHUNKS,
    EVERY,
    EXACT,
    EXPANDABLE,
    OFF_THE_CARD,
    STATES,
    Table,
    micro_batches,
    mixed,
    mixes,
    structures,
)
from framework.run.rehearsal.rehearse import rehearse
from framework.schema.config import TrainingConfig
from tests.memory.search.card import Arithmetic
from tests.memory.search.test_fastest import FREE, config_on
from tests.tiny import LLAMA, tiny_config

H100 = {"name": "h100_80gb", "capability": "9.0", "bandwidth_bytes_per_second": 3.35e12, "fp32_flops": 67e12}


def space_of(config: TrainingConfig, free: set[str] = FREE, table: Table = EXACT) -> Space:
    return Space(structures(config, free, table, runs_here=False), [1, 8], 64, 1 << 62, free)


def test_every_mix_is_what_a_plan_of_its_own_says() -> None:
    """By the arithmetic card, whose bytes and seconds are linear: to the rounding, where n divides the layers."""
    space = space_of(config_on(1 << 40, layers=24), FREE | {STATES}, OFF_THE_CARD)
    assert any(item.uses_host for item in space.structures)
    search = Search(space, Arithmetic())
    search._plan_shallow([Candidate(number, size) for number in range(len(space.structures)) for size in space.sizes])
    compared = 0
    for number, estimate in search.estimates.items():
        if space.mixes[number] == {number: 1.0} or 24 % space.structures[number].choices[EVERY]:
            continue
        for size in space.sizes:
            own = Figures.of(Arithmetic().plan(space.config(Candidate(number, size))))
            assert estimate.shallow[size].allocated["backward"] == pytest.approx(own.allocated["backward"], rel=1e-6)
            # work is not linear next to compile
            assert estimate.shallow[size].seconds == pytest.approx(own.seconds, rel=0.02)
            compared += 1
    assert compared > 400
    assert search.probes < 100, "four rehearsals for each of few structures"


def test_a_refused_structure_is_no_part_of_a_mix() -> None:
    space = space_of(config_on(1 << 40))
    search = Search(space, Arithmetic())
    number, mix = next((number, mix) for number, mix in enumerate(space.mixes) if len(mix) > 1)
    assert search._parents(number) == mix
    search._keep(Candidate(next(iter(mix)), 1), None)
    assert search._parents(number) == {number: 1.0}


def test_pinned_checkpoints_are_planned_as_they_are_and_few() -> None:
    space = space_of(config_on(1 << 40, enable_gradient_checkpointing=True), FREE - {CHECKPOINTS})
    assert {item.choices[EVERY] for item in space.structures} == {4, 2, 1}
    for number, mix in enumerate(space.mixes):
        own = space.structures[number].choices
        assert any(space.structures[other].choices == {**own, CHUNKS: 256} for other in mix) or mix == {number: 1.0}


def test_a_pinned_chunk_leaves_one_in_each_mix() -> None:
    space = space_of(config_on(1 << 40), FREE - {CHUNKS})
    assert any(len(mix) == 2 for mix in space.mixes)
    assert {space.structures[other].choices[CHUNKS] for mix in space.mixes for other in mix} == {None}


@pytest.mark.slow
def test_plans_of_a_real_model_agree() -> None:
    """A small Llama with and without checkpoints and logits: what follows for every third block and chunks of 256."""
    free = {CHECKPOINTS, EVERY, CHUNKS}
    model = {"torch_dtype_str": "float32", "model_max_length": 128}
    training = {"mixed_precision_dtype": "none", "per_device_train_batch_size": 4, "global_batch_size": 64}
    architecture = {**LLAMA, "num_hidden_layers": 12, "vocab_size": 2048}
    found = structures(tiny_config(architecture, model=model, training=training, gpu=H100), free, EXACT, False)
    sums = mixes(found)
    number = next(n for n, item in enumerate(found) if item.choices[EVERY] == 3 and item.choices[CHUNKS] is False)
    assert len(sums[number]) == 3
    parts = [(Figures.of(rehearse(found[other].config)), weight) for other, weight in sums[number].items()]
    estimate, own = mixed(parts), Figures.of(rehearse(found[number].config))
    assert max(estimate.allocated.values()) == pytest.approx(max(own.allocated.values()), rel=0.03)
    assert estimate.seconds == pytest.approx(own.seconds, rel=0.02)


@pytest.mark.slow
def test_states_on_the_host_take_from_a_real_plan_what_they_take_from_the_plainest() -> None:
    free = {CHECKPOINTS, CHUNKS, STATES}
    model = {"torch_dtype_str": "float32", "model_max_length": 128}
    training = {"mixed_precision_dtype": "none", "per_device_train_batch_size": 4, "global_batch_size": 64}
    training["optimizer"] = "adamw_torch_fused"
    architecture = {**LLAMA, "num_hidden_layers": 12, "vocab_size": 2048}
    card = {**H100, "host_link_bytes_per_second": 63e9}
    config = tiny_config(architecture, model=model, training=training, gpu=card)
    found = structures(config, free, OFF_THE_CARD, False)
    number = next(n for n, i in enumerate(found) if i.uses_host and i.choices[CHECKPOINTS] and i.choices[CHUNKS] == 256)
    mix = mixes(found)[number]
    assert len(mix) == 3
    estimate = mixed([(Figures.of(rehearse(found[other].config)), weight) for other, weight in mix.items()])
    own = Figures.of(rehearse(found[number].config))
    assert estimate.allocated == pytest.approx(own.allocated)
    assert estimate.seconds == pytest.approx(own.seconds)


def test_a_lender_corrects_until_there_is_a_plan_of_its_own() -> None:
    figures = Figures({"backward": 1000.0}, 0.0, 0.0, 1.0)
    plan = Arithmetic().plan(config_on(1 << 40))
    lender = Estimate({1: figures, 8: figures}, {8: plan})
    borrower = Estimate({1: figures, 8: figures}, {}, lender)
    assert borrower.upper(8) == pytest.approx(plan.peak.device_bytes_upper)
    assert borrower.seconds(1) == pytest.approx(Figures.of(plan).seconds)


def test_lora_of_an_8b_has_a_thousand_candidates_and_few_to_rehearse() -> None:
    config, free = opened(load("chat", ["model=qwen3_8b", "peft=lora", "gpu=h100_80gb"])), freedom(())
    found = structures(config, free, EXACT, runs_here=False)
    sizes = micro_batches(config, config.batch.global_size, free)
    assert len(found) * len(sizes) >= 1000
    rehearsed = {other for mix in mixes(found) for other in mix}
    assert len({tuple(w for w in found[other].name if not w.startswith(EXPANDABLE)) for other in rehearsed}) <= 10
    assert all(with_values(item.config, {}) == item.config for item in found[::7]), "each can be written"
