"""Whole runs and plans with several rows in one."""

import json
from typing import Any

import pytest
import torch

from framework.build.assembly import assemble
from framework.build.loading.document_isolation import find_leak
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.errors import Interrupted, RequestError, VerificationFailed
from framework.memory.cards import detect, read_card
from framework.memory.planning import make_plan
from framework.run import trainer
from framework.run.rehearsal.rehearse import record
from framework.schema.config import TrainingConfig
from tests.card import measure_apart, own_card
from tests.grids import slow
from tests.run.reference import H100
from tests.run.test_trainer import config, final_weights, interrupt_after, metrics, same
from tests.tiny import LLAMA, tiny_config

LENGTH = 64


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """100 texts of 1 to 12 words."""
    file = tmp_path_factory.mktemp("texts") / "rows.jsonl"
    rows = ({"text": " ".join(["lazy dog"] * (1 + i % 12)) + f" {i}"} for i in range(100))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(texts: Any, folder: Any, **options: Any) -> Any:
    """Twelve steps, dropout on, more than an epoch of packs."""
    data = {"packing": True, **options.pop("data", {})}
    model = {"model_max_length": LENGTH, **options.pop("model", {})}
    made = config(texts, folder, data=data, model=model, training=options.pop("training", {}))
    return trainer.train(made, planner=None, **{"quiet": True, **options})


@pytest.mark.parametrize("step", [7, slow(1), slow(4), slow(11)])
def test_resuming_a_packed_run_is_exact(texts: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The same packs in the same order, stopped within an epoch and later."""
    run(texts, tmp_path / "straight")
    with monkeypatch.context() as patched:
        interrupt_after(step, patched)
        with pytest.raises(Interrupted):
            run(texts, tmp_path / "run")
    torch.manual_seed(999)
    run(texts, tmp_path / "run", resume=True, data={"workers": 2 if step == 4 else 0})
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_a_packed_run_says_what_it_does(texts: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(texts, tmp_path / "run", quiet=False)
    output = "".join(capsys.readouterr())
    assert f"a row is a pack of at most {LENGTH} tokens" in output
    assert "of the positions hold a token" in output
    assert "data.packing" in output
    assert "documents kept separately" in output
    assert "after step 1: data.packing = true (positions of the first step: " in output


def test_tokens_are_positions_and_every_row_is_trained_on_once_an_epoch(texts: Any, tmp_path: Any) -> None:
    """Supervised tokens of an epoch are those of the unpacked run; the positions are far fewer."""
    epoch = {"max_steps": None, "num_train_epochs": 1}
    run(texts, tmp_path / "packed", training=epoch)
    run(texts, tmp_path / "plain", training=epoch, data={"packing": False})
    supervised, positions = (
        [sum(metrics(tmp_path / name, key).values()) for name in ("packed", "plain")]
        for key in ("supervised_tokens", "tokens")
    )
    assert supervised[0] == supervised[1]
    assert supervised[0] < positions[0] < positions[1]
    assert len(metrics(tmp_path / "packed")) < len(metrics(tmp_path / "plain"))


def test_evaluation_on_packs_is_that_on_rows(texts: Any, tmp_path: Any) -> None:
    """The first evaluation, before any step: the same held-out rows, the same weights."""
    losses = []
    for packing in (True, False):
        run(texts, tmp_path / str(packing), data={"packing": packing}, training={"max_steps": 1})
        losses.append(metrics(tmp_path / str(packing), "eval_loss")[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("options", [{"padding_free": True}, {"group_by_length": True}])
def test_a_run_resumes_exactly_and_is_read_back(
    options: dict[str, Any], texts: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = {"packing": False, **options}
    run(texts, tmp_path / "straight", data=data, quiet=False)
    assert f"after step 1: data.{next(iter(options))} = true (" in "".join(capsys.readouterr())
    with monkeypatch.context() as patched:
        interrupt_after(5, patched)
        with pytest.raises(Interrupted):
            run(texts, tmp_path / "run", data=data)
    run(texts, tmp_path / "run", data=data, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "straight"))


def test_rows_end_to_end_learn_what_padded_rows_learn(texts: Any, tmp_path: Any) -> None:
    """Without dropout, whose random numbers fall elsewhere."""
    for joined in (True, False):
        data = {"packing": False, "padding_free": joined}
        plain = config(texts, tmp_path / str(joined), data=data, model={"model_max_length": LENGTH}, architecture=LLAMA)
        trainer.train(plain, planner=None, quiet=True)
    first, second = (metrics(tmp_path / str(joined)) for joined in (True, False))
    assert first == pytest.approx(second, rel=1e-4)
    tokens = [sum(metrics(tmp_path / str(joined), "tokens").values()) for joined in (True, False)]
    assert tokens[0] < tokens[1]


def test_grouping_that_is_not_in_effect_stops_the_run(
    texts: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.build.data.batches.order_by_length", lambda lengths, *_: lengths.argsort())
    with pytest.raises(VerificationFailed, match=r"data\.group_by_length: asked true, in effect false"):
        run(texts, tmp_path / "run", data={"packing": False, "group_by_length": True})


SHAPE = {**LLAMA, "hidden_size": 64, "max_position_embeddings": 512}


_planned: dict[str, Any] = {}


class TestPlan:
    def plan(self, packing: bool = True, padding_free: bool = False, card: Any = H100, **model: Any) -> Any:
        """Made once for all tests."""
        asked = repr((packing, padding_free, card.name, model))
        if asked not in _planned:
            sizes = {"per_device_train_batch_size": 2, "global_batch_size": 2, "mixed_precision_dtype": "bf16"}
            sections = {"training": sizes, "model": {"model_max_length": 512, **model}}
            data = {"packing": packing, "padding_free": padding_free}
            _planned[asked] = make_plan(record(tiny_config(SHAPE, gpu=card, data=data, **sections)))
        return _planned[asked]

    def test_sdpa_holds_one_mask_for_all_layers(self) -> None:
        """2 rows x 512 x 512 in bfloat16, once; and keys and values of every query head, since the kernel with a mask
        does not group them: 2 heads of 16 more, in each of 2 layers; and a second row of rotary angles."""
        with_mask, without = (self.plan(packing).step_peak.terms.activations for packing in (True, False))
        mask = 2 * 2 * 512 * 512
        copies = 2 * 2 * (2 * 512 * 2 * 16) * 2
        angles = 2 * 4 * 512 * 16
        assert with_mask - without == pytest.approx(mask + copies + angles, rel=0.02)

    def test_the_kernel_that_a_mask_allows_is_reported(self) -> None:
        assumptions = self.plan().assumptions
        assert "attention runs as scaled_dot_product_cudnn_attention" in assumptions
        assert any(
            "one long document and one of a single token: a mask of rows x tokens" in line for line in assumptions
        )

    def test_a_length_that_kernels_do_not_align_to_costs_no_copies(self) -> None:
        """The efficient kernel, which serves masks on an A100, copies a mask of 509 a line in every layer, unless each
        line begins at a multiple of 8 already."""
        a100 = H100.model_copy(update={"name": "a100", "capability": "8.0"})
        odd, even = (self.plan(card=a100, model_max_length=length) for length in (509, 512))
        assert "attention runs as scaled_dot_product_efficient_attention" in odd.assumptions
        assert odd.step_peak.terms.activations <= even.step_peak.terms.activations

    def test_rows_end_to_end_need_a_mask_of_all_their_tokens(self) -> None:
        """(2 x 512) squared in bfloat16; flash-attn needs none."""
        plain, joined, flash = (
            self.plan(False, padding_free=joined, **model)
            for joined, model in ((False, {}), (True, {}), (True, {"attn_implementation": "flash_attention_2"}))
        )
        more = joined.step_peak.terms.activations - plain.step_peak.terms.activations
        assert more == pytest.approx(2 * 1024 * 1024 + 2 * 2 * (2 * 512 * 2 * 16) * 2, rel=0.04)
        assert flash.step_peak.allocated_bytes == pytest.approx(plain.step_peak.allocated_bytes, rel=0.01)
        assert any("a mask of all their tokens x all their tokens (sdpa)" in line for line in joined.assumptions)

    def test_flash_attention_needs_no_mask(self) -> None:
        packed, plain = (self.plan(packing, attn_implementation="flash_attention_2") for packing in (True, False))
        assert packed.step_peak.allocated_bytes == pytest.approx(plain.step_peak.allocated_bytes, rel=0.01)
        assert any("no mask (flash_attention_2)" in line for line in packed.assumptions)

    def test_a_kernel_that_takes_no_mask_is_refused_by_the_plan(self) -> None:
        with pytest.raises(RequestError, match=r"model\.sdpa_backend: flash cannot serve this attention"):
            self.plan(sdpa_backend="flash")


def leaks(config: TrainingConfig) -> bool:
    """Whether a document reaches another on this card."""
    place = real_place(torch.device("cuda", 0))
    assembly = assemble(config, read_architecture(config), place, 10)
    with assembly.attention, assembly.autocast:
        return find_leak(assembly.model, place.device) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("data", [{"packing": True}, {"padding_free": True}, {}], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_a_card_takes_what_was_planned(attention: str, data: dict[str, Any], rows: int) -> None:
    """The worst packed step on this card, for the kernel that a mask leaves; and documents kept separately on it."""
    name = detect()
    assert name is not None, "an unknown card"
    shape = {**LLAMA, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 32000}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    sizes = {"per_device_train_batch_size": rows, "global_batch_size": rows, "mixed_precision_dtype": "bf16"}
    made = tiny_config(
        shape,
        gpu=read_card(name),
        data=data,
        training={**sizes, "per_device_eval_batch_size": rows, "optimizer": "adamw_torch_fused"},
        model={"model_max_length": 1024, "attn_implementation": attention},
    )
    use, measured = make_plan(record(made)).step_peak, measure_apart(made)
    assert use.allocated_bytes == pytest.approx(measured.allocated_bytes, rel=0.01)
    assert use.device_bytes_upper >= measured.device_bytes
    if data:
        with own_card():
            assert not leaks(made)
