"""`plan`, `diff --memory` and `doctor --calibrate` from the command line."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from framework.cli import main
from framework.compose import compose, load
from framework.compose.overrides import listed
from framework.errors import OutOfMemory, Problem, RequestError
from framework.memory.ledger import Plan
from framework.run.planning import plan_pool
from framework.run.planning.host_probe import REFERENCE, HostSpeed
from framework.run.planning.measurements import Measured
from framework.run.planning.plan_pool import plan_in_subprocess
from tests.grids import first
from tests.reports.plans import GIB, PLAN, gib, on, use

ROOT = Path(__file__).parents[2]
RECIPE = "model: {architecture: {model_type: llama, hidden_size: 64}}\n"
MEASURED = Measured("a card", 18 * GIB, 20 * GIB, 20 * GIB, 0.4, 5120.0, {"forward": 1}, 1.0, "2.13.0")

# Promised of `plan --json`. `run_hours`, the terms of each phase and `batch.context` were added since.
TERMS = {
    *("weights", "gradients", "optimizer", "activations", "logits_and_loss", "autocast_copies", "temporaries"),
    *("communication", "fragmentation", "overhead", "unattributed"),
}
PEAK = {
    *("phase", "allocated_bytes", "reserved_bytes", "managed_bytes", "device_bytes", "device_bytes_upper"),
}
KEYS = {
    "": {
        *(
            "schema_version",
            "device",
            "fits",
            "peak",
            "terms",
            "step_peak",
            "phases",
            "host_bytes",
            "host",
            "disk_bytes",
            "shards",
            "checkpoint_bytes",
        ),
        *("step", "run_hours", "batch", "parameters", "assumptions", "warnings"),
    },
    "device": {"name", "count", "capacity_bytes", "usable_bytes"},
    "peak": PEAK,
    "terms": TERMS,
    "step_peak": {*PEAK, "terms"},
    "step": {"seconds", "tokens_per_second", "model_flops", "bound_by"},
    "host": {"processes", "other_bytes", "pinned_bytes", "load_bytes", "all_bytes", "end_bytes"},
    "batch": {"per_device", "accumulation", "world", "global", "sequence_length", "context", "tensor"},
    "parameters": {"total", "trainable"},
}


@pytest.fixture
def run(capsys):
    """Runs one command; gives exit code, stdout and stderr."""

    def run_command(*arguments):
        code = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def planner(monkeypatch):
    """Lets a hand-made plan take the place of the rehearsal; gives the configs that were planned."""
    configs = []

    def use_plan(made):
        def plan_config(config):
            configs.append(config)
            return made(config) if callable(made) else made

        monkeypatch.setattr(plan_pool.Rehearsals, "tried", lambda _, asked: [plan_config(each) for each in asked])
        monkeypatch.setattr(plan_pool, "_COMMAND", [sys.executable, "-c", ""])
        return configs

    return use_plan


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "framework", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in done.stderr
    done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("working "))
    return done


def check_document(document, added=()):
    assert {key: set(document[key] if key else document) for key in KEYS} == {**KEYS, "": KEYS[""] | set(added)}
    assert all(
        set(phase) == {"name", "allocated_bytes", "device_bytes", "host_bytes", "terms"} for phase in document["phases"]
    )
    assert sum(document["terms"].values()) == document["peak"]["device_bytes"]
    assert sum(document["step_peak"]["terms"].values()) == document["step_peak"]["device_bytes"]
    assert all(sum(phase["terms"].values()) == phase["device_bytes"] for phase in document["phases"])
    assert (
        Plan.from_json({key: value for key, value in document.items() if key not in added}).to_json().items()
        <= document.items()
    )


@pytest.mark.slow
@pytest.mark.fresh_process
def test_the_quickstart_is_planned_without_torch_in_the_parent(tmp_path):
    code = (
        "import sys; from framework.cli import main; "
        f"code = main(['plan', 'quickstart', 'gpu=rtx3060_12gb', '--json', '--html', {str(tmp_path / 'p.html')!r}]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    check_document(document)
    assert document["fits"]
    assert document["device"]["name"] == "rtx3060_12gb"
    assert document["batch"]["global"] == compose("quickstart").config.batch.global_size
    assert "fits on rtx3060_12gb" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("card", "code", "verdict"), first(1, [("rtx3060_12gb", 3, "does not fit on"), ("h100_80gb", 0, "fits on")])
)
def test_a_full_fine_tune_of_a_1b_model_fits_an_80_gb_card_and_not_a_12_gb_one(card, code, verdict):
    arguments = ["plan", "quickstart", "model=llama3.2_1b", "~model.tokenizer", "training=low_memory", f"gpu={card}"]
    done = command(*arguments)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(f"quickstart {verdict} {card}: ")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("named", [True, False])
def test_a_plan_that_does_not_fit_ends_with_what_looks_for_settings_that_do(run, write, planner, monkeypatch, named):
    monkeypatch.setattr("framework.compose.request.detect", lambda: "rtx4090_24gb")
    planner(on(12))
    recipe = write(RECIPE)
    overrides = [*(["gpu=rtx4090_24gb"] if named else []), "training.seed=3", "model.freeze_layers=[a, b]"]
    _, out, _ = run("plan", recipe, *overrides)
    command = shlex.split(out.rpartition("settings that fit:\n")[2].replace("\\\n", " "))
    expected = overrides if named else [*overrides, "gpu=rtx4090_24gb"]
    assert command == ["tunesmith", "fit", str(recipe), *expected]
    planner(on(24))
    assert "tunesmith fit" not in run("plan", recipe, *overrides)[1]


@pytest.mark.parametrize(("usable", "code"), [(24, 0), (20.5, 3), (12, 3), (None, 0)])
def test_the_exit_code_is_the_verdict_with_and_without_json(run, write, planner, usable, code):
    planner(on(usable))
    recipe = write(RECIPE)
    found, out, err = run("plan", recipe)
    assert (found, err) == (code, "")
    assert out.startswith("r ")
    found, out, err = run("plan", recipe, "--json")
    assert (found, err) == (code, "")
    check_document(json.loads(out))


def test_a_plan_needs_a_model_and_neither_data_nor_tokenizer(run, write, planner):
    configs = planner(PLAN)
    code, _, err = run("plan", write("training: {seed: 1}\n"))
    assert code == 2
    assert "model.model_name: there is no model" in err
    assert not configs
    code, _, err = run("plan", write(RECIPE))
    assert (code, err) == (0, "")
    assert len(configs) == 1


@pytest.mark.parametrize(
    ("text", "card", "keys"),
    [
        (
            "training: {mixed_precision_dtype: bf16, optimzer: sgd}\nmodel: {model_max_length: 4096, "
            "attn_implementation: flash_attention_2, architecture: {max_position_embeddings: 2048}}\n",
            "t4_16gb",
            {
                *("training.mixed_precision_dtype", "training.optimzer", "model.model_max_length"),
                *("model.attn_implementation", "model.architecture"),
            },
        ),
        (
            "model: {model_max_length: 4096, architecture: {max_position_embeddings: 2048}}\n",
            "rtx4080",
            {"gpu", "model.architecture", "model.model_max_length"},
        ),
    ],
)
def test_all_problems_at_once_before_anything_is_built(run, write, planner, text, card, keys):
    configs = planner(PLAN)
    code, out, err = run("plan", write(text), f"gpu={card}", "--json")
    assert (code, err) == (2, "")
    errors = json.loads(out)["errors"]
    assert {error["key"] for error in errors} == keys
    assert all(error["where"] for error in errors)
    assert not configs


def test_what_the_check_warns_of_is_in_the_document(run, write, planner):
    planner(replace(PLAN, warnings=("of the plan",)))
    overrides = ["training.empty_device_cache_steps=1", "gpu=h100_80gb"]
    _, out, err = run("plan", write(RECIPE), *overrides, "--json")
    first, last = json.loads(out)["warnings"]
    assert first.startswith("training.empty_device_cache_steps: returns only unused blocks")
    assert "\n" not in first
    assert last == "of the plan"
    assert "empty_device_cache_steps" in err


def test_a_mixed_list_is_planned_for_its_smallest_card(run, write, planner):
    configs = planner(PLAN)
    run("plan", write(RECIPE), "gpu=40gb,40gb,80gb")
    assert (configs[0].gpu.name, configs[0].gpu.count) == ("40gb", 3)


def test_what_the_rehearsal_finds_gets_its_place(run, write, planner):
    planner(RequestError([Problem("model.architecture.hidden_size", "is odd"), Problem("", "is bad")]))
    code, out, err = run("plan", write(RECIPE))
    assert (code, out) == (2, "")
    assert "model.architecture.hidden_size: is odd\n  at r.yaml:1" in err
    document = json.loads(run("plan", "r.yaml", "--json")[1])
    assert document["errors"][0]["where"] == "r.yaml:1"


@pytest.mark.parametrize(
    ("target", "why"),
    [("gone/p.html", "there is no folder"), (".", "it is a folder"), ("r.yaml/p.html", "there is no")],
)
def test_a_page_that_has_no_place_is_reported_before_planning(run, write, planner, target, why):
    configs = planner(PLAN)
    code, out, err = run("plan", write(RECIPE), "--html", target)
    assert (code, out) == (2, "")
    assert f"--html: {target} cannot be written: {why}" in err
    assert not configs


def test_a_page_that_cannot_be_written_is_reported_after_the_plan(run, write, planner):
    planner(PLAN)
    target, why = "/dev/full", "No space left on device"
    code, out, err = run("plan", write(RECIPE), "--html", target)
    assert (code, out) == (2, run("plan", "r.yaml")[1])
    assert err == f"error --html: {target} cannot be written: {why}\n"
    code, out, again = run("plan", "r.yaml", "--html", target, "--json")
    assert (code, again) == (2, err)
    document = json.loads(out)
    assert document.pop("errors") == [
        {
            "key": "--html",
            "where": None,
            "message": f"{target} cannot be written: {why}",
            "expected": "a file in a folder that exists and can be written to",
            "nearest": None,
        }
    ]
    check_document(document)


def test_measured_next_to_predicted(run, write, planner, monkeypatch):
    planner(PLAN)
    monkeypatch.setattr("framework.run.planning.measurements.measure_in_subprocess", lambda config: MEASURED)
    code, out, _ = run("plan", write(RECIPE), "--measure", "--html", "p.html")
    assert code == 0
    assert "+2.78%" in out
    assert "+2.78%" in Path("p.html").read_text()
    document = json.loads(run("plan", "r.yaml", "--measure", "--json")[1])
    check_document(document, added=["measured"])
    assert set(document["measured"]) == {
        *("device_name", "allocated_bytes", "reserved_bytes", "device_bytes", "step_seconds", "tokens_per_second"),
    }


def test_a_step_that_runs_out_of_memory_is_reported_after_the_plan(run, write, planner, monkeypatch):
    def fail(_):
        raise OutOfMemory("tried to allocate 9 GiB")

    planner(PLAN)
    monkeypatch.setattr("framework.run.planning.measurements.measure_in_subprocess", fail)
    code, out, err = run("plan", write(RECIPE), "--measure")
    assert code == 4
    assert "fits on" in out
    assert err == "error tried to allocate 9 GiB\n"


def test_without_a_card_no_step_is_measured_and_the_host_alone_is_calibrated(run, write, planner, monkeypatch):
    configs = planner(PLAN)
    monkeypatch.setattr(
        "framework.run.planning.measurements.measure_in_subprocess",
        lambda config: (_ for _ in ()).throw(RequestError([Problem("--measure", "no CUDA card")])),
    )
    assert run("plan", write(RECIPE), "--measure")[0] == 2
    assert not configs
    monkeypatch.setattr("framework.run.planning.calibrate.installed_cards", list)
    monkeypatch.setattr("framework.run.planning.calibrate.probe_host", lambda: HostSpeed(REFERENCE, 1.0))
    assert run("doctor", "--calibrate", "--output", "card.yaml")[0] == 0
    assert yaml.safe_load(Path("card.yaml").read_text())["gpu"].keys() == {"host", "sources"}, "of a host alone"
    assert run("doctor", "--calibrate", "--output", "card.txt")[0] == 2
    assert run("doctor", "--output", "card.yaml")[0] == 2


def by_length(config):
    length = config.model.model_max_length or 1024
    return replace(PLAN, peak=use("backward", 3 + 2 * length / 1024, gib(weights=2, activations=length / 1024)))


def test_diff_names_the_terms_and_the_keys(run, write, planner):
    configs = planner(by_length)
    write(RECIPE.replace("model: {", "training: {seed: 1, optimizer: sgd}\nmodel: {model_max_length: 4096, "), "b.yaml")
    code, out, err = run("diff", write(RECIPE), "b.yaml", "gpu=80gb", "--memory")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert "model.model_max_length a null default" in lines
    assert "b 4096 b.yaml:2" in lines
    assert "activations 1.00 GiB 4.00 GiB +3.00 GiB" in lines
    assert "model.model_max_length +3.00 GiB +6.00 GiB backward" in lines
    assert "training.optimizer 0 0 backward" in lines
    assert len(configs) == 4, "both, and each of the two keys that can matter"
    document = json.loads(run("diff", "r.yaml", "b.yaml", "gpu=80gb", "--memory", "--json")[1])
    assert document["memory"]["causes"][0] == {
        "keys": ["model.model_max_length"],
        "device_bytes": 3 * GIB,
        "device_bytes_upper": 6 * GIB,
        "refusal": None,
    }
    assert {difference["key"] for difference in document["differences"]} > {"training.seed"}


def test_diff_without_memory_plans_nothing(run, write, planner):
    configs = planner(PLAN)
    assert "memory" not in json.loads(run("diff", write(RECIPE), "r.yaml", "--json")[1])
    assert not configs


LITTLE = """
model:
  architecture: {model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256}
  load_pretrained_weights: false
"""


def test_a_list_of_values_is_a_table_of_what_each_is_planned_alone(run, write):
    recipe = write(LITTLE)
    code, out, _ = run("plan", recipe, "gpu=t4_16gb", "model.model_max_length=32,64", "--json", "--html", "p.html")
    document = json.loads(out)
    assert (code, document["key"]) == (0, "model.model_max_length")
    assert [row["value"] for row in document["rows"]] == ["32", "64"]
    for row in document["rows"]:
        alone = plan_in_subprocess(load(recipe, ["gpu=t4_16gb", f"model.model_max_length={row['value']}"]))
        assert row["plan"]["peak"] == alone.to_json()["peak"]
        assert row["plan"]["batch"]["sequence_length"] == int(row["value"])
    assert "model.model_max_length" in Path("p.html").read_text()


def test_cards_are_compared_with_m_and_are_one_machine_without(run, write, planner):
    recipe = write(RECIPE)
    assert listed(["gpu=40gb,80gb"], takes_cards=False) is None
    assert listed(["a.b=1", "gpu=40gb,80gb"], takes_cards=True) == (
        "gpu",
        {"40gb": ["a.b=1", "gpu=40gb"], "80gb": ["a.b=1", "gpu=80gb"]},
    )
    assert listed(["model.freeze_layers=[a,b]", "training.run_name='a,b'"], takes_cards=True) is None
    code, out, _ = run("plan", recipe, "training.seed=1,2", "model.model_max_length=2,3", "--json")
    assert (code, json.loads(out)["errors"][0]["message"]) == (2, "is a second list")
    assert run("plan", recipe, "training.seed=1,2", "--measure")[0] == 2


def test_a_card_that_is_too_small_for_the_measurement_is_in_the_one_document(run, write, planner, monkeypatch):
    def fail(_):
        raise OutOfMemory("no room")

    monkeypatch.setattr("framework.run.planning.measurements.measure_in_subprocess", fail)
    planner(PLAN)
    code, out, err = run("plan", write(RECIPE), "--measure", "--json")
    assert code == 4
    assert json.loads(out)["errors"] == [
        {"key": "--measure", "message": "no room", "where": None, "expected": None, "nearest": None}
    ]
    assert "no room" in err


@pytest.mark.slow
def test_the_readme_shows_what_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "104")
    block = (ROOT / "README.md").read_text().partition("$ tunesmith plan ")[2].partition("```")[0]
    command, *shown = filter(None, map(str.rstrip, block.splitlines()))
    assert main(["plan", *shlex.split(command)]) == 0
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert len(shown) > 12
    assert not [line for line in shown if line not in printed]
