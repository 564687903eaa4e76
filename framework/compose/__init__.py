"""From a recipe, presets and overrides to one typed config. The only room that knows Hydra and OmegaConf."""

from framework.compose.origins import Origin
from framework.compose.request import Composition, Draft, compose, draft, load, load_of_run
from framework.text import to_yaml

__all__ = ["Composition", "Draft", "Origin", "compose", "draft", "load", "load_of_run", "to_yaml"]
