"""Shipped presets and recipes, and the user's own presets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from framework.installation import shipped
from framework.schema.spelling import alike

GROUPS = ("model", "data", "peft", "optimizer", "fsdp", "training", "gpu")
"""Groups of presets, in the order in which those on the command line apply."""
PRESETS = "conf"
"""Name of a presets folder, with a subfolder for each group."""


@dataclass(frozen=True)
class EarlierRecipe:
    """Replacement of a recipe's earlier name."""

    recipe: str
    choices: Mapping[str, str] = field(default_factory=dict)
    """Group -> preset of the earlier recipe."""

    @property
    def typed(self) -> str:
        """The arguments to type in place of the earlier name."""
        return " ".join([self.recipe, *(f"{group}={name}" for group, name in self.choices.items())])


EARLIER_UNTIL = "0.2"
EARLIER_RECIPES: Mapping[str, EarlierRecipe] = {
    "classify_docstrings": EarlierRecipe("classify"),
    **{
        f"{model}_{way}": EarlierRecipe("chat", {"model": model, "peft": peft})
        for model in (
            *("gemma3_1b", "gemma3_4b", "olmo2_7b", "phi4_mini_4b", "qwen3_0.6b", "qwen3_1.7b", "qwen3_4b"),
            *("qwen3_8b", "smollm3_3b"),
        )
        for way, peft in {"full": "none", "lora": "lora", "qlora": "qlora"}.items()
    },
}
"""Names that are removed in version EARLIER_UNTIL."""


@dataclass(frozen=True)
class Preset:
    """A preset found by name."""

    file: Path
    label: str
    """Its name in messages: `gpu/h100_80gb.yaml` for shipped ones, the path for the user's."""
    hides: bool = False
    """Whether a shipped preset has the same name."""


_FOR_EDITORS = "# yaml-language-server"


def presets(group: str, folders: Iterable[Path] = ()) -> dict[str, Preset]:
    """Name -> preset, sorted. Presets in the user's `folders` override shipped ones."""
    ours = shipped(PRESETS)
    known = {name: Preset(file, f"{group}/{name}.yaml") for name, file in _yaml_files(ours / group).items()}
    own = [folder for folder in folders if folder.is_dir() and not folder.samefile(ours)]
    found = {
        name: Preset(file, str(file), name in known)
        for folder in own
        for name, file in _yaml_files(folder / group).items()
    }
    return dict(sorted((known | found).items()))


def recipes() -> dict[str, Path]:
    """Name -> file, sorted by name."""
    return _yaml_files(shipped("recipes"))


def purpose(path: Path) -> str:
    """The first comment line of a recipe or preset, which describes it."""
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.startswith("# ")]
    return next((line[2:] for line in lines if not line.startswith(_FOR_EDITORS)), "")


def editors_line() -> str:
    """First line of written recipes, which points editors at the installed schema."""
    return f"{_FOR_EDITORS}: $schema={shipped('recipes') / 'recipe.schema.json'}\n"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Up to three choices similar to `name`: those that contain it, else those with a similar spelling."""
    choices = list(choices)
    containing = [choice for choice in choices if name and name.lower() in choice.lower()]
    return ", ".join(containing[:3] or alike(name.lower(), choices)) or None


def _yaml_files(path: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(path.glob("*.yaml"))}
