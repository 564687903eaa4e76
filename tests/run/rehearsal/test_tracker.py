"""Births and deaths of memory, what they are for, and the sums that autograd makes in place."""

import pytest
import torch
import torch.nn.functional as functional
import torch.utils.checkpoint

from framework.memory.allocator import CachingAllocator, replay
from framework.memory.trace import RESTORE, Kind, Space, Trace
from framework.run.rehearsal.fake_device import fake_device
from framework.run.rehearsal.tracker import Tracker
from tests.run.reference import H100

WORKSPACE = H100.cublas_workspace_bytes


def living(trace: Trace) -> dict[Kind, list[int]]:
    """Sizes of live tensors at the end, by kind, without cuBLAS's workspaces."""
    alive: dict[int, None] = {}
    for event in trace.events:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    found: dict[Kind, list[int]] = {}
    for block in alive:
        if trace.sizes[block] != WORKSPACE:
            found.setdefault(trace.kinds[block], []).append(trace.sizes[block])
    return found


def test_views_are_no_births_and_storages_die_with_their_last_view() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        tracker.observe("forward")
        tensor = torch.empty(4, 4, device="cuda")
        view = tensor.t()[0]
        del tensor
        assert tracker.trace.events == [0]
        del view
    assert tracker.trace.events == [0, ~0]
    assert tracker.trace.sizes == [64]


def test_dropout_allocates_its_mask_before_its_result() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        kept = torch.empty(1000, device="cuda")
        functional.dropout(kept, 0.5)
    assert tracker.trace.sizes == [4000, 1000, 4000]


def test_what_does_not_outlive_forward_was_temporary() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        tracker.observe("forward")
        torch.empty(4, device="cuda").relu_()
        kept = torch.empty(8, device="cuda")
        tracker.observe("backward")
        del kept
    assert tracker.trace.kinds == [Kind.TEMPORARIES, Kind.ACTIVATIONS]


def test_every_kind_of_a_small_step() -> None:
    tracker = Tracker(H100, vocabulary=32)
    with fake_device(H100) as mode:
        mode.autocast.on_weight_cast = lambda copy: tracker.claim([copy], Kind.AUTOCAST_COPIES)
        weight = torch.nn.Parameter(torch.empty(32, 16, device="cuda"))
        optimizer = torch.optim.AdamW([weight], fused=True)
        with tracker:
            tracker.claim([weight], Kind.WEIGHTS)
            rows = torch.empty(64, 16, device="cuda")
            tracker.observe("forward")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = functional.linear(rows, weight)
                alive = living(tracker.trace)
                loss = logits.float().sum()
            assert alive[Kind.AUTOCAST_COPIES] == [2 * 32 * 16]
            assert alive[Kind.LOGITS_AND_LOSS] == [2 * 64 * 32]
            tracker.observe("backward")
            loss.backward()
            tracker.observe("optimizer_step")
            tracker.claim([weight.grad], Kind.GRADIENTS)
            optimizer.step()
            tracker.claim(list(optimizer.state[weight].values()), Kind.OPTIMIZER)
            del logits, loss
    found = living(tracker.trace)
    assert found[Kind.GRADIENTS] == [4 * 32 * 16]
    assert sorted(found[Kind.OPTIMIZER]) == [4, 4 * 32 * 16, 4 * 32 * 16]
    assert found[Kind.WEIGHTS] == [4 * 32 * 16]
    assert Kind.AUTOCAST_COPIES not in found


def test_cublas_takes_a_workspace_in_forward_and_another_in_backward() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        weight = torch.empty(8, 8, device="cuda", requires_grad=True)
        for _ in range(2):
            (torch.empty(4, 8, device="cuda") @ weight).sum().backward()
    assert tracker.trace.sizes.count(WORKSPACE) == 2


def peak_of_sum(view: bool) -> float:
    """MiB at the peak of backward for a weight of 1 MiB that is used twice, so that two gradients are added.

    The gradient of a matrix product's right side is a transposed view of what the product returned; that of a
    multiplication is not.
    """
    with fake_device(H100), Tracker(H100) as tracker:
        weight = torch.empty(512, 512, device="cuda", requires_grad=True)
        rows = torch.empty(4, 512, device="cuda")
        scale = torch.empty(512, 512, device="cuda")
        tracker.observe("forward")
        uses = [functional.linear(rows, weight).sum() if view else (weight * scale).sum() for _ in range(2)]
        total = uses[0] + uses[1]
        del uses
        before = len(tracker.trace.events)
        tracker.observe("backward")
        total.backward()
    sizes = [0 if size == WORKSPACE else size for size in tracker.trace.sizes]
    alive = peak = 0
    for event in tracker.trace.events[before:]:
        alive += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, alive)
    return peak / (1 << 20)


def test_autograd_adds_into_the_older_gradient_unless_it_is_a_view() -> None:
    assert 1.9 < peak_of_sum(view=False) < 2.1
    assert 2.9 < peak_of_sum(view=True) < 3.1


@pytest.mark.parametrize("view", [False, True])
def test_the_rule_of_in_place_sums_is_that_of_the_real_engine(view: bool) -> None:
    """On real CPU tensors without a dispatch mode: the sum has the older gradient's storage, or a new one."""
    seen: list[int] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):  # type: ignore[no-untyped-def]
            return tensor * 2

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            fresh = torch.full((4, 4), 2.0)
            seen.append(fresh.data_ptr())
            return fresh.t() if view else fresh

    leaf = torch.ones(4, 4, requires_grad=True)
    middle = leaf * 1
    sums: list[int] = []
    middle.register_hook(lambda gradient: sums.append(gradient.data_ptr()))
    (Twice.apply(middle).sum() + Twice.apply(middle).sum()).backward()
    assert (sums[0] in seen) is not view


def test_checkpoints_recompute_activations() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        tracker.observe("forward")
        rows = torch.empty(1 << 10, device="cuda", requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(lambda x: (x.sin() * x.cos()).sum(), rows, use_reentrant=False)
        tracker.observe("backward")
        before = len(tracker.trace.sizes)
        out.backward()
    assert Kind.ACTIVATIONS in tracker.trace.kinds[before:]
    assert Kind.TEMPORARIES in tracker.trace.kinds[before:]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_only_a_checkpoint_restores_what_was_saved(checkpointed: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        tracker.note_module()
        return (x.sin() * x.cos()).sum()

    with fake_device(H100), Tracker(H100) as tracker:
        weight = torch.empty(1 << 10, device="cuda", requires_grad=True)
        tracker.observe("forward")
        out = torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False) if checkpointed else block(weight)
        tracker.observe("backward")
        out.backward()
    names = [call.name for call in tracker.trace.operations if call.phase == "backward"]
    # four saved tensors are put away again and taken back; the gradient of the weight is told apart without them alone
    assert (names.count(RESTORE), names.count("detach")) == ((9, 0) if checkpointed else (0, 1))


def test_a_resized_storage_is_freed_and_filled_again() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        tensor = torch.empty(1000, device="cuda")
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
    assert [tracker.trace.sizes[event] if event >= 0 else event for event in tracker.trace.events][:4] == [
        4000,
        ~0,
        0,
        ~1,
    ]
    assert tracker.trace.sizes[-1] == 4000


def test_a_quantized_weight_is_unpacked_before_the_result_of_its_product_is_there() -> None:
    """A cached block of the weight's size is then the weight's, not the result's."""
    pytest.importorskip("bitsandbytes")
    with fake_device(H100), Tracker(H100) as tracker:
        tracker.observe("forward")
        rows = torch.empty(4096, 512, dtype=torch.bfloat16, device="cuda")
        packed = torch.empty(256 * 512 // 2, 1, dtype=torch.uint8, device="cuda")
        scales = torch.empty(256 * 512 // 64, device="cuda")
        born = len(tracker.trace.sizes)
        torch.ops.bitsandbytes.gemm_4bit.default(rows, packed, [256, 512], scales, 64, "nf4")
    sizes = [size for size in tracker.trace.sizes[born:] if size != WORKSPACE]
    assert sizes == [2 * 256 * 512, 2 * 4096 * 256]


def test_a_quantized_weights_bias_and_nested_scales_are_found_wherever_they_are_passed() -> None:
    pytest.importorskip("bitsandbytes")
    with fake_device(H100), Tracker(H100) as tracker:
        tracker.observe("forward")
        rows, bias = (torch.empty(*size, dtype=torch.bfloat16, device="cuda") for size in ((4096, 512), (256,)))
        packed = torch.empty(256 * 512 // 2, 1, dtype=torch.uint8, device="cuda")
        scales, count = torch.empty(8, device="cuda"), 256 * 512 // 64
        nested = {
            "absmax_8bit": torch.empty(count, dtype=torch.uint8, device="cuda"),
            "absmax_code": torch.empty(256, device="cuda"),
            "absmax_offset": torch.empty((), device="cuda"),
        }
        born = len(tracker.trace.sizes)
        torch.ops.bitsandbytes.gemm_4bit.default(rows, packed, [256, 512], scales, 64, "nf4", bias=bias, **nested)
    scales_as_float32 = [4 * count] * 2
    workspaces = [WORKSPACE, 1 << 20]  # the small one is cuBLASLt's, which adds the bias
    assert tracker.trace.sizes[born:] == [*scales_as_float32, 2 * 256 * 512, 2 * 4096 * 256, *workspaces]


def test_a_copy_to_the_host_takes_host_memory_in_the_trace_and_none_here() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        copy = torch.empty(1 << 20, device="cuda").to("cpu")
        assert copy.untyped_storage().nbytes() == 4
    assert tracker.trace.spaces[1] is Space.HOST
    assert replay(tracker.trace, CachingAllocator())[0].host == 4 << 20


def test_questions_about_values_are_answered_as_without_padding() -> None:
    with fake_device(H100):
        with Tracker(H100) as tracker:
            assert bool((torch.ones(3, device="cuda") == 1).all())
            assert torch.ones(1, device="cuda").item() == 1.0
        with Tracker(H100, padded=True):
            assert not bool((torch.ones(3, device="cuda") == 1).all())
    assert tracker.read_values


def test_operations_carry_flops_and_bytes() -> None:
    with fake_device(H100), Tracker(H100) as tracker:
        left = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        right = torch.empty(32, 16, device="cuda", dtype=torch.bfloat16)
        left @ right
        left.t()
    product, view = tracker.trace.operations[-2:]
    assert (product.name, product.flops, product.dtype) == ("mm", 2 * 64 * 32 * 16, "bfloat16")
    assert product.bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert product.shape == (1, 64, 16, 32)
    assert (view.name, view.bytes) == ("t", 0)


def test_causal_attention_counts_half_the_scores() -> None:
    def flops(causal: bool) -> int:
        with fake_device(H100), Tracker(H100) as tracker:
            query = torch.empty(1, 2, 64, 16, device="cuda", dtype=torch.bfloat16)
            functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
        return max(operation.flops for operation in tracker.trace.operations)

    assert flops(causal=True) * 2 == flops(causal=False) == 2 * 2 * 2 * 64 * 64 * 16
