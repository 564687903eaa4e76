"""From what was measured on a card to a preset; the measuring itself on a card only."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from framework.checks import check_request
from framework.errors import RequestError
from framework.memory.cards import assumptions, read_card
from framework.run.planning.calibrate import REACHED, Calibration, calibrate, to_card, to_yaml
from framework.schema.gpu import GPUParams

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
    cublas_workspace_bytes=33554432,
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
    assert {field: card[field] for field in same} == {field: shipped[field] for field in same}
    assert set(REACHED) <= set(GPUParams.model_fields)


def test_every_figure_says_how_it_was_measured_and_a_plan_has_nothing_to_assume() -> None:
    card = GPUParams(**to_card(H100))
    where = "measured on NVIDIA H100 80GB HBM3, driver 580.159.04, torch 2.11.0+cu130, 2026-11-28"
    assert all(where in source for source in card.sources.values())
    assert "3.01e+12, divided by 0.899" in card.sources["bandwidth_bytes_per_second"]
    assert assumptions(card) == []


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
        calibrate()


@pytest.mark.gpu
def test_a_real_card() -> None:
    found = calibrate()
    card = GPUParams(**to_card(found))
    assert 200 << 20 < found.context_bytes < 2 << 30
    assert 1 << 20 <= found.cublas_workspace_bytes <= 128 << 20
    assert card.usable_bytes is not None
    assert card.usable_bytes <= torch.cuda.mem_get_info()[1]
    assert 1e11 < found.rates["bandwidth_bytes_per_second"] < 2e13
    assert found.rates["fp16_flops"] > found.rates["fp32_flops"]
