"""The product's own assembly and step, rehearsed: terms that add up, phases, costs."""

from typing import Any

import pytest
import torch

from framework.errors import RequestError
from framework.memory.ledger import Plan
from framework.memory.planning import make_plan
from framework.memory.trace import Kind
from framework.run.planning.plan_pool import plan_in_subprocess
from framework.run.rehearsal.rehearse import record, rehearse
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams
from tests.grids import thinned
from tests.run.reference import H100
from tests.tiny import GEMMA2, GPT2, LLAMA, tiny_config

WIDE: dict[str, Any] = {**LLAMA, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096}


def plan(architecture: dict[str, Any] = LLAMA, **sections: Any) -> Plan:
    return make_plan(record(tiny_config(architecture, gpu=H100, **sections)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "sections"),
    thinned(
        [GEMMA2, LLAMA, GPT2],
        [
            {},
            {"training": {"mixed_precision_dtype": "bf16", "optimizer": "adamw_torch_fused"}},
            {"training": {"enable_gradient_checkpointing": True, "global_batch_size": 16}},
            {"model": {"chunked_loss": 16}},
            {"training": {"optimizer": "adafactor"}, "model": {"freeze_layers": ("layers.0", "h.0")[:1]}},
        ],
    ),
)
def test_terms_add_up_to_what_the_driver_sees(architecture: dict[str, Any], sections: dict[str, Any]) -> None:
    if "freeze_layers" in sections.get("model", {}) and architecture is GPT2:
        pytest.skip("its blocks have another name")
    if "chunked_loss" in sections.get("model", {}):
        architecture = {**architecture, "final_logit_softcapping": None} if architecture is GEMMA2 else architecture
    made = plan(architecture, **{name: dict(section) for name, section in sections.items()})
    for use in (made.peak, made.step_peak):
        assert use.terms.total == use.device_bytes
        assert use.device_bytes == use.reserved_bytes + use.terms.overhead
        assert use.terms.unattributed == 0
    assert [phase.name for phase in made.phases] == [
        "load", "forward", "loss", "backward", "optimizer_step", "save", "resume",
    ]  # fmt: skip
    assert made.step is not None
    assert made.step.tokens_per_second > 0
    assert made.fits


def test_the_document_is_the_contract_and_reads_back() -> None:
    made = plan()
    document = made.to_json()
    assert Plan.from_json(document) == made
    assert set(document) >= {
        *(
            "schema_version",
            "device",
            "fits",
            "peak",
            "terms",
            "step_peak",
            "phases",
            "host_bytes",
            "disk_bytes",
            "checkpoint_bytes",
        ),
        *("step", "batch", "parameters", "assumptions", "warnings"),
    }
    assert set(document["terms"]) == {
        *("weights", "gradients", "optimizer", "activations", "logits_and_loss", "autocast_copies", "temporaries"),
        *("communication", "fragmentation", "overhead", "unattributed"),
    }
    assert document["batch"] == {
        "per_device": 8, "accumulation": 1, "world": 1, "global": 8, "sequence_length": 128, "context": 1, "tensor": 1,
    }  # fmt: skip


def test_activations_and_logits_grow_with_the_batch_and_weights_do_not() -> None:
    """Every row adds the same number of bytes."""
    plans = [
        plan(WIDE, training={"per_device_train_batch_size": rows, "global_batch_size": rows}).step_peak.terms
        for rows in (32, 64, 128)
    ]
    assert len({terms.weights for terms in plans}) == len({terms.optimizer for terms in plans}) == 1
    for term in ("activations", "logits_and_loss"):
        small, middle, large = (getattr(terms, term) for terms in plans)
        assert large - middle == pytest.approx(2 * (middle - small), rel=0.03)
        assert middle - small > 0.8 * small


def test_foreach_makes_temporaries_as_large_as_the_trained_weights_and_fused_none() -> None:
    uses = {}
    for optimizer in ("adamw_torch", "adamw_torch_fused"):
        training = {"per_device_train_batch_size": 1, "global_batch_size": 1, "optimizer": optimizer}
        made = plan(WIDE, training=training)
        uses[optimizer] = next(phase for phase in made.phases if phase.name == "optimizer_step").allocated_bytes
    weights = 4 * made.trainable_parameters
    assert uses["adamw_torch"] - uses["adamw_torch_fused"] == pytest.approx(weights, rel=0.05)


def test_adamw_in_float32_costs_16_bytes_a_parameter_and_pure_bf16_8() -> None:
    """At the moment when weights, gradients and states all exist."""
    for dtype, each in (("float32", 16), ("bfloat16", 8)):
        training = {"per_device_train_batch_size": 1, "global_batch_size": 1, "optimizer": "adamw_torch"}
        rehearsal = record(tiny_config(WIDE, gpu=H100, training=training, model={"torch_dtype_str": dtype}))
        terms = make_plan(rehearsal).step_peak
        assert terms.phase == "optimizer_step"
        held = terms.terms.weights + terms.terms.gradients + terms.terms.optimizer
        assert held == pytest.approx(each * rehearsal.footprint.total_parameters, rel=0.02)


def test_accumulation_costs_time_and_no_memory() -> None:
    few, many = (
        plan(WIDE, training={"per_device_train_batch_size": 4, "global_batch_size": 4 * times}) for times in (2, 10)
    )
    assert many.peak.allocated_bytes == pytest.approx(few.peak.allocated_bytes, rel=0.001)
    assert few.step is not None
    assert many.step is not None
    assert many.step.model_flops == 5 * few.step.model_flops
    assert 3 < many.step.seconds / few.step.seconds < 5


def test_evaluation_is_a_phase_when_the_run_evaluates() -> None:
    made = plan(training={"per_device_eval_batch_size": 64}, data={"eval_fraction": 0.1})
    phases = {phase.name: phase for phase in made.phases}
    assert made.peak.phase == "eval"
    assert made.step_peak.phase != "eval"
    assert phases["eval"].allocated_bytes == made.peak.allocated_bytes > made.step_peak.allocated_bytes


def test_checkpoints_on_disk() -> None:
    """Weights as they are trained and two states, once more than are kept, and the export."""
    made = plan(training={"save_steps": 10, "max_steps": 100, "save_total_limit": 2, "optimizer": "adamw_torch_fused"})
    parameters = made.total_parameters
    assert made.disk_bytes == pytest.approx(3 * 12 * parameters + 4 * parameters, rel=0.01)


def test_flops_are_six_a_trained_weight_and_four_a_frozen_one() -> None:
    lora = {"use_peft": True, "mixed_precision_dtype": "bf16", "enable_gradient_checkpointing": True}
    full, adapted = plan(WIDE), plan(WIDE, training=lora, peft={"lora_target_modules": ("all-linear",)})
    assert full.step is not None
    assert adapted.step is not None
    layer = 256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 256 * 768
    products = 2 * layer + 4096 * 256
    tokens = 8 * 128
    attention = 3 * 2 * (2 * 2 * 8 * 4 * 128 * 128 * 64) // 2
    near = 1e-5  # before transformers 5.2x positions were turned by a product too
    assert full.step.model_flops == pytest.approx(6 * products * tokens + attention, rel=near)
    trained = 4 * products + 6 * adapted.trainable_parameters
    assert adapted.step.model_flops == pytest.approx(trained * tokens + attention, rel=near)


def test_the_cpu_has_no_cache_no_context_and_no_time() -> None:
    made = make_plan(record(tiny_config()))
    assert made.peak.terms.overhead == 0
    assert made.step is None
    assert made.fits
    assert made.peak.terms.temporaries < 1 << 20, "no cuBLAS"


def test_pretrained_weights_share_the_segment_that_transformers_asks_for_first() -> None:
    config = tiny_config(WIDE, gpu=H100, model={"load_pretrained_weights": True, "model_name": "x"})
    rehearsal = record(config)
    trace = rehearsal.trace
    assert trace.kinds[0] is Kind.TEMPORARIES
    assert trace.sizes[0] == 4 * rehearsal.footprint.total_parameters, "buffers are made, not loaded"


def test_a_child_process_plans_and_the_caller_stays_as_it_was() -> None:
    config = tiny_config(gpu=H100)
    before = torch.cuda.device_count
    assert plan_in_subprocess(config) == make_plan(record(config))
    assert torch.cuda.device_count is before


def test_what_the_child_cannot_build_comes_back_as_problems() -> None:
    config = tiny_config({**LLAMA, "hidden_sise": 64}, gpu=H100)
    with pytest.raises(RequestError) as caught:
        plan_in_subprocess(config)
    assert caught.value.problems[0].key == "model.architecture.hidden_sise"
    assert caught.value.problems[0].nearest == "hidden_size"


def test_a_plan_over_the_card_does_not_fit() -> None:
    small = GPUParams(**{**H100.model_dump(), "usable_bytes": 1 << 20})
    config = tiny_config()
    made = make_plan(record(TrainingConfig(**{**dict(config), "gpu": small})))
    assert not made.fits
    assert made.peak.device_bytes_upper > made.peak.device_bytes


def test_a_head_that_is_the_embedding_is_planned_once():
    plan = rehearse(tiny_config({**LLAMA, "tie_word_embeddings": True}))
    apart = rehearse(tiny_config(LLAMA))
    assert apart.total_parameters - plan.total_parameters == LLAMA["vocab_size"] * LLAMA["hidden_size"]
