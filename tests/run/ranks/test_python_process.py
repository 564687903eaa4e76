"""Processes of ours import this package and nothing from the working directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from framework.run.ranks.environment import python_command, train_command

pytestmark = pytest.mark.fresh_process
ROOT = Path(__file__).parents[3]
NAMES = ("random", "statistics", "typing", "json", "subprocess", "framework")
TRAP = "open({mark!r}, 'a').write(__name__)\nraise ImportError('from the working directory')\n"


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """A working directory with modules that leave a mark when they are imported; gives the mark."""
    mark = tmp_path / "mark"
    folder = tmp_path / "here"
    (folder / "framework").mkdir(parents=True)
    for name in NAMES:
        file = folder / "framework" / "__init__.py" if name == "framework" else folder / f"{name}.py"
        file.write_text(TRAP.format(mark=str(mark)))
    monkeypatch.chdir(folder)
    return mark


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


def test_the_traps_are_traps(trapped):
    assert run([sys.executable, "-c", "import random"]).returncode != 0
    assert trapped.read_text() == "random"


def test_modules_come_from_python_and_from_this_package(trapped):
    code = "import random, statistics, json; import framework.errors; print(framework.__file__, sys.argv[1:])"
    done = run(python_command(code, "a", "b c"))
    assert done.stdout == f"{ROOT / 'framework' / '__init__.py'} ['a', 'b c']\n", done.stderr
    assert not trapped.exists()


def test_a_checkout_that_is_not_installed_is_found_and_stands_last(trapped):
    code = "import framework.errors, json; print(json.dumps(sys.path))"
    flags = ("-S", "-E")  # no site-packages, so that nothing is installed
    done = run(python_command(code, flags=flags))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f'"{ROOT}"]')


def test_pythonpath_counts_and_no_other_package_of_the_name_does(trapped, tmp_path):
    other = tmp_path / "other"
    (other / "framework").mkdir(parents=True)
    (other / "framework" / "__init__.py").write_text("raise SystemExit('another framework')\n")
    (other / "mine.py").write_text("VALUE = 7\n")
    done = run(python_command("import mine, framework.errors; print(mine.VALUE)"), PYTHONPATH=str(other))
    assert done.stdout == "7\n", done.stderr


def test_a_rank_or_swept_run_is_the_command_line(trapped):
    done = run(train_command("--help"))
    assert done.returncode == 0, done.stderr
    assert "tunesmith train" in done.stdout
    done = run(train_command("no_recipe.yaml", "--json"))
    assert done.returncode == 2
    assert "no_recipe.yaml" in done.stdout
    assert not trapped.exists()


def test_the_module_leaves_the_working_directory_before_it_imports(trapped):
    """What Python itself and the first line of the package import has been looked for there by then."""
    (Path("framework") / "__init__.py").unlink()
    Path("framework").rmdir()
    Path("typing.py").unlink()
    done = run([sys.executable, "-m", "framework", "list", "gpus"], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert not trapped.exists()


@pytest.mark.slow
def test_a_plan_is_made_in_a_directory_of_traps(trapped):
    arguments = ["plan", str(ROOT / "recipes" / "quickstart.yaml"), "gpu=24gb", "--json"]
    code = f"from framework.__main__ import main; sys.argv[1:] = {arguments!r}; sys.exit(main())"
    done = run(python_command(code))
    assert done.returncode == 0, done.stderr
    assert not trapped.exists()


def test_no_other_module_starts_python():
    """Each process of ours goes through the one function."""
    users = {
        str(file.relative_to(ROOT / "framework"))
        for file in (ROOT / "framework").rglob("*.py")
        if "sys.executable" in file.read_text()
    }
    assert users == {"run/ranks/environment.py"}
