import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.installation import shipped
from framework.memory.cards import (
    GIB,
    SIZE_USABLE_SHARE,
    assumptions,
    best_autocast,
    capability_of,
    card_names,
    card_of_size,
    context_of,
    read_card,
    size_meant,
    smallest,
    source_of,
    supports_bf16,
)
from framework.schema.choices import MixedPrecision
from framework.schema.gpu import GPUParams

CONTRACT_CARDS = [
    "t4_16gb",
    "v100_16gb",
    "v100_32gb",
    "rtx3060_12gb",
    "rtx3090_24gb",
    "rtx4060ti_16gb",
    "rtx4090_24gb",
    "rtx5090_32gb",
    "rtx_pro_6000_96gb",
    "a10g_24gb",
    "l4_24gb",
    "a6000_48gb",
    "l40s_48gb",
    "a100_40gb",
    "a100_80gb",
    "h100_80gb",
    "h200_141gb",
    "b200_180gb",
    "gh200_96gb",
    "mi300x_192gb",
    "cpu",
]
CARDS = [name for name in CONTRACT_CARDS if name != "cpu"]
CONTEXTS = Path(__file__).parents[1] / "calibration" / "h100_contexts.json"

# Operations that one multiprocessor's tensor cores do per clock in fp16 with fp32 accumulation, dense: NVIDIA's and
# AMD's architecture papers. A GeForce (and the A10G) does half of what the professional card of its generation does.
TENSOR_OPERATIONS_PER_CLOCK = {
    **dict.fromkeys(["rtx3060_12gb", "rtx3090_24gb", "rtx4060ti_16gb", "rtx4090_24gb", "rtx5090_32gb"], 512),
    "a10g_24gb": 512,
    **dict.fromkeys(["t4_16gb", "v100_16gb", "v100_32gb", "a6000_48gb", "l4_24gb", "l40s_48gb"], 1024),
    "rtx_pro_6000_96gb": 1024,
    **dict.fromkeys(["a100_40gb", "a100_80gb", "mi300x_192gb"], 2048),
    **dict.fromkeys(["h100_80gb", "h200_141gb", "gh200_96gb"], 4096),
    "b200_180gb": 8192,
}


def typed(name: str) -> GPUParams:
    return GPUParams(**read_card(name))


def facts(card: GPUParams) -> dict[str, Any]:
    """The facts that are stated, without the bookkeeping fields."""
    return card.model_dump(exclude={"name", "count", "sources"}, exclude_none=True)


def test_the_shipped_cards_are_those_of_the_contract() -> None:
    assert card_names() == sorted(CONTRACT_CARDS)


@pytest.mark.parametrize("name", CONTRACT_CARDS)
def test_a_file_sets_only_gpu_and_carries_its_own_name(name: str) -> None:
    text = (shipped("conf") / "gpu" / f"{name}.yaml").read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)) - {"nvidia_smi"} == {"gpu"}
    assert typed(name).name == name
    assert "count" not in read_card(name), "how many cards there are is no fact of a card"


@pytest.mark.parametrize("name", CARDS)
def test_every_fact_has_a_source_and_every_source_a_fact(name: str) -> None:
    card = typed(name)
    assert [fact for fact in facts(card) if not source_of(card, fact)] == []
    assert set(card.sources) - {"others"} <= set(facts(card))


@pytest.mark.parametrize("name", CARDS)
def test_memory_is_less_than_nominal_and_more_than_a_plain_size_counts_on(name: str) -> None:
    card, nominal = typed(name), int(name.rpartition("_")[2].removesuffix("gb")) * GIB
    assert card.capacity_bytes is not None
    assert card.usable_bytes is not None
    assert SIZE_USABLE_SHARE * nominal < card.usable_bytes <= card.capacity_bytes < nominal
    assert card.capacity_bytes - card.usable_bytes < 0.02 * nominal


@pytest.mark.parametrize("name", CARDS)
def test_rates_stand_in_the_ratios_of_dense_arithmetic(name: str) -> None:
    card = typed(name)
    assert card.fp16_flops is not None
    assert card.fp32_flops is not None
    assert card.fp16_flops > 1.9 * card.fp32_flops
    if card.bf16_flops is not None:
        assert card.tf32_flops is not None
        assert card.bf16_flops == card.fp16_flops == pytest.approx(2 * card.tf32_flops, rel=0.03)
    if card.fp8_flops is not None:
        assert card.fp8_flops == pytest.approx(2 * card.fp16_flops, rel=0.03)


@pytest.mark.parametrize("name", CARDS)
def test_no_rate_is_a_sparse_one(name: str) -> None:
    card = typed(name)
    assert card.fp16_flops is not None
    assert card.multiprocessors is not None
    clock = card.fp16_flops / (card.multiprocessors * TENSOR_OPERATIONS_PER_CLOCK[name])
    assert 1.35e9 < clock < 2.65e9, "twice or half the dense rate would need a clock that no such card runs at"


@pytest.mark.parametrize("name", CARDS)
def test_number_formats_follow_the_capability(name: str) -> None:
    card = typed(name)
    if card.capability is None:
        assert name == "mi300x_192gb"
        assert supports_bf16(card)
        assert card.fp8_flops is not None
        return
    capability = capability_of(card.capability)
    assert (card.bf16_flops is not None) is supports_bf16(card) is (capability >= (8, 0))
    assert (card.fp8_flops is not None) is (capability >= (8, 9))
    assert card.cublas_workspace_bytes == (32 * 2**20 if capability >= (9, 0) else 4096 * 2**11 + 16 * 2**13)


@pytest.mark.parametrize(
    ("fact", "rising"),
    [
        ("bandwidth_bytes_per_second", "l4_24gb t4_16gb a10g_24gb v100_16gb a100_40gb a100_80gb h100_80gb b200_180gb"),
        ("bandwidth_bytes_per_second", "rtx4060ti_16gb rtx3060_12gb rtx3090_24gb rtx4090_24gb rtx5090_32gb"),
        ("bandwidth_bytes_per_second", "h100_80gb gh200_96gb h200_141gb mi300x_192gb b200_180gb"),
        ("bf16_flops", "rtx3060_12gb rtx4060ti_16gb a10g_24gb l4_24gb a6000_48gb a100_40gb l40s_48gb h100_80gb"),
        ("bf16_flops", "rtx3090_24gb rtx4090_24gb rtx5090_32gb rtx_pro_6000_96gb h100_80gb mi300x_192gb b200_180gb"),
        ("link_bytes_per_second", "t4_16gb rtx4090_24gb rtx5090_32gb v100_16gb a100_40gb h100_80gb b200_180gb"),
        ("host_link_bytes_per_second", "t4_16gb a100_80gb h100_80gb gh200_96gb"),
    ],
)
def test_newer_and_larger_cards_are_faster(fact: str, rising: str) -> None:
    values = [getattr(typed(name), fact) for name in rising.split()]
    assert values == sorted(values)
    assert len(set(values)) == len(values)


def test_only_what_was_measured_is_called_measured() -> None:
    measured = {name for name in CARDS if str(source_of(typed(name), "context_bytes")).startswith("measured")}
    assert measured == {"h100_80gb"}
    contexts = {typed(name).context_bytes for name in CARDS}
    assert contexts == {typed("h100_80gb").context_bytes}, "an assumed context is the H100's"


def test_the_h100_is_as_it_was_measured() -> None:
    measured = json.loads(CONTEXTS.read_text(encoding="utf-8"))
    card = typed("h100_80gb")
    assert measured["total_bytes"] == card.capacity_bytes
    contexts = measured["context_bytes"]
    (usual, seen), *_ = Counter(contexts).most_common()
    assert usual == card.context_bytes
    assert seen > len(contexts) / 2
    assert max(contexts) <= usual + 2**20


@pytest.mark.parametrize("text", ["24gb", "24GB", "24 GB", " 24gib ", "24g"])
def test_a_plain_size_is_a_conservative_card(text: str) -> None:
    facts_of_size = card_of_size(text)
    assert facts_of_size is not None
    card = GPUParams(**facts_of_size)
    assert card.name == "24gb"
    assert card.capacity_bytes == 24 * GIB
    assert card.usable_bytes is not None
    assert card.usable_bytes < min(typed(name).usable_bytes or 0 for name in CARDS if name.endswith("_24gb"))
    assert card.capability == "8.6"
    assert best_autocast(card) is MixedPrecision.BF16
    assert not any(fact.endswith(("_flops", "_per_second")) for fact in facts(card)), "a size says nothing of speed"
    assert [fact for fact in facts(card) if not source_of(card, fact)] == []


@pytest.mark.parametrize("text", ["1gb", "1024gb"])
def test_sizes_run_from_1_to_1024(text: str) -> None:
    assert card_of_size(text) is not None


@pytest.mark.parametrize(
    "text", ["", "gb", "24", "0gb", "1025gb", "99999gb", "-24gb", "24.5gb", "24tb", "24mb", "h100_80gb", "24gb,24gb"]
)
def test_what_is_no_size_is_no_card(text: str) -> None:
    assert card_of_size(text) is None


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        read_card("../model/llama3.2_1b")


def sized(text: str) -> dict[str, Any]:
    card = card_of_size(text)
    assert card is not None
    return card


def test_a_mixed_list_plans_for_the_smallest() -> None:
    chosen = smallest([sized("40gb"), sized("40gb"), sized("80gb")])
    assert (chosen["name"], chosen["count"]) == ("40gb", 3)
    assert chosen["usable_bytes"] == sized("40gb")["usable_bytes"]
    assumption = assumptions(GPUParams(**chosen))
    assert any("40gb, 40gb, 80gb: equal shares, so 40gb is the limit" in line for line in assumption)


def test_equal_cards_stay_what_they_are() -> None:
    assert smallest([read_card("h100_80gb")] * 8) == {**read_card("h100_80gb"), "count": 8}
    assert smallest([read_card("h100_80gb")])["count"] == 1


def test_a_mixed_list_can_do_only_what_all_cards_can() -> None:
    cards = [read_card("rtx3060_12gb"), read_card("t4_16gb"), read_card("h100_80gb")]
    chosen = GPUParams(**smallest(cards))
    assert chosen.name == "rtx3060_12gb"
    assert chosen.usable_bytes == cards[0]["usable_bytes"]
    assert chosen.capability == "7.5"
    assert best_autocast(chosen) is MixedPrecision.FP16, "the T4 has no bfloat16"
    assert chosen.fp16_flops == cards[0]["fp16_flops"]
    assert chosen.bandwidth_bytes_per_second == cards[1]["bandwidth_bytes_per_second"]
    assert chosen.cublas_workspace_bytes == cards[2]["cublas_workspace_bytes"]
    assert smallest(cards[::-1])["usable_bytes"] == chosen.usable_bytes
    assert "count" not in cards[0], "the cards that were given are left as they were"


def test_capabilities_compare_as_numbers() -> None:
    assert smallest([read_card("b200_180gb"), read_card("h100_80gb")])["capability"] == "9.0"


def test_a_list_with_amd_is_no_cuda_list() -> None:
    assert "capability" not in smallest([read_card("h100_80gb"), read_card("mi300x_192gb")])


@pytest.mark.parametrize("names", [[], ["cpu"], ["h100_80gb", "cpu"]])
def test_a_list_needs_cards_with_memory(names: list[str]) -> None:
    with pytest.raises(ValueError, match="memory of their own"):
        smallest([read_card(name) for name in names])


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        ("cpu", MixedPrecision.NONE),
        ("t4_16gb", MixedPrecision.FP16),
        ("v100_32gb", MixedPrecision.FP16),
        ("rtx3060_12gb", MixedPrecision.BF16),
        ("h100_80gb", MixedPrecision.BF16),
        ("b200_180gb", MixedPrecision.BF16),
        ("mi300x_192gb", MixedPrecision.BF16),
    ],
)
def test_autocast_is_the_best_the_card_has(name: str, autocast: MixedPrecision) -> None:
    assert best_autocast(typed(name)) is autocast


def test_a_capability_alone_tells_the_autocast() -> None:
    assert best_autocast(GPUParams(name="mine", capability="12.0")) is MixedPrecision.BF16
    assert best_autocast(GPUParams(name="mine", capability="7.0")) is MixedPrecision.FP16
    assert best_autocast(GPUParams(name="mine", capability="6.1")) is MixedPrecision.NONE


def test_assumptions_name_what_was_not_measured() -> None:
    assert assumptions(typed("h100_80gb")) == []
    assert assumptions(typed("a100_80gb")) == [
        "a100_80gb: driver context 767 MiB, not measured, taken as the H100's",
    ]
    assert any("no display attached" in line for line in assumptions(typed("rtx4090_24gb")))
    assert any("no CUDA card" in line for line in assumptions(typed("mi300x_192gb")))
    assert assumptions(typed("cpu")) == ["cpu: no memory of its own is known, so nothing is compared with it"]


def test_assumptions_of_a_size_name_the_size_the_share_and_the_missing_speed() -> None:
    assumption = "\n".join(assumptions(GPUParams(**sized("24gb"))))
    for part in ("size only", "capability 8.6", "90%", "767 MiB", "no step time"):
        assert part in assumption


def test_assumptions_name_what_a_card_file_of_the_user_leaves_out() -> None:
    assumption = "\n".join(assumptions(GPUParams(name="mine", usable_bytes=GIB, capability="8.0")))
    assert "usable memory 1,024 MiB, without a source" in assumption
    assert any("driver context is not stated, taken as an H100's, 767 MiB" in line for line in assumption.split("\n"))
    assert context_of(GPUParams(name="mine", usable_bytes=GIB)) == context_of(typed("h100_80gb"))
    assert context_of(GPUParams(name="mine", usable_bytes=GIB, context_bytes=5)) == 5
    assert context_of(typed("cpu")) == 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("40", "40gb"),
        ("12.5gib", "12gb"),
        ("24000mb", "24gb"),
        ("80g", "80gb"),
        ("h100", None),
        ("", None),
        ("0", None),
    ],
)
def test_a_number_with_another_unit_or_none_is_near_a_size(text, meant):
    assert size_meant(text) == meant
    assert meant is None or card_of_size(meant) is not None
