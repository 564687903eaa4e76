"""To add an optimizer, a lever, a row format or a card is to add one row with its code: each is added to a copy of the
package as CONTRIBUTING.md says, is used, and the files that it took are counted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OPTIMIZER = {
    "framework/schema/optimizers.py": [
        ('    SGD = "sgd"\n', '    SGD = "sgd"\n    HALVING = "halving"\n'),
        (
            "    Optimizer.LION: OptimizerFacts(",
            '    Optimizer.HALVING: OptimizerFacts("halving", ("sgd_momentum",), "not measured", "another optimizer: '
            'halves"),\n    Optimizer.LION: OptimizerFacts(',
        ),
    ],
    "framework/build/optimizers/halving.py": '''"""Halves each weight."""

import torch

from framework.build.optimizers.row import Groups, Row, Trained
from framework.schema.optimizers import Optimizer
from framework.schema.training import TrainingParams


class Halving(torch.optim.Optimizer):
    """Of no use."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def _make(training: TrainingParams, groups: Groups, trained: Trained) -> Halving:
    return Halving(groups, {"lr": training.learning_rate})


ROWS = {Optimizer.HALVING: Row(_make, lambda made: type(made) is Halving, lambda training, looked: [])}
''',
}
LEVER = {
    "framework/schema/training.py": [
        (
            "    allocator: AllocatorParams",
            '    humming: bool | Auto = False\n    """Hum. No cost."""\n    allocator: AllocatorParams',
        )
    ],
    "framework/memory/levers/execution.py": [
        (
            "CACHES = (\n",
            """CACHES = (
    Lever(
        "training.humming",
        (Setting(False), Setting(True, "not measured")),
        ("weights",),
        "humming",
        "Hums.",
        search=Axis((False, True)),
    ),
""",
        )
    ],
    "framework/build/verify/__init__.py": [
        (
            '    "sharding": sharding.read_sharding,\n',
            '    "sharding": sharding.read_sharding,\n    "humming": lambda made: [Reading("training.humming", "True", '
            'str(made.config.training.humming), "it")],\n',
        )
    ],
}
FORMAT = {
    "framework/schema/choices.py": [('    TOKENS = "tokens"\n', '    TOKENS = "tokens"\n    RIDDLE = "riddle"\n')],
    "framework/build/text/format_table.py": [
        (
            "_ALL = (\n",
            """_ALL = (
    Format(
        RowFormat.RIDDLE,
        needs=("riddle", "solution"),
        also=(),
        schema=_schema("prompt", "completion"),
        read=lambda record: {
            "form": "riddle",
            "prompt": json.dumps(record["riddle"]),
            "completion": json.dumps(record["solution"]),
        },
        tasks=(Task.SFT,),
        supervise=(Supervise.COMPLETION,),
        refusal="is no riddle",
        filled=("prompt", "completion"),
        encode=encode.completions,
        question=encode.asked_prompt,
        prompt=encode.answered,
    ),
""",
        ),
        ("from collections.abc import Callable", "import json\nfrom collections.abc import Callable"),
    ],
}
CARD = {
    "conf/gpu/abacus_12gb.yaml": """
nvidia_smi: {product: "Abacus", mebibytes: 12288}
gpu:
  name: abacus_12gb
  capacity_bytes: 12884901888
  usable_bytes: 12000000000
  capability: "8.6"
  sources: {others: "beads"}
"""
}

USE = """
import json, sys
from pathlib import Path
for name, module in list(sys.modules.items()):  # where the process was forked from one that has imported the package
    if name.partition(".")[0] in ("framework", "tests") and not hasattr(module, "_LIBRARY"):  # torch takes one once
        del sys.modules[name]
import torch
from framework.build.assembly import assemble
from framework.build.loading.model import read_architecture
from framework.build.place import real_place
from framework.build.text.row_formats import detect_format
from framework.build.verify import verify
from framework.build.verify.optimizer import read_optimizer
from framework.checks import check_request
from framework.compose import load
from framework.errors import RequestError
from framework.memory.cards import parse_nvidia_smi
from framework.memory.resolve import resolve
from framework.memory.search.free_keys import freedom
from framework.run.checkpoints.resume import check_allowed
from framework.run.step import train_step
from tests.tiny import LLAMA, tiny_config

found = {}
training = {"optimizer": "halving", "humming": True, "adam_beta1": 0.5}
config = resolve(tiny_config(LLAMA, training=training, gpu={"name": "cpu"}))
made = assemble(config, read_architecture(config), real_place(torch.device("cpu")), 1)
before = [parameter.detach().clone() for parameter in made.trained]
ids = torch.arange(16)[None]
train_step(made, [{"input_ids": ids, "labels": ids.clone()}], 1)
found["halved"] = all(torch.equal(now, was / 2) for now, was in zip(made.trained, before))
found["read back"] = [item.found for item in verify(made) if item.key in ("training.optimizer", "training.humming")]
recipe = Path(sys.argv[1])
recipe.write_text("data: {train: [{path: x.jsonl}]}")
report = check_request(recipe, ["gpu=abacus_12gb", "training.optimizer=halving", "training.adam_beta1=0.5",
                                "training.humming=auto", "model=llama3.2_1b"])
found["warned of"] = [warning.key for warning in report.warnings]
found["problems"] = [str(problem) for problem in report.problems]
found["card"] = report.composition.config.gpu.usable_bytes
found["detected"] = [card.name for card in parse_nvidia_smi("0, GPU-a, NVIDIA Abacus, 12288, 8.6, [N/A]")]
check_allowed(["training.humming"])
found["free"] = "training.humming" in freedom(())
found_format = detect_format(["riddle", "solution"], {})
found["form"] = [str(found_format.name), found_format.read({"riddle": "a", "solution": "b"})["completion"]]
print(json.dumps(found))
"""


def add(copy: Path, files: dict[str, str | list[tuple[str, str]]]) -> int:
    """Write one addition into the copy; how many files it took."""
    for name, content in files.items():
        path = copy / name
        if isinstance(content, str):
            path.write_text(content)
            continue
        text = path.read_text()
        for anchor, replacement in content:
            assert text.count(anchor) == 1, (name, anchor)
            text = text.replace(anchor, replacement)
        path.write_text(text)
    return len(files)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with its presets, where a test may write; what was compiled of it counts until its source changes."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("framework", "conf", "recipes"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    for name in ("__init__.py", "tiny.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    return folder


def test_each_addition_takes_few_files_and_is_in_effect(copy: Path) -> None:
    counts = {name: add(copy, files) for name, files in (("optimizer", OPTIMIZER), ("lever", LEVER))}
    counts |= {name: add(copy, files) for name, files in (("format", FORMAT), ("card", CARD))}
    assert counts == {"optimizer": 2, "lever": 3, "format": 2, "card": 1}
    command = [sys.executable, "-W", "ignore", "-c", USE, str(copy / "r.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "halved": True,
        "read back": ["halving", "True"],
        "warned of": ["training.adam_beta1"],
        "problems": [],
        "card": 12_000_000_000,
        "detected": ["abacus_12gb"],
        "free": True,
        "form": ["riddle", '"b"'],
    }
