"""From what was measured on a card to a preset; the measuring itself on a card only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from framework.checks import check_request
from framework.errors import RequestError
from framework.memory.cards import assumptions, read_card
from framework.memory.roofline import CALIBRATED
from framework.run.planning.calibrate import (
    REACHED,
    Calibration,
    calibrate,
    calibrate_host,
    product_start,
    section,
    to_card,
    to_yaml,
)
from framework.run.planning.host_probe import REFERENCE, HostSpeed
from framework.run.planning.measurements import Measurements
from framework.schema.gpu import GPUParams, HostParams

H100 = Calibration(
    device_name="NVIDIA H100 80GB HBM3",
    driver="580.159.04",
    torch_version="2.11.0+cu130",
    date="2026-11-28",
    capability="9.0",
    multiprocessors=132,
    total_bytes=85017493504,
    others_bytes=0,
    context_bytes=804061184,
    bare_context_bytes=500 << 20,
    library_context_bytes={},
    allocator="native, no settings",
    cublas_workspace_bytes=33554432,
    l2_cache_bytes=52428800,
    product_curve={512: 10e-6, 8192: 1.4e-3},
    host=HostParams(python=1.0, operator=1.25, view=1.0, backward=1.0, graph=1.0),
    rates={
        "bandwidth_bytes_per_second": 3.01e12,
        "host_link_bytes_per_second": 5.5e10,
        "fp32_flops": 5.36e13,
        "bf16_flops": 7.9e14,
        "fp16_flops": 7.9e14,
        "fp8_flops": 1.5e15,
    },
)


def test_it_composes_as_a_preset(write) -> None:
    write(to_yaml(H100), "card.yaml")
    report = check_request(write("model: {model_name: a}\n"), ["gpu=./card.yaml"])
    assert report.problems == ()
    assert report.composition is not None
    card, expected = report.composition.config.gpu, GPUParams(**to_card(H100))
    for field in GPUParams.model_fields:
        value = getattr(expected, field)
        assert getattr(card, field) == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), field
    assert card.name == "nvidia_h100_80gb_hbm3"
    assert report.composition.origins["gpu.context_bytes"].where == "./card.yaml:8"


def test_rates_are_given_as_the_data_sheet_has_them() -> None:
    """The roofline takes its shares of data sheet rates: an H100 measured is an H100 shipped."""
    card, shipped = to_card(H100), read_card("h100_80gb")
    for field in H100.rates:
        assert card[field] == pytest.approx(shipped[field], rel=0.001), field
    same = ("capacity_bytes", "capability", "multiprocessors", "context_bytes", "cublas_workspace_bytes")
    same += ("l2_cache_bytes",)
    assert {field: card[field] for field in same} == {field: shipped[field] for field in same}
    assert set(REACHED) <= set(GPUParams.model_fields)


def test_every_figure_says_how_it_was_measured_and_a_plan_has_nothing_to_assume() -> None:
    card = GPUParams(**to_card(H100))
    where = "doctor --calibrate on NVIDIA H100 80GB HBM3, driver 580.159.04, torch 2.11.0+cu130, 2026-11-28"
    assert all(where in source for source in card.sources.values())
    assert "3.01e+12, divided by 0.899" in card.sources["bandwidth_bytes_per_second"]
    assert assumptions(card) == [
        "measured by doctor --calibrate (NVIDIA H100 80GB HBM3, driver 580.159.04, torch 2.11.0+cu130, 2026-11-28): "
        "capacity_bytes, usable_bytes, capability, multiprocessors, bandwidth_bytes_per_second, fp32_flops, "
        "bf16_flops, fp16_flops, fp8_flops, product_seconds, host_link_bytes_per_second, context_bytes, "
        "cublas_workspace_bytes, l2_cache_bytes, host"
    ]


def test_the_context_of_the_libraries_in_use_is_what_is_planned_with() -> None:
    card = GPUParams(**to_card(replace(H100, library_context_bytes={"liger-kernel": 900 << 20})))
    assert card.context_bytes == 900 << 20
    message = "500 MiB before a step, 767 MiB with the kernels of a step, 900 MiB with those of liger-kernel"
    assert message in card.sources["context_bytes"]
    assert "allocator native, no settings" in card.sources["context_bytes"]


def test_a_product_starts_for_what_its_arithmetic_leaves() -> None:
    """The largest fills the card but for its last wave: 2,048 tiles of 132 at once are 16 waves. The smallest has 64
    tiles of 64 x 64, which count 0.8. Every kernel has a start besides."""
    rate = 2 * 8192**3 / (2048 / (16 * 132)) / 1.4e-3
    expected = 10e-6 - CALIBRATED.launch_seconds - 2 * 512**3 / (0.8 * 64 / 132) / rate
    assert product_start({512: 10e-6, 8192: 1.4e-3}, 132) == pytest.approx(expected)
    assert product_start({512: 1e-9, 8192: 1.4e-3}, 132) == 0


def test_without_a_card_the_host_is_measured_and_goes_into_a_recipe(write, monkeypatch) -> None:
    seconds = {"python": 3.2e-6, "operator": 5e-6, "view": 1.6e-6, "backward": 4e-6, "graph": 1e-4}
    monkeypatch.setattr("framework.run.planning.calibrate.probe_host", lambda: HostSpeed(seconds, 1.63))
    found = calibrate_host()
    text = section(found, "a title")
    write("model: {model_name: a}\n" + text, "recipe.yaml")
    report = check_request("recipe.yaml", ["gpu=h100_80gb"])
    assert report.problems == ()
    assert report.composition is not None
    card = report.composition.config.gpu
    assert card.host is not None
    assert card.host.python == pytest.approx(3.2e-6 / REFERENCE["python"], abs=1e-3)
    assert card.bf16_flops == 9.894e14
    assert any("doctor --calibrate" in line and line.endswith(": host") for line in assumptions(card))
    assert "slowest second took 1.63 times its fastest" in found["sources"]["host"]


def test_what_others_take_is_not_usable() -> None:
    card = GPUParams(**to_card(replace(H100, others_bytes=300 << 20)))
    assert card.usable_bytes == H100.total_bytes - (300 << 20)
    assert "300 MiB were in use by others" in card.sources["usable_bytes"]


def test_a_card_without_fp8_has_none(tmp_path: Path) -> None:
    old = replace(H100, capability="7.5", rates={"fp32_flops": 6e12})
    card = GPUParams(**to_card(old))
    assert (card.bf16_flops, card.fp8_flops) == (None, None)
    assert card.fp32_flops == pytest.approx(6e12 / REACHED["fp32_flops"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_is_refused() -> None:
    with pytest.raises(RequestError, match="no CUDA card"):
        calibrate(Measurements())


@pytest.mark.gpu
def test_a_real_card() -> None:
    with Measurements() as measured:
        found = calibrate(measured)
    card = GPUParams(**to_card(found))
    assert 200 << 20 < found.context_bytes < 2 << 30
    assert 1 << 20 <= found.cublas_workspace_bytes <= 128 << 20
    assert card.usable_bytes is not None
    assert card.usable_bytes <= torch.cuda.mem_get_info()[1]
    assert 1e11 < found.rates["bandwidth_bytes_per_second"] < 2e13
    assert found.rates["fp16_flops"] > found.rates["fp32_flops"]
