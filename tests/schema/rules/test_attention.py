"""Kernels of attention next to dtypes that they do not compute in."""

import pytest

from tests.schema.rules.test_every import conflicts


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
def test_kernels_of_half_precision_are_refused_float32_on_a_card(backend):
    card = {"name": "h100_80gb", "capability": "9.0"}
    model, computed = {"sdpa_backend": backend, "torch_dtype_str": "float32"}, {"mixed_precision_dtype": "none"}
    found = conflicts(gpu=card, model=model, training=computed)["model.sdpa_backend"]
    assert found.keys == ("model.sdpa_backend", "training.mixed_precision_dtype", "model.torch_dtype_str")
    assert not conflicts(gpu=card, model=model, training={"mixed_precision_dtype": "bf16"})
    assert not conflicts(gpu=card, model={**model, "sdpa_backend": "efficient"}, training=computed)
    assert not conflicts(gpu={"name": "cpu"}, model=model, training=computed)
