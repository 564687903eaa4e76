"""A test that hangs in native code ends the session instead of outliving its limit."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import ROOT


@pytest.mark.slow
@pytest.mark.fresh_process
def test_native_code_that_hangs_is_ended_and_shown(tmp_path: Path) -> None:
    hanging = "import itertools\n\ndef test_endless(): sum(itertools.repeat(0))  # looks at no signal\n"
    (tmp_path / "test_it.py").write_text(hanging)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--timeout", "1"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_it.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Timeout (0:00:01.200000)!" in ended.stderr
    assert "in test_endless" in ended.stderr
