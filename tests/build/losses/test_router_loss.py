"""The router auxiliary loss is in the loss as in transformers' own, and other terms of a model's loss are refused."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from framework.build.resolve_model import settle
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.run.evaluate import evaluate
from framework.run.planning.model_checks import inspect
from framework.run.rehearsal.rehearse import record
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import LLAMA, split, tiny_assembly, tiny_config, unequal_rows

EXPERTS = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "head_dim": 8},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                "layer_types": ["full_attention", "full_attention"], "rope_scaling": None},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTRAL = {**LLAMA, **EXPERTS["mixtral"], **ASKED}

BAMBA = {**LLAMA, "model_type": "bamba", "mamba_n_heads": 4, "mamba_d_head": 16, "z_loss_coefficient": 0.1}


def config(architecture=MIXTRAL, training=None, **sections):
    return tiny_config(architecture, training={"learning_rate": 1e-3, **(training or {})}, **sections)


def padded_rows():
    batch = unequal_rows()
    mask = torch.ones_like(batch["input_ids"])
    for row in range(4):
        mask[row, 12 + row :] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def own_loss(assembly, batch):
    """The loss that transformers computes for the same rows."""
    with torch.no_grad():
        return assembly.model(**batch, use_cache=False)


@pytest.mark.parametrize(("chunk", "family"), thinned([False, 5], list(EXPERTS)))
def test_the_loss_is_that_of_transformers_on_the_same_rows(family, chunk):
    assembly = tiny_assembly(config({**LLAMA, **EXPERTS[family], **ASKED}, model={"chunked_loss": chunk}))
    batch = padded_rows()
    own = own_loss(assembly, batch)
    assert 0.5 * float(own.aux_loss) > 0.5  # two of four experts: 2 where the load is balanced
    assert train_step(assembly, [batch], 1).loss == pytest.approx(float(own.loss), abs=1e-5)


def test_of_several_micro_batches_the_terms_count_by_their_supervised_tokens():
    assembly = tiny_assembly(config())
    parts = split(padded_rows(), 2)
    owns = [own_loss(assembly, part) for part in parts]
    terms = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    assert len({*terms}) > 1
    expected = sum(float(own.loss) * count for own, count in zip(owns, terms, strict=True)) / sum(terms)
    assert train_step(assembly, parts, 1).loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "written", "coefficient"),
    [
        (MIXTRAL, 0.25, 0.25),
        (MIXTRAL, 0.0, 0.0),
        ({**MIXTRAL, "output_router_logits": False}, None, 0.0),
        ({**MIXTRAL, "output_router_logits": False}, 0.125, 0.125),
    ],
)
def test_a_written_coefficient_wins_over_the_models(architecture, written, coefficient):
    assembly = tiny_assembly(config(architecture, {"router_aux_loss_coef": written}))
    batch = padded_rows()
    with torch.no_grad():
        own = assembly.model(**batch, use_cache=False, output_router_logits=True)
    alone = float(own.loss) - architecture["router_aux_loss_coef"] * float(own.aux_loss)
    expected = alone + coefficient * float(own.aux_loss)
    assert train_step(assembly, [batch], 1).loss == pytest.approx(expected, abs=1e-5)


def test_an_evaluation_says_what_the_routers_add():
    assembly = tiny_assembly(config())
    batch = padded_rows()
    assembly.model.eval()
    own = own_loss(assembly, batch)
    metrics = evaluate(assembly, [batch], lambda _: None)
    added = 0.5 * float(own.aux_loss)
    assert metrics["eval_loss"] == pytest.approx(float(own.loss), abs=1e-5)
    assert metrics["router_loss"] == pytest.approx(added, abs=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(float(own.loss) - added), rel=1e-5)


def gradients(assembly, batch):
    loss = assembly.loss_of(batch, lambda _: None)
    names = [name for name, weight in assembly.model.named_parameters() if weight.requires_grad]
    return dict(zip(names, torch.autograd.grad(loss, assembly.trained, allow_unused=True), strict=True))


@pytest.mark.parametrize("training", [{"enable_gradient_checkpointing": True}, {"activation_offload": True}])
def test_the_gradient_is_the_same_when_blocks_are_computed_twice(training):
    batch = padded_rows()
    plain = gradients(tiny_assembly(config()), batch)
    without = gradients(tiny_assembly(config(training={"router_aux_loss_coef": 0})), batch)
    again = gradients(tiny_assembly(config(training=training)), batch)
    gates = [name for name in plain if name.endswith("gate.weight")]
    assert len(gates) == 2
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient)
    assert all((plain[name] - without[name]).norm() > 0.1 * without[name].norm() for name in gates)


def test_packed_rows_are_trained_with_it():
    """Each document computed separately, and the load of all tokens together."""
    assembly = tiny_assembly(config(data={"packing": True}, training={"per_device_train_batch_size": 1}))
    settle(assembly.config)
    ids = unequal_rows(1)["input_ids"]
    labels = ids.clone()
    labels[0, 10] = -100
    positions = torch.cat([torch.arange(10), torch.arange(14)]).unsqueeze(0)
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "cu_seq_lens": starts,
             "longest_document": torch.tensor(14)}  # fmt: skip
    with torch.no_grad():
        parts = [assembly.model(part, output_router_logits=True, use_cache=False) for part in ids.split([10, 14], 1)]
        routed = [torch.cat(layers) for layers in zip(*(part.router_logits for part in parts), strict=True)]
    losses = [
        F.cross_entropy(part.logits[0, :-1], row[0, 1:], reduction="sum")
        for part, row in zip(parts, ids.split([10, 14], 1), strict=True)
    ]
    shares = torch.cat(routed).softmax(-1)
    chosen = F.one_hot(shares.topk(2).indices, 4).sum(1).float()
    balance = 4 * float((chosen.mean(0) * shares.mean(0)).sum())
    expected = float(sum(losses)) / 22 + 0.5 * balance
    assert train_step(assembly, [batch], 1).loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("method", ["lora", "prompt"])
def test_an_adapter_and_a_trained_prompt_are_trained_with_it(method):
    """The places of a trained prompt are routed like tokens, and predict none."""
    peft = {"peft_method": method, "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    assembly = tiny_assembly(config(training={"use_peft": True}, peft=peft))
    batch = padded_rows()
    with torch.no_grad():
        own = assembly.model(**batch, output_router_logits=True, use_cache=False)
    logits = own.logits[:, -batch["input_ids"].shape[1] :]
    assert (own.logits.shape[1] > logits.shape[1]) is (method == "prompt")
    alone = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    expected = float(alone) + 0.5 * float(own.aux_loss)
    assert train_step(assembly, [batch], 1).loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "training", "arguments"),
    [
        (LLAMA, {"router_aux_loss_coef": 0.1}, "llama has no router auxiliary loss"),
        (MIXTRAL, {"task": "preference"}, "sft and pretrain"),
        (MIXTRAL, {"compile": True}, "compiled blocks"),
        (
            MIXTRAL,
            {"enable_gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "re-entrant",
        ),
        (MIXTRAL, {"task": "reward", "router_aux_loss_coef": 0.1}, "sft and pretrain"),
        (BAMBA, {}, "z_loss_coefficient 0.1"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(architecture, training, arguments):
    with pytest.raises(RequestError, match=arguments):
        settle(config(architecture, training))
    assert any(arguments in str(problem) for problem in inspect(config(architecture, training)).problems)


def test_a_family_whose_term_is_another_is_refused_unless_it_is_switched_off():
    doge = {**LLAMA, "model_type": "doge", "is_moe": True, "num_experts": 16, "num_experts_per_tok": 4, **ASKED}
    with pytest.raises(RequestError, match="doge is not supported"):
        tiny_assembly(config(doge))
    off = tiny_assembly(config(doge, {"router_aux_loss_coef": 0}))  # whose forward fails in transformers 5.17
    assert off.objective.routers is None


def readings(assembly):
    return {item.key: item for item in verify(assembly)}


def test_the_start_up_table_says_what_the_routers_add():
    reading = readings(tiny_assembly(config()))["training.router_aux_loss_coef"]
    assert (reading.asked, reading.found) == ("0.5", "0.5")
    assert "2 layers" in reading.source
    off = readings(tiny_assembly(config(training={"router_aux_loss_coef": 0})))["training.router_aux_loss_coef"]
    assert "switched off" in off.found
    quiet = readings(tiny_assembly(config({**MIXTRAL, "output_router_logits": False})))
    assert "output_router_logits is false" in quiet["training.router_aux_loss_coef"].found
    assert "training.router_aux_loss_coef" not in readings(tiny_assembly(tiny_config()))


def test_a_router_loss_that_is_left_out_stops_the_run():
    assembly = tiny_assembly(config())
    broken = dataclasses.replace(assembly, objective=dataclasses.replace(assembly.objective, routers=None))
    with pytest.raises(VerificationFailed, match=r"training\.router_aux_loss_coef: asked 0\.5"):
        verify(broken)


@pytest.mark.parametrize("extra", [0.0, 1.0])
def test_a_term_that_only_the_models_own_loss_has_stops_the_run(extra, monkeypatch):
    assembly = tiny_assembly(tiny_config())
    usual = assembly.model.loss_function
    monkeypatch.setattr(
        assembly.model,
        "loss_function",
        lambda logits, *a, **k: usual(logits, *a, **k) + extra * logits.square().mean(),
    )
    if not extra:
        assert readings(assembly)["terms of the loss"].holds
        return
    with pytest.raises(VerificationFailed, match="has a term that is not supported"):
        verify(assembly)


def test_the_plan_holds_the_router_logits_and_says_so():
    sizes = {"model": {"model_max_length": 64}, "gpu": {}}
    having, without = (record(config(training={"router_aux_loss_coef": value}, **sizes)) for value in (0.5, 0.0))
    assert any("routers' auxiliary loss is in the loss, x 0.5" in line for line in having.notes)
    assert not any("routers" in line for line in without.notes)
    assert len(having.trace.operations) > len(without.trace.operations)
