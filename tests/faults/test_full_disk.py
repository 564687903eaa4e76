"""A full disk loses no work: everything that can be saved is, and with free space the run resumes to the same bits.

The disk is a small file system in memory, which only root may mount: `unshare -rm make faults` gives anyone the right.
"""

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from framework.errors import RequestError, SaveFailed
from framework.run.checkpoints.checkpoint import checkpoints
from tests.faults.profile import count
from tests.faults.tiny_runs import go_on, request
from tests.run.test_trainer import train

MARGIN = 64 * 1024
"""Bytes of the file system for itself."""


class Disk:
    """A small file system."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def mount(self, options: str) -> bool:
        arguments = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.at)]
        return subprocess.run(arguments, check=False, capture_output=True).returncode == 0

    def is_of(self, size: int) -> None:
        assert self.mount(f"remount,size={size}")


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path / "disk")
    made.at.mkdir()
    if not made.mount("size=1m"):
        pytest.skip("no right to mount a file system: `unshare -rm` gives it")
    yield made
    subprocess.run(["umount", "--lazy", str(made.at)], check=True)


@pytest.fixture(scope="module")
def needed(whole):
    """Bytes that the whole run has on its disk, and a checkpoint more, which is written before one is removed."""
    files = [path for path in whole.folder.rglob("*") if path.is_file()]
    newest = max((whole.folder / "checkpoints").iterdir())
    return sum(-(-os.path.getsize(path) // 4096) * 4096 for path in [*files, *newest.iterdir()])


@pytest.mark.parametrize(("eighths", "is_async"), count([(3, True), (6, False)], [*product(range(9), [False, True])]))
def test_with_too_little_space(disk, whole, needed, eighths, is_async):
    """Room in eighths of what the run needs."""
    disk.is_of(needed * eighths // 8 + MARGIN)
    folder, ended = disk.at / "run", None
    try:
        train(request(whole.corpus, folder, async_save=is_async))
    except (RequestError, SaveFailed) as error:
        ended = error
    if ended is not None:
        assert "No space left" in str(ended) or "free" in str(ended), ended
    assert eighths < 8 or ended is None
    exports = [*folder.glob("final"), *folder.glob("export-step-*")]
    assert eighths < 4 or exports or checkpoints(folder)
    for export in exports:
        assert AutoModelForCausalLM.from_pretrained(export)
    disk.is_of(2 * needed)
    for export in folder.glob("export-step-*"):  # which a run that goes on leaves alone
        shutil.rmtree(export)
    go_on(whole, folder, async_save=is_async)
