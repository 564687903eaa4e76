"""Packs: which rows go together, and that no document of a pack knows of another."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from framework.build.data.batches import GlobalBatches, MicroBatch, collate, epoch_order, eval_batches, order_by_length
from framework.build.data.packing import best_fit, document_lengths, end_to_end, mark_documents, pack
from framework.build.data.rows import Rows, join_rows
from framework.build.loading.document_isolation import find_leak, refuse_leaks
from framework.build.losses.loss import build_loss, supervised_tokens
from framework.build.text.labels import IGNORED, Encoded
from framework.build.verify import verify
from framework.errors import RequestError, VerificationFailed
from framework.run.step import train_step
from framework.schema.config import Batch
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config

LIMIT = 32
PLAIN: dict[str, Any] = {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"}
WINDOW: dict[str, Any] = {**LLAMA, "head_dim": 8, "sliding_window": 6}
BERT: dict[str, Any] = {**PLAIN, "model_type": "bert", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {**LLAMA, "model_type": kind} for kind in ("llama", "qwen2", "phi", "olmo2", "granite", "starcoder2")},
    **{kind: {**WINDOW, "model_type": kind} for kind in ("mistral", "gemma2", "qwen3")},
    "gemma3_text": {**WINDOW, "model_type": "gemma3_text", "num_hidden_layers": 6},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                  "moe_intermediate_size": 16},
    "gpt_oss": {**WINDOW, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": GPT2,
    "gpt_neox": {**PLAIN, "model_type": "gpt_neox"},
    "opt": {"model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 128, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.0},
    "falcon": {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "vocab_size": 128},
    "bert": {**BERT, "is_decoder": True},
}  # fmt: skip
NOT_APART: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "falcon": {**FAMILIES["falcon"], "alibi": True},
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8},
    "roberta": {**BERT, "model_type": "roberta", "is_decoder": True},
    "lfm2": {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
}
NO_SDPA = ("gemma2", "gpt_oss")


def encoded(*lengths: int) -> list[Encoded]:
    """Rows whose tokens are all different and above the special ones; the first third of each is not supervised."""
    generator = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = generator.integers(3, 128, length, dtype=np.int32)
        labels = ids.copy()
        labels[: max(1, length // 3)] = IGNORED
        rows.append(Encoded(ids, labels))
    return rows


def packed(*lengths: int, limit: int = LIMIT) -> tuple[Rows, MicroBatch]:
    """Rows, and one micro-batch of all their packs."""
    rows = join_rows(encoded(*lengths))
    packs = pack(rows, limit, seed=7)
    return rows, collate(list(packs), 0)


class TestBestFit:
    def test_each_row_goes_where_it_leaves_least_space(self) -> None:
        """9 and 7 open packs; 3 fits both and goes to the fuller; 1 closes the first; 2 goes to the second."""
        assert best_fit(np.array([9, 7, 3, 1, 2]), range(5), 10) == [[0, 3], [1, 2], [4]]

    @pytest.mark.parametrize("seed", range(20))
    def test_packs_hold_each_row_once_never_more_than_the_limit_and_are_few(self, seed: int) -> None:
        lengths = np.random.default_rng(seed).integers(1, 33, 500)
        order = np.argsort(-lengths, kind="stable").tolist()
        packs = best_fit(lengths, order, 64)
        assert sorted(row for members in packs for row in members) == list(range(500))
        assert max(lengths[members].sum() for members in packs) <= 64
        assert len(packs) <= -(-lengths.sum() // 64) * 11 / 9 + 1
        assert lengths.sum() / (64 * len(packs)) > 0.98

    def test_a_naive_search_finds_the_same(self) -> None:
        lengths = np.random.default_rng(3).integers(1, 33, 200)
        packs: list[list[int]] = []
        for row in range(200):
            rooms = [32 - lengths[members].sum() - lengths[row] for members in packs]
            best = min((room for room in rooms if room >= 0), default=None)
            packs.append([row]) if best is None else packs[rooms.index(best)].append(row)
        sizes = sorted(int(lengths[members].sum()) for members in packs)
        assert sorted(int(lengths[members].sum()) for members in best_fit(lengths, range(200), 32)) == sizes

    def test_the_seed_alone_decides(self) -> None:
        rows = join_rows(encoded(*[5, 9, 9, 9, 14, 20, 9] * 4))
        first, again, other = (pack(rows, LIMIT, seed) for seed in (1, 1, 2))
        assert first.members.tolist() == again.members.tolist() != other.members.tolist()
        assert sorted(first.members.tolist()) == list(range(28))
        assert first.lengths.tolist() == [len(row["input_ids"]) for row in first]


class TestBatches:
    def test_positions_restart_and_nothing_is_predicted_across(self) -> None:
        rows = join_rows(encoded(3, 4, 6))
        row = end_to_end([rows[0], rows[1]])
        batch = collate([row, rows[2]], pad_token_id=0)
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]]
        assert batch["cu_seq_lens"].tolist() == [0, 3, 7, 13, 14]
        assert int(batch["longest_document"]) == 6
        assert document_lengths(batch) == ((3, 4), (6,))
        assert batch["labels"][0, 3] == IGNORED

    def test_a_pack_learns_what_its_rows_learn(self) -> None:
        rows, batch = packed(5, 20, 9, 12, 30, 1, 8)
        assert int(supervised_tokens(batch)) == sum((np.array(row["labels"][1:]) != IGNORED).sum() for row in rows)

    def test_starting_in_the_middle_of_an_epoch_gives_the_same_packs(self) -> None:
        rows = join_rows(encoded(*np.random.default_rng(1).integers(1, 33, 60).tolist()))

        def batches() -> GlobalBatches:
            return GlobalBatches(pack(rows, LIMIT, 5), Batch(2, 2, 1), seed=5, pad_token_id=0)

        straight = list(islice(batches().start(0), 12))
        resumed = list(islice(batches().start(5), 7))
        for one, other in zip(straight[5:], resumed, strict=True):
            assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)
        epoch = batches().steps_per_epoch
        assert sorted(row for step in range(epoch) for row in batches().rows_of(step)) == list(range(60))


@pytest.mark.parametrize(("attention", "family"), thinned(["eager", "sdpa"], list(FAMILIES)))
def test_a_packed_row_has_the_loss_of_its_documents(family: str, attention: str) -> None:
    """Row by row to 1e-4 in float32, for documents first, in the middle and last, long, short and of one token."""
    if attention == "sdpa" and family in NO_SDPA:
        pytest.skip("transformers has no sdpa for it")
    config = tiny_config(FAMILIES[family], model={"attn_implementation": attention}, data={"packing": True})
    assembly = tiny_assembly(config)
    for parameter in assembly.model.parameters():  # so that what is seen matters
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    assembly.model.eval()
    assert find_leak(assembly.model, torch.device("cpu")) is None
    loss = build_loss(config.model, assembly.model)
    rows = join_rows(encoded(9, 12, 1, 10, 20, 11))
    packs = pack(rows, LIMIT, seed=7)
    with torch.no_grad():
        for index in range(len(packs)):
            together = loss(assembly.model, collate([packs[index], packs[0]], 0), lambda phase: None)
            alone = [loss(assembly.model, collate([rows[row]], 0), lambda phase: None) for row in packs.rows_of(index)]
            alone += [loss(assembly.model, collate([rows[row]], 0), lambda phase: None) for row in packs.rows_of(0)]
            assert float(together) == pytest.approx(float(sum(alone)), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "checkpointed", "chunk"), thinned(["llama", "gemma3_text", "gpt2"], [False, True], [8, False])
)
def test_a_packed_step_is_the_unpacked_step(family: str, chunk: bool | int, checkpointed: bool) -> None:
    """Loss, gradient norm and weights after it; the loss is the mean over all supervised tokens either way."""
    lengths = (9, 12, 1, 10, 20, 11, 31, 3)
    stepped = []
    for packing in (False, True):
        config = tiny_config(
            {**FAMILIES[family], "final_logit_softcapping": None} if family == "gemma3_text" else FAMILIES[family],
            data={"packing": packing},
            model={"chunked_loss": chunk},
            training={"enable_gradient_checkpointing": checkpointed, "optimizer": "sgd", "learning_rate": 1.0},
        )
        assembly = tiny_assembly(config)
        rows = join_rows(encoded(*lengths))
        batch = collate(list(pack(rows, LIMIT, 7) if packing else rows), 0)
        result = train_step(assembly, [batch], 1)
        stepped.append((result, torch.cat([weight.detach().flatten() for weight in assembly.model.parameters()])))
    (plain, weights), (joined, packed_weights) = stepped
    assert joined.loss == pytest.approx(plain.loss, rel=1e-5)
    assert joined.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert joined.terms == plain.terms
    assert joined.tokens < plain.tokens
    assert torch.allclose(weights, packed_weights, atol=1e-5)


class TestRefusals:
    @pytest.mark.parametrize("family", NOT_APART)
    def test_a_model_that_mixes_documents_is_refused_before_its_weights_load(self, family: str) -> None:
        config = tiny_config(NOT_APART[family], data={"packing": True})
        settings = dict(NOT_APART[family])
        with pytest.raises(RequestError) as caught:
            refuse_leaks(config, AutoConfig.for_model(**settings))
        (problem,) = caught.value.problems
        assert problem.key == "data.packing"
        assert problem.message.startswith(f"{settings['model_type']} does not separate documents in one row")
        refuse_leaks(tiny_config(NOT_APART[family]), AutoConfig.for_model(**settings))

    def test_the_random_state_is_left_alone(self) -> None:
        before = torch.get_rng_state()
        refuse_leaks(tiny_config(data={"packing": True}), AutoConfig.for_model(**LLAMA))
        assert torch.equal(torch.get_rng_state(), before)

    def test_the_built_model_is_read_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assembly = tiny_assembly(tiny_config(data={"packing": True}))
        (reading,) = [item for item in verify(assembly) if item.key == "data.packing"]
        assert reading.found == "documents kept separately"
        assert assembly.model.training
        assert all(parameter.grad is None for parameter in assembly.model.parameters())
        monkeypatch.setattr("framework.build.losses.loss.keep_documents_separate", lambda model, batch: {})
        with pytest.raises(VerificationFailed, match="in effect predictions in one depend on the one before"):
            verify(assembly)

    def test_positions_that_do_not_restart_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from framework.build.data import packing

        def without_positions(model: Any, batch: Any) -> dict[str, Any]:
            return {"attention_mask": packing.keep_documents_separate(model, batch)["attention_mask"]}

        assembly = tiny_assembly(tiny_config(GPT2, data={"packing": True}))
        monkeypatch.setattr("framework.build.losses.loss.keep_documents_separate", without_positions)
        with pytest.raises(VerificationFailed, match="positions do not restart"):
            verify(assembly)


class TestPaddingFree:
    """The rows of a micro-batch end to end: the same step."""

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_the_step_is_the_padded_one(self, attention: str) -> None:
        """Four micro-batches, the last of one row."""
        rows, stepped = join_rows(encoded(9, 12, 1, 10, 20, 11, 31)), []
        for joined in (False, True):
            data = {"padding_free": joined}
            assembly = tiny_assembly(tiny_config(data=data, model={"attn_implementation": attention}))
            batches = GlobalBatches(rows, Batch(2, 4, 1), seed=3, pad_token_id=0, padding_free=joined)
            micro_batches = next(batches.start(0))
            stepped.append(train_step(assembly, micro_batches, 1))
        assert [len(batch["input_ids"]) for batch in micro_batches] == [1, 1, 1, 1]
        assert stepped[1].loss == pytest.approx(stepped[0].loss, rel=1e-5)
        assert stepped[1].grad_norm == pytest.approx(stepped[0].grad_norm, rel=1e-4)
        assert stepped[1].terms == stepped[0].terms
        assert stepped[1].tokens == 94 < stepped[0].tokens

    def test_evaluation_too(self) -> None:
        rows = join_rows(encoded(9, 12, 1, 10, 20))
        made = list(eval_batches(rows, 2, 0, padding_free=True))
        assert [document_lengths(batch) for batch in made] == [((9, 12),), ((1, 10),), ((20,),)]


class TestGrouping:
    LENGTHS = np.random.default_rng(0).integers(1, 500, 1003)

    def test_every_row_once_an_epoch_with_few_lengths_in_a_step(self) -> None:
        order = order_by_length(self.LENGTHS, 8, seed=1, epoch=0)
        assert sorted(order.tolist()) == list(range(1003))
        steps = [self.LENGTHS[order[start : start + 8]] for start in range(0, 1003, 8)]
        assert len(steps[-1]) == 3
        assert all((np.diff(step) <= 0).all() for step in steps)
        padding = sum(int((step.max() - step).sum()) for step in steps) / self.LENGTHS.sum()
        plain = [self.LENGTHS[epoch_order(1003, 1, 0)[start : start + 8]] for start in range(0, 1003, 8)]
        assert padding < 0.03 < 0.5 < sum(int((step.max() - step).sum()) for step in plain) / self.LENGTHS.sum()

    def test_steps_stay_random(self) -> None:
        """No trend of the lengths from step to step, another order each epoch, and the same again for the same seed."""
        orders = [order_by_length(self.LENGTHS, 8, seed, epoch).tolist() for seed, epoch in ((1, 0), (1, 0), (1, 1))]
        assert orders[0] == orders[1] != orders[2]
        means = [self.LENGTHS[orders[0][start : start + 8]].mean() for start in range(0, 1000, 8)]
        assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3

    @pytest.mark.parametrize("split", [(8, 1), (2, 4), (1, 8)])
    def test_every_split_of_a_step_has_the_same_rows(self, split: tuple[int, int]) -> None:
        rows = join_rows(encoded(*self.LENGTHS[:50].tolist()))
        whole, parts = (
            GlobalBatches(rows, Batch(*sizes, 1), seed=3, pad_token_id=0, by_length=True) for sizes in ((8, 1), split)
        )
        assert [whole.rows_of(step) for step in range(9)] == [parts.rows_of(step) for step in range(9)]

    def test_it_resumes_in_the_middle_of_an_epoch(self) -> None:
        rows = join_rows(encoded(*self.LENGTHS[:50].tolist()))
        batches = GlobalBatches(rows, Batch(2, 2, 1), seed=3, pad_token_id=0, by_length=True)
        straight, resumed = list(islice(batches.start(0), 20)), list(islice(batches.start(9), 11))
        for one, other in zip(straight[9:], resumed, strict=True):
            assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, other, strict=True))


def test_the_mask_of_sdpa_is_made_once_in_the_dtype_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boolean one would be made additive, and kept for backward, in every layer."""
    import torch.nn.functional as functional

    masks: list[torch.Tensor] = []
    run = functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append(kwargs["attn_mask"])
        return run(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    for autocast, dtype in (("none", torch.float32), ("bf16", torch.bfloat16)):
        masks.clear()
        config = tiny_config(data={"packing": True}, training={"mixed_precision_dtype": autocast})
        train_step(tiny_assembly(config), [packed(9, 12, 1, 9)[1]], 1)
        assert len(masks) == 2
        assert len({mask.data_ptr() for mask in masks}) == 1
        assert {mask.dtype for mask in masks} == {dtype}
        assert all(stride % 8 == 0 for stride in masks[0].stride()[:-1])
        assert bool(masks[0].isfinite().all())


def test_marks_count_padding_as_a_document_of_its_own() -> None:
    marks = mark_documents([[2, 1], [1]], 4)
    assert marks["position_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]
    assert marks["cu_seq_lens"].tolist() == [0, 2, 3, 4, 5, 8]
    assert marks["longest_document"].dim() == 0
