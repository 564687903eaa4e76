"""What calls cost the host."""

from dataclasses import fields

import pytest

from framework.memory.host_time import FITTED, HostCosts, host_seconds
from framework.memory.trace import GATHER, GRAPH, MODULE, RESTORE, WAIT, Launcher, Operation
from framework.schema.gpu import HostParams

UNIT = HostCosts(**{item.name: 10.0**place for place, item in enumerate(fields(HostCosts))})


@pytest.mark.parametrize(
    ("operation", "cost"),
    [
        (Operation("mul", "forward", 0, 8, ""), "forward"),
        (Operation("mul", "recompute", 0, 8, ""), "recompute"),
        (Operation("mul", "backward", 0, 8, ""), "backward"),
        (Operation("lerp", "optimizer_step", 0, 8, ""), "optimizer"),
        (Operation("lerp_", "optimizer_step", 0, 8, ""), "in_place"),
        (Operation("add", "loss", 0, 8, ""), "optimizer"),
        (Operation("view", "forward", 0, 0, ""), "forward_view"),
        (Operation("view", "recompute", 0, 0, ""), "recompute_view"),
        (Operation("view", "backward", 0, 0, ""), "backward_view"),
        (Operation("detach", "backward", 0, 0, ""), "backward_view"),
        (Operation(RESTORE, "backward", 0, 0, ""), "unpack"),
        (Operation("generated", "backward", 0, 8, "", (), Launcher.COMPILED), "compiled"),
        (Operation("view", "forward", 0, 0, "", (), Launcher.COMPILED), "forward_view"),
        (Operation("kernel", "forward", 0, 8, "", (), Launcher.TRITON), "triton"),
        (Operation("unpack", "forward", 0, 8, "", (), Launcher.BITSANDBYTES), "bitsandbytes"),
        (Operation("update", "optimizer_step", 0, 8, "", (), Launcher.BITSANDBYTES), "bitsandbytes_update"),
        (Operation(GRAPH, "forward", 0, 0, ""), "graph"),
        (Operation(GRAPH, "recompute", 0, 0, ""), "recomputed_graph"),
        (Operation(MODULE, "forward", 0, 0, ""), "module"),
        (Operation(MODULE, "recompute", 0, 0, ""), "recomputed_module"),
        (Operation(WAIT, "forward", 0, 0, ""), "wait"),
        (Operation(GATHER, "forward", 0, 8, ""), "collective"),
    ],
)
def test_each_kind_of_call_has_its_own_cost(operation: Operation, cost: str) -> None:
    assert host_seconds(operation, UNIT) == getattr(UNIT, cost)


def test_a_product_costs_more_and_so_does_each_tensor_of_a_list() -> None:
    product = Operation("mm", "forward", 100, 8, "", (1, 2, 2, 2))
    assert host_seconds(product, UNIT) == UNIT.forward + UNIT.product
    lists = Operation("_foreach_mul_", "optimizer_step", 0, 8, "", (), Launcher.TORCH, 5)
    assert host_seconds(lists, UNIT) == UNIT.in_place + 4 * UNIT.listed


def test_a_slower_host_is_slower_at_everything_and_a_measured_one_by_kind() -> None:
    assert all(getattr(FITTED.scaled(2.0), item.name) == 2 * getattr(FITTED, item.name) for item in fields(FITTED))
    host = HostParams(python=2, operator=3, view=5, backward=7, graph=11)
    factors = {item.name: getattr(UNIT.of(host), item.name) / getattr(UNIT, item.name) for item in fields(UNIT)}
    assert set(factors.values()) == {2, 3, 5, 7, 11}, "no cost is left out"
    assert (factors["triton"], factors["forward"], factors["unpack"]) == (2, 3, 5)
    assert (factors["backward"], factors["graph"]) == (7, 11)
