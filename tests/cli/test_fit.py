"""The verb `fit`: text, JSON, the recipe it writes, pins, and what it says when nothing fits."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from framework.checks import PLAN, check_request
from framework.cli import main
from framework.compose import load
from framework.run.planning import capacity as room
from framework.run.planning import plan_cache
from tests.memory.search import card

TINY = """# A tiny model.
training: {per_device_train_batch_size: 8, gradient_accumulation_steps: 4, learning_rate: 1e-3, optimizer: adamw_torch}
model:
  model_max_length: 512
  load_pretrained_weights: false
  architecture: {model_type: llama, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 8,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512, vocab_size: 8192}
"""
CARD = ("gpu=rtx3060_12gb", "training.compile=false")
SMALL = (*CARD, "gpu.usable_bytes=1400000000")
"""For the real planner."""
LITTLE = (*CARD, "gpu.usable_bytes=2600000000")
"""For arithmetic: 1800 MiB and more."""
FEW = ("training.enable_gradient_checkpointing", "training.activation_offload", "training.allocator")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Arithmetic(card.Arithmetic):
    """In place of the process that rehearses."""

    faults = ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def arithmetic(monkeypatch):
    monkeypatch.setattr("framework.run.planning.fit.Rehearsals", Arithmetic)


@pytest.fixture
def run(capsys):
    def run_command(*arguments):
        code = main([str(word) for word in arguments])
        return code, *capsys.readouterr()

    return run_command


def pinned(*arguments):
    return [item for word in ("training.compile", *arguments) for item in ("--pin", word)]


def test_the_document_of_fit(arithmetic, run, write):
    code, out, _ = run("fit", write(TINY), *LITTLE, "--json", *pinned())
    document = json.loads(out)
    assert code == 0
    assert document["fits"] is True
    assert document["plan"]["peak"]["device_bytes_upper"] <= 2_600_000_000
    batch = document["plan"]["batch"]
    assert batch["per_device"] * batch["accumulation"] * batch["world"] == 32
    assert "global / (" in document["batch_equation"]
    assert document["tried"] > 50
    for overrides in (document["overrides"], *(point["overrides"] for point in document["frontier"])):
        assert check_request("r.yaml", [*LITTLE, *overrides], needs=PLAN).problems == ()
    for change in document["changes"]:
        assert set(change) == {"key", "from", "to", "saves_bytes", "costs_seconds", "exact", "why"}
        assert change["exact"]
    assert {"overrides", "device_bytes", "tokens_per_second"} <= set(document["frontier"][0])


@pytest.mark.slow
def test_the_overrides_of_fit_are_its_plan_and_a_second_search_reads_its_plans(run, write, monkeypatch):
    """By the real planner: the proposal, added to the same request, is planned with exactly the bytes that `fit`
    printed."""
    recipe = write(TINY)
    code, out, _ = run("fit", recipe, *SMALL, "--json", *pinned(*FEW))
    document = json.loads(out)
    assert code == 0
    assert document["plan"]["peak"]["device_bytes_upper"] <= 1_400_000_000
    code, out, _ = run("plan", recipe, *SMALL, *document["overrides"], "--json")
    assert code == 0
    assert json.loads(out)["peak"] == document["plan"]["peak"]
    assert list(plan_cache.cache_folder("plans").glob("*.json"))
    monkeypatch.setattr("framework.run.planning.plan_pool.Rehearsals._ask", None)
    code, out, _ = run("fit", recipe, *SMALL, "--json", *pinned(*FEW))
    assert json.loads(out)["plan"] == document["plan"]


def test_the_recipe_of_fit_composes_to_the_same_run(arithmetic, run, write, tmp_path):
    recipe, written = write(TINY), tmp_path / "fitted.yaml"
    page = tmp_path / "fit.html"
    code, out, _ = run("fit", recipe, *LITTLE, "--output", str(written), "--html", str(page), *pinned())
    assert code == 0
    assert "Speed against memory" in page.read_text()
    assert f"wrote {written}" in out
    assert "tokens/s" in out
    text = yaml.safe_load(written.read_text())
    assert "gpu" not in text
    schema = written.read_text().splitlines()[0].partition("$schema=")[2]
    jsonschema.validate(text, json.loads(Path(schema).read_text()))
    assert len(written.read_text().splitlines()) < 45
    before, after = load(recipe), load(written)
    assert after.batch.global_size == before.batch.global_size == 32
    assert after.training.learning_rate == before.training.learning_rate
    assert after.training.optimizer == "adamw_torch_fused"


@pytest.mark.slow
@pytest.mark.parametrize("card", [LITTLE, (*CARD, "gpu.usable_bytes=1000000")])
def test_what_cannot_be_written_is_reported_after_the_proposal(arithmetic, run, write, tmp_path, card, monkeypatch):
    for name in ("full.yaml", "full.html"):
        (tmp_path / name).symlink_to("/dev/full")
    monkeypatch.chdir(tmp_path)
    plain = run("fit", write(TINY), *card, *pinned(*FEW))
    code, out, err = run("fit", write(TINY), *card, *pinned(*FEW), "--output", "full.yaml", "--html", "full.html")
    lines = [
        "error --html: full.html cannot be written: No space left on device",
    ]
    if plain[0] == 0:
        lines.insert(0, "error --output: full.yaml cannot be written: No space left on device")
    assert code == 2
    assert out.startswith(plain[1])
    assert "wrote" not in out
    assert err.splitlines()[-len(lines) :] == lines
    document = json.loads(run("fit", write(TINY), *card, *pinned(*FEW), "--html", "full.html", "--json")[1])
    assert document["fits"] == (plain[0] == 0)
    assert document["errors"][0]["key"] == "--html"


@pytest.mark.parametrize("option", ["--html", "--output"])
def test_what_has_no_place_is_refused_before_the_search(run, write, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plots").mkdir()
    monkeypatch.setattr("framework.run.planning.fit.fit", lambda *args, **kwargs: pytest.fail("searched"))
    code, out, err = run("fit", write(TINY), *LITTLE, option, "plot/a.yaml")
    assert (code, out) == (2, "")
    assert "did you mean plots/a.yaml" in err


def test_pinned_keys_stay(arithmetic, run, write):
    code, out, _ = run("fit", write(TINY), *LITTLE, "--json", "--pin", "written")
    moved = {change["key"] for change in json.loads(out)["changes"]}
    assert code in (0, 3)
    assert not moved & {"training.per_device_train_batch_size", "training.optimizer", "training.compile"}


def test_nothing_fits_is_exit_3_with_the_closest_and_a_card_that_would(arithmetic, run, write):
    tiny = (*CARD, "gpu.usable_bytes=1500000000")
    code, out, _ = run("fit", write(TINY), *tiny, "--json", "--allow", "exact", *pinned())
    document = json.loads(out)
    assert code == 3
    assert document["fits"] is False
    assert document["plan"]["peak"]["device_bytes_upper"] > 1_500_000_000
    assert document["smallest_card"] == "rtx3060_12gb"
    code, out, _ = run("fit", write(TINY), *tiny, "--allow", "exact", *pinned())
    assert code == 3
    assert "it fits on rtx3060_12gb" in out


@pytest.mark.parametrize("card", ["rtx3060_12gb", "rtx3090_24gb"])
def test_the_host_memory_of_this_machine_counts_where_the_card_is_its(arithmetic, run, write, monkeypatch, card):
    """Of another machine only the requirements of the proposal are known."""
    arguments = (
        "training.optimizer_offload=host",
        "--pin",
        "training.optimizer_offload",
        "--allow",
        "exact",
        *pinned(),
    )
    monkeypatch.setattr("framework.run.planning.fit.detect", lambda: card)
    monkeypatch.setattr(room, "available_host_bytes", lambda: 64 * 2**20)
    code, out, _ = run("fit", write(TINY), *LITTLE, *arguments)
    text = " ".join(out.split())
    assert code == (3 if card in LITTLE[0] else 0)
    assert "a machine with 1 card needs up to 1.60 GiB of host memory" in text
    assert ("too little memory for it: the run needs up to 1.60 GiB of host memory" in text) == (card in LITTLE[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu=cpu",), "no memory of its own"),
        (("gpu=24gb", "--pin", "training.compil"), "training.compile"),
        (("gpu=24gb", "--set-free", "training.seed"), "may be set free"),
        (("gpu=24gb", "--allow", "all"), "inexact"),
        (("gpu=24gb", "--output", "x.txt"), "not a YAML file"),
        (("gpu=24gb", "training.global_batch_size=7"), "7 global"),
    ],
)
def test_wrong_requests(run, write, arguments, message):
    code, _, err = run("fit", write(TINY), *arguments)
    assert code == 2
    assert message in err


AUTO = TINY.replace(
    "{per_device_train_batch_size: 8, gradient_accumulation_steps: 4,",
    "{per_device_train_batch_size: auto, global_batch_size: 32, enable_gradient_checkpointing: auto,",
).replace("model:", "model:\n  chunked_loss: auto", 1)


def test_auto_is_planned_as_what_the_search_finds(arithmetic, run, write):
    code, out, err = run("plan", write(AUTO), *LITTLE, "--json")
    assert code == 0
    assert json.loads(out)["batch"]["global"] == 32
    assert "auto training.per_device_train_batch_size=" in err


def test_auto_resolved_is_shown(arithmetic, run, write):
    recipe = write(AUTO)
    code, out, _ = run("show", recipe, *LITTLE, "--resolve")
    assert code == 0
    assert "auto" not in yaml.safe_load(out)["training"].values()
    code, out, _ = run("show", recipe, *LITTLE)
    assert "per_device_train_batch_size: auto" in out


def test_auto_without_a_global_batch_is_refused(run, write):
    code, _, err = run("plan", write(TINY.replace("size: 8", "size: auto")), *SMALL)
    assert code == 2
    assert "training.global_batch_size" in err


def test_auto_on_the_cpu_is_plain(run, write):
    code, out, err = run("plan", write(AUTO), "gpu=cpu", "--json")
    assert code == 0
    assert json.loads(out)["batch"]["per_device"] == 8
    assert "cpu has no limit" in err
