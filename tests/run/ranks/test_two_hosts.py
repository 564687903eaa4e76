"""Two hosts, as two groups of two processes on one machine: torchrun's agents and Slurm's tasks find each other."""

import os
import subprocess
import sys

import pytest
import torch

from tests.folders import save_model
from tests.run.several import ROOT, ended, free_port
from tests.run.test_trainer import corpus, metrics  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]
HOSTS, ON_EACH = 2, 2
RECIPE = """
training: {{task: pretrain, max_steps: 4, per_device_train_batch_size: 2, global_batch_size: 8, logging_steps: 1}}
model: {{model_name: {model}, model_max_length: 32}}
data: {{train: [{{path: {corpus}}}]}}
gpu: {{name: cpu}}
"""
SHARED = ("fsdp.enable_fsdp=true", "fsdp.sharding_strategy=HYBRID_SHARD", f"gpu.count={HOSTS * ON_EACH}")
"""Each host holds the model once, split over its processes."""


@pytest.fixture
def recipe(write, corpus, tmp_path):  # noqa: F811
    return write(RECIPE.format(corpus=corpus, model=save_model(tmp_path / "model")))


@pytest.fixture
def alone(recipe, tmp_path) -> dict[int, float]:
    """Losses of one process."""
    command = [sys.executable, "-m", "framework", "train", str(recipe), f"training.output_dir={tmp_path / 'alone'}"]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return metrics(tmp_path / "alone")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def trains_as(processes, alone, folder) -> None:
    for one in ended(processes, within=900):
        assert one.code == 0, one.err[-3000:]
    assert metrics(folder) == pytest.approx(alone, rel=1e-4)
    assert (folder / "final" / "model.safetensors").exists()


def test_two_agents_of_torchrun(recipe, alone, tmp_path) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", str(ON_EACH)]
    meet = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    arguments = ["-m", "framework", "train", str(recipe), f"training.output_dir={tmp_path / 'run'}", *SHARED]
    agents = [
        subprocess.Popen(
            [*agent, "--node-rank", str(host), *meet, *arguments],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in range(HOSTS)
    ]  # fmt: skip
    trains_as(agents, alone, tmp_path / "run")


def test_two_hosts_of_a_step_of_slurm(recipe, alone, tmp_path) -> None:
    """`srun` sets these variables; the first host of the list is asked of `scontrol`."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    scontrol.chmod(0o755)
    step = {
        **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(HOSTS * ON_EACH)},
        **{"SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_TASKS_PER_NODE": f"{ON_EACH}(x{HOSTS})"},
        **{"MASTER_PORT": free_port(), "PATH": f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"},
    }
    arguments = ["train", str(recipe), f"training.output_dir={tmp_path / 'run'}", *SHARED]
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "framework", *arguments],
            env=environment(**step, SLURM_PROCID=str(task), SLURM_LOCALID=str(task % ON_EACH)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for task in range(HOSTS * ON_EACH)
    ]  # fmt: skip
    trains_as(tasks, alone, tmp_path / "run")
