"""Where the files that ship with the package are: presets (`conf`) and recipes (`recipes`)."""

from pathlib import Path


def shipped(folder: str) -> Path:
    """The shipped folder of that name: inside the package once installed, next to it in a checkout.

    Inside comes first because only we write there; next to an installed package lies `site-packages`, where a folder
    called `conf` may be another project's.
    """
    package = Path(__file__).resolve().parent
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder
