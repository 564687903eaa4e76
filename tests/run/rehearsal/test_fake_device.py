"""Tensors without storage that behave as on a card, and nothing left of it afterwards."""

import importlib
import warnings

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as functional
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from framework.run.rehearsal.fake_device import fake_device, is_on_card
from framework.schema.gpu import GPUParams
from tests.run.reference import H100

A100 = GPUParams(name="a100_80gb", capability="8.0", bf16_flops=3e14)
CPU = GPUParams(name="cpu")


class Operators(TorchDispatchMode):
    """The operators that reach the device, with the dtype of their first result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) else result
        self.seen.append((func._overloadpacket.__name__, getattr(first, "dtype", None)))
        return result

    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def test_meta_tensors_claim_the_card() -> None:
    with fake_device(H100):
        tensor = torch.empty(2, device="cuda")
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.is_cuda
        assert not tensor.is_meta
        assert tensor.get_device() == 0
        assert torch.zeros(2, device=tensor.device).to("cuda").cuda().device.type == "cuda"
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == H100.capacity_bytes
        assert torch.empty(2).device.type == "cpu"
    assert is_on_card(tensor)
    assert tensor.device.type == "meta"


def test_without_a_card_they_claim_the_cpu() -> None:
    with fake_device(CPU):
        tensor = torch.empty(2, device="cpu")
        assert tensor.device.type == "cpu"
        assert not tensor.is_cuda
    assert is_on_card(tensor)


def watched() -> dict[str, object]:
    """Everything that `fake_device` replaces."""
    names = "is_bf16_supported get_device_capability get_device_properties current_device device_count device"
    cuda = {name: getattr(torch.cuda, name) for name in [*names.split(), "is_current_stream_capturing", "synchronize"]}
    owners = [importlib.import_module(name) for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")]
    devices = "_get_foreach_kernels_supported_devices"
    return {
        **cuda,
        "engine": torch.autograd._engine_run_backward,
        "autocast": torch.clear_autocast_cache,
        "checkpoint": torch.utils.checkpoint._allowed_determinism_checks_to_fns,
        "available": importlib.import_module("torch.cuda.amp.common").amp_definitely_not_available,
        **{owner.__name__: getattr(owner, devices) for owner in owners},
        "resize": torch.UntypedStorage.resize_,
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    }


def test_everything_is_put_back_even_after_an_error() -> None:
    before = watched()
    during = {}

    def fail() -> None:
        with fake_device(H100):
            during.update(watched())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert during != before
    assert watched() == before


@pytest.mark.parametrize(
    ("card", "kernel"),
    [
        (H100, "_scaled_dot_product_cudnn_attention"),
        (A100, "_scaled_dot_product_flash_attention"),
        (CPU, "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_attention_takes_the_kernel_of_the_card(card: GPUParams, kernel: str) -> None:
    with fake_device(card), Operators() as operators:
        query, key = (torch.empty(2, 4, 32, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qk")
        functional.scaled_dot_product_attention(query, key, key, is_causal=True).sum().backward()
    assert kernel in operators.names()
    assert f"{kernel}_backward" in operators.names()


def test_heads_that_no_kernel_broadcasts_are_multiplied_out_as_torch_does_it() -> None:
    """Falcon's multi-query attention: one key head, no `enable_gqa`. The same operators as C++ runs on the CPU."""

    def attend(device: str) -> list[tuple[str, torch.dtype | None]]:
        make = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
        query, key = torch.zeros(2, 4, 32, 16, **make), torch.zeros(2, 1, 32, 16, **make)
        mask = torch.ones(2, 1, 32, 32, dtype=torch.bool, device=device)
        with Operators() as operators:
            functional.scaled_dot_product_attention(query, key, key, attn_mask=mask).sum().backward()
        products = ("bmm", "_safe_softmax", "_softmax_backward_data")
        copies = [seen for seen in operators.seen if seen[0] in (*products, "_to_copy")]
        assert operators.names().count("_safe_softmax") == 1
        return copies

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = attend("cpu")
    with fake_device(H100):
        assert attend("meta") == expected


def test_attention_pads_a_head_that_flash_does_not_take() -> None:
    with fake_device(A100), Operators() as operators:
        query = torch.empty(2, 4, 32, 12, dtype=torch.bfloat16, device="meta")
        output = functional.scaled_dot_product_attention(query, query, query)
    assert output.shape == query.shape
    assert "constant_pad_nd" in operators.names()


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    with fake_device(H100), Operators() as operators:
        functional.dropout(torch.empty(8, device="meta"), 0.1, training=True)
        functional.dropout(torch.empty(8, device="meta"), 0.1, training=False)
    assert operators.names().count("native_dropout") == 1


def test_values_that_nobody_has_are_zeros_and_are_noted() -> None:
    with fake_device(H100) as mode:
        assert torch.ones(3, device="cuda").tolist() == [0.0, 0.0, 0.0]
        assert torch.ones(3, device="cuda").cpu().shape == (3,)
    assert mode.read_values == ["tolist", "cpu"]


def test_autocast_casts_each_weight_once_and_forgets_it_at_the_end() -> None:
    with fake_device(H100) as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        cast: list[torch.Tensor] = []
        mode.autocast.on_weight_cast = cast.append
        weight = torch.empty(8, 8, device="cuda", requires_grad=True)
        rows = torch.empty(4, 8, device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                first = functional.linear(rows, weight)
                second = functional.linear(rows, weight)
        assert first.dtype == second.dtype == torch.bfloat16
    assert [copy.dtype for copy in cast] == [torch.bfloat16, torch.bfloat16], "one copy in each region"


def test_autocast_follows_its_lists() -> None:
    with fake_device(H100), torch.autocast("cuda", dtype=torch.bfloat16):
        half = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        norm = torch.ones(8, device="cuda")
        assert functional.layer_norm(half, (8,), norm).dtype == torch.float32
        assert functional.softmax(half, -1).dtype == torch.float32
        assert functional.gelu(half).dtype == torch.bfloat16
        assert (half.float() @ norm).dtype == torch.bfloat16
        assert half.pow(2).dtype == torch.float32
        targets = torch.zeros(4, dtype=torch.int64, device="cuda")
        assert functional.cross_entropy(half, targets).dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert functional.softmax(half, -1).dtype == torch.bfloat16


def test_frozen_weights_are_cast_every_time() -> None:
    with fake_device(H100) as mode, torch.autocast("cuda", dtype=torch.bfloat16), Operators() as operators:
        mode.autocast.on_weight_cast = lambda copy: pytest.fail("a frozen weight is not cached")
        weight = torch.empty(8, 8, device="cuda")
        for _ in range(2):
            functional.linear(torch.empty(4, 8, device="cuda", dtype=torch.bfloat16), weight)
    assert operators.names().count("_to_copy") == 2


def test_a_checkpoint_recomputes_on_the_card_in_backward() -> None:
    devices: list[str] = []

    def block(rows: torch.Tensor) -> torch.Tensor:
        devices.append(rows.device.type)
        return functional.scaled_dot_product_attention(rows, rows, rows)

    with fake_device(H100), Operators() as operators:
        rows = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, rows, use_reentrant=False).sum().backward()
    assert devices == ["cuda", "cuda"]
    assert operators.names().count("_scaled_dot_product_cudnn_attention") == 2


def test_optimizers_take_their_fused_and_foreach_kernels() -> None:
    for options, kernel in (({"fused": True}, "_fused_adamw_"), ({"foreach": True}, "_foreach_lerp_")):
        with fake_device(H100), Operators() as operators:
            weight = torch.nn.Parameter(torch.empty(4, device="cuda"))
            weight.grad = torch.empty(4, device="cuda")
            optimizer = torch.optim.AdamW([weight], **options)
            optimizer.step()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        assert kernel in operators.names()
        assert "_foreach_norm" in operators.names()


def test_a_weight_that_was_cast_where_nothing_is_recorded_still_gets_its_gradient() -> None:
    """A norm of DoRA reads the factors first; with a copy that has no gradient their inputs would not be kept."""

    def used_twice(device: str) -> tuple[int, int]:
        weight, rows = torch.nn.Parameter(torch.zeros(4, 4, device=device)), torch.zeros(2, 4, device=device)
        kept: list[torch.Tensor] = []
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                functional.linear(rows, weight)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda it: it):
                product = functional.linear(rows, weight)
        return product.requires_grad, len(kept)

    with fake_device(H100):
        rehearsed = used_twice("cuda")
    assert rehearsed == used_twice("cpu") == (True, 1)
