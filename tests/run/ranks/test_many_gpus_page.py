"""The pages about several GPUs: job files are what the cluster reads, and what they say of batches is so."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from framework.checks import check_request
from framework.schema.config import TrainingConfig
from framework.schema.rules.sharding import ranks_conflicts

PAGES = ("many_gpus", "clusters", "sharding", "context_and_tensor_parallel")
DOCS = Path(__file__).parents[3] / "docs"
PAGE = "\n".join((DOCS / f"{name}.md").read_text() for name in PAGES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_job_files_are_yaml_with_as_many_processes_as_cards(text: str) -> None:
    job = yaml.safe_load(text)
    pods = [job["spec"]["template"]["spec"]] if job["kind"] == "Job" else []
    for replica in job["spec"].get("pytorchReplicaSpecs", {}).values():
        assert replica["restartPolicy"] == "Never", "a rank that comes back alone finds nobody"
        pods.append(replica["template"]["spec"])
    assert pods
    for pod in pods:
        [container] = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        cards, command = container["resources"]["limits"]["nvidia.com/gpu"], container["command"]
        asked = command[command.index("--nproc") + 1] if "--nproc" in command else job["spec"]["nprocPerNode"]
        assert asked == cards


def test_the_slurm_script_is_a_script() -> None:
    [script] = blocks("bash")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    per_node = re.findall(r"(?:ntasks|gpus)-per-node=(\d+)", script)
    assert per_node == ["8", "8"], "one task a card"


def test_what_skypilot_runs_is_what_torchrun_and_train_take() -> None:
    task = yaml.safe_load((DOCS / "machines" / "skypilot.yaml").read_text())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    set_there = {"NUM_NODES": "1", "NODE_RANK": "0", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1"}
    shown = re.sub(r"^.*torchrun ", "printf '%s\\n' ", task["run"], flags=re.M)
    environment = {f"SKYPILOT_{name}": value for name, value in set_there.items()} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", shown], env=environment, text=True, capture_output=True, check=True)
    asked = get_args_parser().parse_args(shlex.split(done.stdout))
    assert (asked.nnodes, asked.node_rank, asked.nproc_per_node, asked.master_addr) == ("1", 0, "8", "10.0.0.1")
    module, verb, recipe, *overrides = [asked.training_script, *asked.training_script_args]
    assert (asked.module, module, verb) == (True, "framework", "train")
    assert check_request(recipe, [*overrides, "gpu.count=8"]).problems == ()


def test_the_image_copies_what_there_is() -> None:
    image = (DOCS / "machines" / "Dockerfile").read_text()
    sources = [name for line in re.findall(r"^COPY (.+)$", image, re.M) for name in line.split()[:-1]]
    assert {"pyproject.toml", "framework", "conf", "recipes"} <= set(sources)
    assert all((DOCS.parent / name).exists() for name in sources)


def test_what_the_page_says_of_the_batch_is_so() -> None:
    training = {"global_batch_size": 64, "per_device_train_batch_size": 8}
    config = TrainingConfig.model_validate({"training": training, "gpu": {"count": 4}})
    assert str(config.batch) in PAGE


def test_what_the_page_says_of_groups_is_so() -> None:
    training = {"global_batch_size": 16, "per_device_train_batch_size": 2}
    rows = {"model": {"attn_implementation": "ring_attention"}, "fsdp": {"context_parallel_size": 4}}
    for sections in (rows, {"fsdp": {"tensor_parallel_size": 2}}):
        config = TrainingConfig.model_validate({"training": training, "gpu": {"count": 8}, **sections})
        assert str(config.batch) in PAGE


def test_what_is_refused_with_several_ranks_is_named() -> None:
    asked = {
        "training": {
            **{"on_oom": "shrink", "optimizer_in_backward": True, "enable_gradient_checkpointing": True},
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        "model": {"offload_frozen_base": True},
        "fsdp": {"enable_fsdp": True},
        "gpu": {"count": 2},
    }
    names = [conflict.keys[0].rpartition(".")[2] for conflict in ranks_conflicts(TrainingConfig.model_validate(asked))]
    words = {"use_reentrant": "re-entrant", "on_oom": "`on_oom: shrink`"}
    assert len(names) == 4
    assert all(words.get(name, name) in PAGE for name in names)
