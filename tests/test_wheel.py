"""What a wheel says of itself."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_all_is_every_extra_but_that_of_developers() -> None:
    (named,) = EXTRAS["all"]
    assert named == f"tunesmith[{','.join(sorted(set(EXTRAS) - {'all', 'dev'}))}]"
