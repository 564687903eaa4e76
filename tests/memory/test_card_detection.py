import os
import time
from pathlib import Path

import pytest

from framework.memory import cards
from framework.memory.cards import InstalledCard, card_names, card_of_size, detect, parse_nvidia_smi, visible_cards


def card(product: str, mebibytes: int, capability: str = "8.0", is_partitioned: bool = False) -> InstalledCard:
    return InstalledCard("0", "GPU-0", product, mebibytes, capability, is_partitioned)


@pytest.mark.parametrize(
    ("product", "mebibytes", "name"),
    [
        ("Tesla T4", 15360, "t4_16gb"),
        ("Tesla T4", 15109, "t4_16gb"),
        ("Tesla V100-SXM2-16GB", 16384, "v100_16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100_32gb"),
        ("Tesla V100-PCIE-32GB", 32768, "v100_32gb"),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx3060_12gb"),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx3090_24gb"),
        ("GeForce RTX 3090", 24268, "rtx3090_24gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti_16gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090_24gb"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx5090_32gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx_pro_6000_96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, "rtx_pro_6000_96gb"),
        ("NVIDIA A10G", 23028, "a10g_24gb"),
        ("NVIDIA L4", 23034, "l4_24gb"),
        ("NVIDIA RTX A6000", 49140, "a6000_48gb"),
        ("NVIDIA L40S", 46068, "l40s_48gb"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100_40gb"),
        ("NVIDIA A100-PCIE-40GB", 40536, "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", 81251, "a100_80gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100_80gb"),
        ("NVIDIA H200", 143771, "h200_141gb"),
        ("NVIDIA B200", 183359, "b200_180gb"),
        ("NVIDIA GH200 480GB", 97871, "gh200_96gb"),
    ],
)
def test_products_are_recognised(product: str, mebibytes: int, name: str) -> None:
    assert card(product, mebibytes).name == name
    assert name in card_names()


@pytest.mark.parametrize(
    ("product", "mebibytes", "name"),
    [
        ("NVIDIA GeForce RTX 3080", 10240, "10gb"),
        ("NVIDIA GeForce RTX 3060", 8192, "8gb"),
        ("NVIDIA GeForce RTX 3090 Ti", 24564, "24gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "8gb"),
        ("NVIDIA H100 PCIe", 81559, "80gb"),
        ("NVIDIA H100 NVL", 95830, "94gb"),
        ("NVIDIA A100-SXM-64GB", 65536, "64gb"),
        ("NVIDIA GH200 144G HBM3e", 146831, "143gb"),
        ("NVIDIA L40", 46068, "45gb"),
        ("NVIDIA RTX A6000", 46068, "45gb"),  # error correction switched on: 3 GiB less than the card file says
    ],
)
def test_other_cards_are_known_by_their_size(product: str, mebibytes: int, name: str) -> None:
    assert card(product, mebibytes).name == name
    assert card_of_size(name) is not None


def test_a_card_without_bfloat16_that_we_have_no_facts_of_is_not_guessed() -> None:
    assert card("NVIDIA GeForce GTX 1080 Ti", 11264, "6.1").name is None
    assert card("NVIDIA GeForce RTX 2080 Ti", 11264, "7.5").name is None
    assert card("Something", 11264, "[N/A]").name is None


def test_a_partitioned_card_is_not_the_whole_card() -> None:
    assert card("NVIDIA A100-SXM4-80GB", 81920, is_partitioned=True).name is None


SMI = """\
0, GPU-aaaa1111, NVIDIA GeForce RTX 3090, 24576, 8.6, [N/A]
1, GPU-bbbb2222, NVIDIA GeForce RTX 4090, 24564, 8.9, [N/A]
2, GPU-aaaa3333, NVIDIA A100-SXM4-80GB, 81920, 8.0, Enabled
"""


def test_rows_are_read_and_noise_is_passed_over() -> None:
    cards = parse_nvidia_smi("Warning: persistence mode\n" + SMI + "3, GPU-c, Broken, [N/A], 8.0, [N/A]\n")
    assert [row.product for row in cards] == [
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA A100-SXM4-80GB",
    ]
    assert [row.is_partitioned for row in cards] == [False, False, True]
    assert parse_nvidia_smi("No devices were found\n") == []


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, "012"),
        ("", ""),
        ("-1", ""),
        ("1", "1"),
        ("2, 0", "20"),
        ("GPU-bbbb2222", "1"),
        ("GPU-b", "1"),
        ("GPU-aaaa", ""),  # two cards begin so
        ("0,7,1", "0"),  # CUDA stops at the first entry that names no card
        ("MIG-aaaa1111", ""),
    ],
)
def test_cards_hidden_from_cuda_are_not_planned_for(setting: str | None, indices: str) -> None:
    assert "".join(row.index for row in visible_cards(parse_nvidia_smi(SMI), setting)) == indices


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a stand-in `nvidia-smi`, first on the path; without a file there is none at all."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "nvidia-smi"


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_no_driver_no_card(smi: Path) -> None:
    assert not smi.exists()
    assert detect() is None


def test_the_installed_card_is_named(smi: Path) -> None:
    row = "0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled"
    write_program(smi, f'case "$*" in *memory.total*) echo "{row}";; esac')
    assert detect() == "h100_80gb"


def test_of_several_cards_it_is_the_smallest(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(smi, f"echo '{SMI}'")
    assert detect() == "rtx4090_24gb"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert detect() == "rtx3090_24gb"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect() is None


def test_a_driver_that_fails_is_no_card(smi: Path) -> None:
    write_program(smi, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert detect() is None


def test_a_driver_that_hangs_is_given_up(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = next(path for path in ("/bin/sleep", "/usr/bin/sleep") if os.path.exists(path))
    write_program(smi, f"exec {sleep} 250")
    monkeypatch.setattr(cards, "_TIMEOUT_SECONDS", 0.2)
    started = time.monotonic()
    assert detect() is None
    assert time.monotonic() - started < 200
