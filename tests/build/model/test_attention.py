"""Attention: the kernel that was asked for runs, in train and eval, and no mask of ones keeps a faster one away."""

import pytest
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from framework.build.assembly import Assembly
from framework.build.data.batches import collate
from framework.build.verify import verify
from framework.build.verify.activations import Operators, Seen
from framework.errors import RequestError, VerificationFailed
from framework.run.evaluate import evaluate
from framework.run.step import train_step
from tests.grids import thinned
from tests.tiny import GPT2, LLAMA, tiny_assembly, tiny_config, unequal_rows

BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128}


def reading(assembly, key):
    return next((item for item in verify(assembly) if item.key == key), None)


@pytest.mark.parametrize(
    ("padded", "attention", "architecture"), thinned([False, True], ["eager", "sdpa"], [LLAMA, GPT2, BLOOM])
)
def test_no_mask_reaches_the_model(architecture, attention, padded, monkeypatch):
    """In train and eval, nor does torch's attention see one: it runs as causal."""
    if architecture is BLOOM and attention == "sdpa":
        pytest.skip("transformers has no sdpa for it")
    assembly = tiny_assembly(tiny_config(architecture, model={"attn_implementation": attention}))
    given, masks = [], []
    assembly.model.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    run = functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        masks.append(kwargs.get("attn_mask"))
        assert kwargs["is_causal"]
        return run(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in ((5, 9) if padded else (9, 9))]
    batch = collate(rows, pad_token_id=0)
    assert padded == ("attention_mask" in batch)
    train_step(assembly, [batch], 1)
    evaluate(assembly, [batch], lambda phase: None)
    assert len(given) == 2
    assert all(set(kwargs) == {"input_ids", "use_cache"} for kwargs in given)
    assert masks == [None] * len(masks)
    assert bool(masks) == (attention == "sdpa")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_the_chosen_kernel_runs_forward_and_backward(backend, checkpointed):
    """A checkpoint runs forward again in backward: the choice holds there too."""
    training = {"enable_gradient_checkpointing": checkpointed}
    assembly = tiny_assembly(tiny_config(model={"sdpa_backend": backend}, training=training))
    assert reading(assembly, "model.sdpa_backend").found == backend
    seen = Seen()
    with Operators(seen):
        train_step(assembly, [unequal_rows()], 1)
    kernels = ("_for_cpu", "_safe_softmax")
    ran = {name for name in seen.operators if name.partition(".")[0].endswith(kernels)}
    assert len(ran) == 1
    assert ("flash" in ran.pop()) == (backend == "flash")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_agree(dtype):
    losses = []
    for backend in ("math", "flash"):
        config = tiny_config(model={"sdpa_backend": backend, "torch_dtype_str": dtype})
        losses.append(train_step(tiny_assembly(config), [unequal_rows()], 1).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if dtype == "float32" else 1e-2)


def test_kernels_that_ran_unrequested_are_reported_and_the_random_state_is_kept():
    assembly = tiny_assembly(tiny_config({**GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5}))
    before = torch.get_rng_state()
    item = reading(assembly, "model.sdpa_backend")
    assert item.asked is None
    assert item.found == "math", "the CPU's flash kernel has no dropout"
    assert torch.equal(torch.get_rng_state(), before)


def test_another_kernel_than_the_one_asked_for_stops_the_run(monkeypatch):
    assembly = tiny_assembly(tiny_config(model={"sdpa_backend": "flash"}))
    monkeypatch.setattr(Assembly, "attention", property(lambda self: sdpa_kernel(SDPBackend.MATH)))
    with pytest.raises(VerificationFailed, match="sdpa_backend: asked flash, in effect math"):
        verify(assembly)


def test_a_kernel_of_sdpa_is_refused_for_a_model_that_has_none():
    with pytest.raises(RequestError, match=r"model\.sdpa_backend: bloom does not use torch's attention"):
        tiny_assembly(tiny_config(BLOOM, model={"sdpa_backend": "math"}))
    assert reading(tiny_assembly(tiny_config(BLOOM)), "model.sdpa_backend") is None


def test_float32_products_are_read_back():
    """tf32 is torch's own switch; the test restores it."""
    plain = tiny_assembly(tiny_config(training={"tf32": False}))
    assert reading(plain, "training.tf32").found == "false"
    try:
        rounded = tiny_assembly(tiny_config(training={"tf32": True}))
        assert reading(rounded, "training.tf32").found == "true"
        torch.set_float32_matmul_precision("highest")
        with pytest.raises(VerificationFailed, match=r"training\.tf32: asked true, in effect false"):
            verify(rounded)
    finally:
        torch.set_float32_matmul_precision("highest")
