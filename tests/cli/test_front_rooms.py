"""The front rooms are quick and load neither torch nor, where nothing is composed, Hydra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_train import RECIPE

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft")
COMPOSE = ("hydra", "omegaconf")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    return done.stdout


def loaded(code: str) -> set[str]:
    text = run(f"{code}\nimport sys; print('\\n' + ' '.join(sys.modules))")
    return {name.partition(".")[0] for name in text.splitlines()[-1].split()}


def command(*arguments: str) -> str:
    return f"from framework.cli import main; main({list(arguments)!r})"


STEPS = [
    ("import framework", (*HEAVY, *COMPOSE, "pydantic", "typer", "yaml")),
    (command("--help"), (*HEAVY, *COMPOSE)),
    ("import framework.memory.cards", (*HEAVY, *COMPOSE)),
    (command("train", "--help"), (*HEAVY, *COMPOSE)),
    (command("plan", "--help"), (*HEAVY, *COMPOSE)),
    ("from framework.cli.arguments import complete_recipe; complete_recipe('')", HEAVY),
    (command("list", "gpus"), HEAVY),
    (command("schema"), HEAVY),
    (command("levers"), HEAVY),
    (command("show", "quickstart"), HEAVY),
    (command("diff", "quickstart", "quickstart", "gpu=24gb"), (*HEAVY, "numpy")),
    (command("check", "quickstart", "--quick"), HEAVY),
    (command("convert", "recipes/quickstart.yaml"), HEAVY),
    (command("check", "quickstart", "trainng.seed=1", "--json"), HEAVY),
    ("import framework.run.planning.plan_pool", HEAVY),
    ("from framework import ModelParams, TrainingConfig, check, load, plan", HEAVY),
    ("import framework.run.publish", ("torch", "datasets", "peft")),
]
"""Commands of a process, and modules not loaded after each; each must avoid fewer than the one before."""


def test_what_is_not_loaded():
    listing = "import sys; print('\\nLOADED', *sys.modules)"
    after = [line.split() for line in run("\n".join(f"{code}\n{listing}" for code, _ in STEPS)).splitlines()]
    after = [{name.partition(".")[0] for name in names[1:]} for names in after if names[:1] == ["LOADED"]]
    assert len(after) == len(STEPS)
    assert all("framework" in modules for modules in after)
    found = {code: modules & set(absent) for (code, absent), modules in zip(STEPS, after, strict=True)}
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize(("code", "absent"), STEPS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_loaded_by_each_alone(code, absent):
    assert not loaded(code) & set(absent)


@pytest.mark.parametrize(("code", "seconds"), [("import framework", 0.3), (command("--help"), 0.5)])
def test_how_long_it_takes(code, seconds):
    timed = f"import time; start = time.process_time()\n{code}\nprint('\\n%s' % (time.process_time() - start))"
    assert any(float(run(timed).splitlines()[-1]) < seconds for _ in range(3))


@pytest.mark.slow
@pytest.mark.fresh_process
def test_libraries_say_nothing_while_they_are_loaded() -> None:
    """bitsandbytes warns of a CPU kernel that it lacks whenever peft is imported."""
    command = [sys.executable, "-c", "import framework.run.planning.model_checks, framework.run.predict"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stderr == ""


TRAINING = """
import sys
from framework import load, train
recipe, folder = sys.argv[1:]
for number, peft in enumerate(([], ["peft=lora"])):
    train(load(recipe, ["gpu=cpu", *peft, f"training.output_dir={folder}/{number}"]), plan=False, quiet=True)
    print(*{name.partition(".")[0] for name in sys.modules if sys.modules[name] is not None})
"""
UNUSED = {"bitsandbytes", "datasets", "sklearn", "tensorboard", "mlflow", "wandb", "torchao", "liger_kernel"}
"""pandas is imported by pyarrow wherever it is installed."""


@pytest.mark.slow
@pytest.mark.fresh_process
def test_a_run_imports_what_it_uses(write, tmp_path):
    """From rows to export: in full without peft, with an adapter without bitsandbytes, which peft would import."""
    write("\n".join(f"line {number} of a text that a tokenizer can be built on" for number in range(64)), "rows.txt")
    recipe = write(RECIPE)
    code = [sys.executable, "-c", TRAINING, str(recipe.absolute()), str(tmp_path / "runs")]
    done = subprocess.run(
        code, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    full, adapted = (set(line.split()) for line in done.stdout.splitlines())
    assert {"torch", "transformers"} <= full
    assert not full & {*UNUSED, "peft"}
    assert "peft" in adapted
    assert not adapted & UNUSED
