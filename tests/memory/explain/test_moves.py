"""Causes that only the run knows, and the ranking of what to change."""

import pytest

from framework.memory.explain import explain_evidence
from framework.memory.explain.causes import Cause, Circumstances, Repair, growth_per_step
from framework.memory.explain.evidence import Evidence, SavedPlan, read_circumstances, write_circumstances
from framework.memory.explain.moves import propose, rank_moves
from framework.memory.explain.text import explanation_lines
from framework.memory.levers import LEVERS
from tests.reports.plans import GIB, PLAN
from tests.tiny import tiny_config

MIB = 2**20
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.50 GiB is "
    "free. Of the allocated memory 21.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)
BATCH = "training.per_device_train_batch_size"


def lever(key, saves, exact=True):
    return {"key": key, "override": f"{key}=x", "costs": "time", "exact": exact, "saves": saves}


def plan(*levers):
    return {**PLAN.to_json(), "levers": list(levers)}


def saved(*levers):
    return SavedPlan.model_validate(plan(*levers))


def explained(phase, *levers, **known):
    return explain_evidence(Evidence(FULL, Circumstances(phase=phase, **known), saved(*levers)))


@pytest.mark.parametrize(
    ("floors", "growth"),
    [
        ([GIB + 40 * MIB * step for step in range(12)], 40 * MIB),
        ([GIB + 40 * MIB * step for step in range(4)], None),  # too few to tell
        ([GIB, 2 * GIB] * 8, None),  # varying lengths
        ([GIB, 3 * GIB, *[3 * GIB] * 12], None),  # the optimizer's states, once
        ([GIB + 1000 * step for step in range(12)], None),  # a counter, not a leak
        ([], None),
    ],
)
def test_growth_is_distinguished_from_lengths_and_from_one_rise(floors, growth):
    assert growth_per_step(floors) == growth


def test_growth_and_a_spike_are_causes_where_the_figures_show_no_other():
    floors = tuple(GIB + 40 * MIB * step for step in range(12))
    assert explained("forward", floors=floors).cause is Cause.GROWTH
    assert explained("forward", batch=8192, largest_batch=4000).cause is Cause.SPIKE
    assert explained("forward", batch=4100, largest_batch=4000).cause is Cause.CAPACITY
    pieces = FULL.replace("21.50 GiB", "11.50 GiB").replace("512.00 MiB", "10.50 GiB")
    assert (
        explain_evidence(Evidence(pieces, Circumstances(batch=8192, largest_batch=4000))).cause is Cause.FRAGMENTATION
    )


def test_what_a_run_knew_is_read_from_its_report_again():
    repairs = (Repair(BATCH, 8, 4, 0, "backward"), Repair(BATCH, 4, 2, 213, "backward"))
    known = Circumstances("backward", 213, (10, 20, 30), 8192, 4096, repairs)
    assert read_circumstances(write_circumstances(known) + "\n\n" + FULL) == known
    older = write_circumstances(known).replace("micro-batch", "micro batch")
    assert read_circumstances(older + "\n\n" + FULL) == known
    assert read_circumstances(FULL) == Circumstances()
    trial = Circumstances(repairs=(Repair("training.per_device_eval_batch_size", 4, 2, 0, "end"),))
    assert read_circumstances(write_circumstances(trial) + "\n\n" + FULL) == trial, "its evaluation is of no phase"


def test_moves_are_ranked_by_their_saving_in_the_phase_that_failed():
    levers = [
        lever("training.optimizer", {"backward": GIB, "optimizer_step": 4 * GIB}, exact=False),
        lever("training.optimizer_offload", {"backward": GIB, "optimizer_step": 4 * GIB}),
        lever(BATCH, {"backward": 6 * GIB, "optimizer_step": 4096}),
        lever("model.chunked_loss", {"backward": 0, "optimizer_step": -10}),
    ]
    step = explained("optimizer_step", *levers).moves
    assert [(move.override, move.saves_bytes) for move in step] == [
        ("training.optimizer_offload=x", 4 * GIB),  # of equal savings the exact one
        ("training.optimizer=x", 4 * GIB),
    ]  # and neither batch nor loss: they take nothing off this peak
    assert explained("backward", *levers).moves[0].override == f"{BATCH}=x"


def test_what_was_not_rehearsed_comes_last_and_has_no_figure():
    levers = [
        lever("training.optimizer", None),
        lever(BATCH, None),
        lever("training.use_peft", {"optimizer_step": GIB}),
    ]
    moves = explained("optimizer_step", *levers).moves
    assert [(move.override, move.saves_bytes) for move in moves] == [
        ("training.use_peft=x", GIB),
        ("training.optimizer=x", None),
    ]


def test_on_the_host_only_what_saves_host_memory_is_named():
    levers = [lever("training.optimizer_offload", {"backward": -GIB, "host": 2 * GIB}), lever(BATCH, {"backward": GIB})]
    found = explain_evidence(Evidence("Killed", plan=saved(*levers)))
    assert [move.override for move in found.moves] == ["training.optimizer_offload=x"]
    assert explain_evidence(Evidence("Killed")).moves == ()


@pytest.mark.parametrize("phase", ["load", "forward", "loss", "backward", "optimizer_step", "eval", "save", None])
def test_without_a_plan_there_are_moves_without_figures(phase):
    moves = rank_moves(None, phase, Cause.CAPACITY)
    assert moves
    assert all(move.saves_bytes is None for move in moves)
    keys = [move.override.partition("=")[0] for move in moves]
    assert set(keys) <= {row.key for row in LEVERS}
    exact = [move.exact for move in moves]
    assert exact == sorted(exact, reverse=True)
    assert (BATCH in keys) == (phase in ("forward", "loss", "backward", None))


def test_the_remedies_of_an_optimizer_step():
    """Fused, 8-bit or paged, LoRA; the batch is not among them."""
    overrides = [move.override for move in rank_moves(None, "optimizer_step", Cause.CAPACITY)]
    assert overrides[0] == "training.optimizer=adamw_torch_fused"
    wanted = [f"training.optimizer={name}" for name in ("adamw_torch_fused", "paged_adamw_32bit", "adamw_8bit")]
    wanted.append("training.use_peft=true")
    assert [text for text in overrides if text in wanted] == wanted


def test_the_lines_of_a_first_optimizer_step():
    text = "\n".join(
        explanation_lines(explained("optimizer_step", lever("training.optimizer", {"optimizer_step": GIB}), step=1))
    )
    assert text.startswith("out of memory in the first optimizer step (step 1): ")
    assert "creates its states in its first step: 4.00 GiB; 1.50 GiB were free" in text
    assert "2.00 GiB  were asked for, 512.0 MiB more than was free" in text
    assert "training.optimizer=x     1.00 GiB  same results; time" in text


def test_the_subtraction_adds_up():
    others = (
        "Process 7 has 1.00 GiB memory in use. Including non-PyTorch memory, this process has 21.25 GiB memory in use."
    )
    text = FULL.replace("Of the", f"{others} Of the")
    text = text.replace("21.50", "20.50")
    lines = explanation_lines(explain_evidence(Evidence(text)))
    held = [line for line in lines if line.startswith("- ")]
    assert [line.split()[1:3] for line in held] == [
        ["20.50", "GiB"], ["512.0", "MiB"], ["256.0", "MiB"], ["1.00", "GiB"], ["256.0", "MiB"],
    ]  # fmt: skip


def test_a_memory_fraction_is_named_and_what_is_free_of_it_is_subtracted():
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.00 GiB of which 38.00 GiB is free. Including non-PyTorch memory, this process has 40.00 GiB memory in use. "
        "39.50 GiB allowed; Of the allocated memory 38.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by "
        "PyTorch but unallocated."
    )
    lines = explanation_lines(explain_evidence(Evidence(text)))
    assert "=     1.00 GiB  left of what is allowed" in lines
    assert "      2.00 GiB  were asked for, 1.00 GiB more than was left of what is allowed" in lines
    first = "a memory fraction allows 39.50 GiB (set_per_process_memory_fraction); 38.00 GiB of the card were free"
    assert [line for line in lines if line.startswith("first: ")] == [f"first: {first}"]


def test_proposals_are_changes_that_can_run_and_keep_the_global_batch():
    config = tiny_config(
        training={"optimizer": "adamw_torch", "per_device_train_batch_size": 4, "global_batch_size": 8}
    )
    proposals = {proposal.key: proposal for proposal in propose(config)}
    batch = proposals[BATCH]
    assert batch.override == f"{BATCH}=2 training.global_batch_size=8"
    assert batch.exact
    assert (batch.config.batch.per_device, batch.config.batch.global_size) == (2, 8)
    assert proposals["training.enable_gradient_checkpointing"].config.training.enable_gradient_checkpointing is True
    assert proposals["training.use_peft"].exact is False
    assert not any(key.startswith("peft.") for key in proposals)
    fused = [item for item in propose(config) if item.override == "training.optimizer=adamw_torch_fused"]
    assert fused
    assert fused[0].exact
    assert not any("paged" in item.override for item in propose(config))  # needs a CUDA card


def test_nothing_below_one_row_is_proposed():
    config = tiny_config(training={"per_device_train_batch_size": 1, "global_batch_size": 8})
    assert BATCH not in {proposal.key for proposal in propose(config)}


@pytest.mark.parametrize("task", ["sft", "pretrain", "preference"])
def test_no_other_task_is_proposed(task):
    """The task is no price: otherwise a lever of another task would be proposed for this run."""
    overrides = [proposal.override for proposal in propose(tiny_config(training={"task": task}))]
    assert overrides
    for phase in (None, "forward", "load"):
        overrides += [move.override for move in rank_moves(None, phase, Cause.UNKNOWN)]
    assert not any("training.task" in text for text in overrides)
    assert any("precompute_reference" in text for text in overrides) == (task == "preference")


EVAL_BATCH = "training.per_device_eval_batch_size"


def test_where_evaluation_ran_out_one_row_at_a_time_is_offered():
    assert f"{EVAL_BATCH}=1" in [move.override for move in rank_moves(None, "eval", Cause.CAPACITY)]
    overrides = [item.override for item in propose(tiny_config(training={"per_device_eval_batch_size": 8}))]
    assert [word for word in overrides if word.startswith(EVAL_BATCH)] == [f"{EVAL_BATCH}=4", f"{EVAL_BATCH}=1"]
    assert all(item.exact for item in propose(tiny_config()) if item.key == EVAL_BATCH)
    one = propose(tiny_config(training={"per_device_eval_batch_size": 1}))
    assert EVAL_BATCH not in {item.key for item in one}


def test_a_size_that_the_run_has_repaired_already_is_not_offered_again():
    repairs = [Repair(EVAL_BATCH, 4, 2, 3, "eval")]
    plan = saved(
        lever(BATCH, {"eval": GIB}),
        *[{**lever(EVAL_BATCH, {"eval": GIB}), "override": f"{EVAL_BATCH}={size}"} for size in (4, 2, 1)],
    )
    overrides = [move.override for move in rank_moves(plan, "eval", Cause.CAPACITY, repairs)]
    assert overrides == [f"{BATCH}=x", f"{EVAL_BATCH}=1"]
    overrides = [
        move.override for move in rank_moves(None, "eval", Cause.CAPACITY, [Repair(EVAL_BATCH, 2, 1, 3, "eval")])
    ]
    assert not [word for word in overrides if word.startswith(EVAL_BATCH)]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", None])
def test_the_variable_that_the_log_names_is_the_one_to_set(variable):
    pieces = FULL.replace("21.50 GiB", "11.50 GiB").replace("512.00 MiB", "10.50 GiB")
    named = f" See documentation for Memory Management and {variable}" if variable else ""
    explanation = explain_evidence(Evidence(f"torch.OutOfMemoryError: {pieces}{named}"))
    [first] = [line for line in explanation_lines(explanation) if line.startswith("first: ")]
    assert first.endswith(f"in other tools {variable or 'PYTORCH_ALLOC_CONF'}=expandable_segments:True")
