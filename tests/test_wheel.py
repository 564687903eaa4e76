"""The wheel: what it says of itself, and that it works where the repository is not."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
RECIPE = """
defaults: [model: smollm2_135m, peft: lora, optimizer: adamw_torch_fused]
training: {max_steps: 1}
data: {train: [{path: rows.jsonl}]}
"""


def test_all_is_every_extra_but_that_of_developers() -> None:
    (named,) = EXTRAS["all"]
    assert named == f"tunesmith[{','.join(sorted(set(EXTRAS) - {'all', 'dev'}))}]"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed by pip in an environment of its own, which finds the packages that it needs in this one."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (site,) = (folder / "venv").glob("lib/python3.*/site-packages")
    (site / "needed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_it_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [installed / arguments[0], *arguments[1:]], cwd=tmp_path, env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    where = run("python", "-c", "import framework, tunesmith; print(framework.__file__, tunesmith.__version__)").split()
    assert Path(where[0]).is_relative_to(installed.parent)
    assert where[1] == run("tunesmith", "--version").split()[-1]
    assert "lora_r" in run("tunesmith", "show", "chat", "model=qwen3_4b", "peft=qlora")
    assert "h100_80gb" in run("tunesmith", "list", "gpus")
    assert "training.optimizer_offload" in run("tunesmith", "levers")
    run("tunesmith", "check", "mine.yaml", "--quick")
    plan = json.loads(run("tunesmith", "plan", "mine.yaml", "gpu=rtx4090_24gb", "--json"))
    assert plan["fits"]
    assert plan["parameters"]["total"] > 134_000_000
    axolotl = "base_model: Qwen/Qwen3-0.6B\nadapter: lora\ndatasets: [{path: rows.jsonl, type: alpaca}]\n"
    (tmp_path / "axolotl.yml").write_text(axolotl)
    assert "peft" in run("tunesmith", "convert", "axolotl.yml")
