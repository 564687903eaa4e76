"""`-m`: a sweep by Hydra. Its sweeper determines the runs, its launcher starts them, on any machine.

Hydra gets only the swept keys: a group as a group of its own, a dotted key as a key without a value, so that
`gpu=a,b` and `gpu.count=1,2` can be combined. Each run gets plain overrides, which compose like any request.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

from hydra import initialize
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString, ValueType
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from framework.compose.overrides import COMMAND_LINE, fault, group_of, names_folder, path_of
from framework.compose.shipped import presets
from framework.errors import Problem, RequestError
from framework.schema.plural import counted

_NAME = "tunesmith"
_NUMBER = "${hydra.job.num}"
"""Folder of a run in that of its sweep, unless `hydra.sweep.subdir=` names another."""
_CHOICES = ("hydra/launcher", "hydra/sweeper")
_SETTINGS = ("hydra.launcher.", "hydra.sweeper.", "hydra.sweep.", "hydra/launcher/", "hydra/sweeper/")
_PARAMS = "hydra.sweeper.params"
"""Swept keys are in the overrides, where they are checked."""
_PLUGINS = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
"""Choice -> the distribution that brings it (hydra.cc/docs/plugins, Hydra 1.3)."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep: its own overrides, its folder, and the folder of the sweep."""

    number: int
    overrides: tuple[str, ...]
    folder: File
    sweep: File


@dataclass(frozen=True)
class Outline:
    """A sweep before it starts. `jobs` is None if the sweeper chooses them from earlier results."""

    folder: File
    jobs: tuple[Job, ...] | None


@dataclass(frozen=True)
class Sweep:
    """Parsed arguments of a command line with `-m`."""

    overrides: tuple[str, ...]
    """Overrides of a run, in the order typed; for one with several values its key."""
    swept: Mapping[str, str]
    """Key -> its values as Hydra reads them."""
    settings: tuple[str, ...]
    """Hydra's settings: launcher, sweeper and folders."""

    def overrides_of(self, job: Job) -> list[str]:
        """The overrides of a run."""
        own = {override.partition("=")[0]: override for override in job.overrides}
        return [own[override] if override in self.swept else override for override in self.overrides]

    def chosen(self, kind: str) -> str:
        """The launcher or the sweeper by its name."""
        choices = [override.partition("=")[2] for override in self.settings if override.startswith(f"hydra/{kind}=")]
        return choices[-1] if choices else "basic"

    def names_folder(self) -> bool:
        """Whether the folder of the sweep is among Hydra's settings."""
        return any(override.startswith("hydra.sweep.dir=") for override in self.settings)

    def outline(self, folder: str) -> Outline:
        """All runs with their folders. `folder` is the sweep's folder if Hydra's settings name none.

        Raises RequestError for settings that Hydra does not have, and for runs that would share a folder.
        """
        with self._hydra() as hydra:
            choices = [override for override in self.settings if override.partition("=")[0] in _CHOICES]
            found = [
                problem for override in choices if (problem := _refused(hydra.config_loader, [override], override))
            ]
            if not found:
                others = [override for override in self.settings if override not in choices]
                found = [
                    problem
                    for override in others
                    if (problem := _refused(hydra.config_loader, [*choices, override], override))
                ]
            if found:
                raise RequestError(found)
            try:
                return self._outline(hydra.config_loader, folder)
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                raise RequestError([Problem("-m", _first_line(error), COMMAND_LINE)]) from None

    def launch(self, folder: File, run: Callable[[Job], float]) -> None:
        """Start all runs. `run` must be picklable; an optimizing sweeper minimizes its return value.

        Raises whatever the launcher does when it loses a run.
        """
        settings = [override for override in self.settings if not override.startswith("hydra.sweep.dir=")]
        settings.append(f"hydra.sweep.dir={quoted(str(folder))}")
        with self._hydra() as hydra:
            hydra.multirun(_NAME, _Task(run), [*settings, *self._sweeps], with_log_configuration=False)

    @property
    def _sweeps(self) -> list[str]:
        return [f"{key}={raw}" for key, raw in self.swept.items()]

    @contextlib.contextmanager
    def _hydra(self) -> Iterator[Any]:
        """A Hydra that knows the swept keys."""
        body: dict[str, Any] = {}
        groups: list[Any] = []
        with separate_store() as store:
            for key, raw in self.swept.items():
                if (group := group_of(path_of(key))) is None:
                    _declare(body, key.split("."))
                    continue
                groups.append({group: None})
                store.repo.pop(group, None)
                for name in {*presets(group), *_names(key, raw)}:
                    *inside, last = name.split("/")
                    store.store(last, {}, group="/".join(part for part in (group, *inside) if part))
            quiet = [{f"override hydra/{kind}_logging": "none"} for kind in ("hydra", "job")]
            body["hydra"] = {"output_subdir": None, "sweep": {"dir": ".", "subdir": _NUMBER}}
            store.store(_NAME, {"defaults": [*groups, "_self_", *quiet], **body})
            with initialize(config_path=None, version_base="1.3", job_name=_NAME):
                yield GlobalHydra.instance().hydra

    def _outline(self, loader: Any, folder: str) -> Outline:
        settings = [*self.settings] if self.names_folder() else [*self.settings, f"hydra.sweep.dir={quoted(folder)}"]
        master = loader.load_configuration(_NAME, [*settings, *self._sweeps], RunMode.MULTIRUN)
        HydraConfig.instance().set_config(master)
        top = File(str(master.hydra.sweep.dir)).absolute()
        if self.chosen("sweeper") != "basic":
            return Outline(top, None)
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(self._sweeps)
        [batch] = BasicSweeper.split_arguments(parsed, None)
        jobs = []
        asked: Any = OmegaConf.to_container(master.hydra.sweep)
        for number, overrides in enumerate(batch):
            name = str(number)
            if asked["subdir"] != _NUMBER:
                config = loader.load_sweep_config(master, list(overrides))  # a tenth of a second for each run
                with open_dict(config):
                    config.hydra.job.num, config.hydra.job.id = number, str(number)
                HydraConfig.instance().set_config(config)
                name = str(config.hydra.sweep.subdir)
            jobs.append(Job(number, tuple(overrides), top / name, top))
        folders = [job.folder for job in jobs]
        if len(set(folders)) < len(folders):
            twice = next(folder for folder in folders if folders.count(folder) > 1)
            message = f"several of the {counted(len(jobs), 'run')} would write to {twice}"
            expected = "${hydra.job.num} or ${hydra.job.override_dirname} in it"
            raise RequestError([Problem("hydra.sweep.subdir", message, COMMAND_LINE, expected)])
        return Outline(top, tuple(jobs))


class _Task:
    """Callable that Hydra's launcher runs for each run, in a process of its choice."""

    def __init__(self, run: Callable[[Job], float]) -> None:
        self._run = run

    def __call__(self, _: object) -> float:
        hydra = HydraConfig.get()
        overrides = tuple(map(str, hydra.overrides.task))
        return self._run(Job(hydra.job.num, overrides, File(hydra.runtime.output_dir), File(hydra.sweep.dir)))


def sweep_of(overrides: Sequence[str]) -> Sweep:
    """Parse the arguments of a command line with `-m`.

    Raises RequestError for settings of Hydra that are no launcher's, sweeper's or folder's, for a key that is swept
    and written again, and where nothing is swept.
    """
    problems: list[Problem | None] = []
    kept: list[str] = []
    swept: dict[str, str] = {}
    settings: list[str] = []
    for override in map(str.strip, overrides):
        key, _, raw = override.partition("=")
        if key.lstrip("+~").startswith(("hydra.", "hydra/")):
            problems.append(_setting_fault(override))
            adds = key.lstrip("+").startswith(("hydra.launcher.", "hydra.sweeper."))
            settings.append(override if adds else override.lstrip("+"))
        elif _is_sweep(raw) and not names_folder(override):
            problems.append(_sweep_fault(override))
            swept[_name(override)] = raw
            kept.append(_name(override))
        else:
            kept.append(override)
    names = [_name(override) for override in kept]
    twice = sorted({name for name in names if name in swept and names.count(name) > 1})
    problems += [Problem(name, "is swept, and written once more", COMMAND_LINE, "one of the two") for name in twice]
    if not swept:
        message = "no key has several values to sweep"
        problems.append(Problem("-m", message, COMMAND_LINE, "training.learning_rate=1e-4,2e-4 or the like"))
    if found := [problem for problem in problems if problem is not None]:
        raise RequestError(found)
    return Sweep(tuple(kept), swept, tuple(settings))


def quoted(text: str) -> str:
    """The text as a quoted value of Hydra's override grammar."""
    if re.fullmatch(r"[\w./-]*[/][\w./-]*", text):
        return text
    return str(QuotedString(text, Quote.single).with_quotes())


def _name(override: str) -> str:
    """The key of an override, normalized for Hydra's grammar."""
    key = override.partition("=")[0].removesuffix("+").lstrip("+~")
    return ".".join(map(str, path_of(key)))


def _is_sweep(raw: str) -> bool:
    """Whether a value is a sweep; False for unreadable ones, which are reported when composing."""
    try:
        return bool(raw) and bool(OverridesParser.create().parse_override(f"key={raw}").is_sweep_override())
    except (HydraException, ValueError, RecursionError):
        return False


def _sweep_fault(override: str) -> Problem | None:
    key = override.partition("=")[0]
    if key.endswith("+"):
        return Problem(override, "appending cannot be swept", COMMAND_LINE, "whole lists: `key=[a],[a,b]`")
    path = path_of(key.lstrip("+~"))
    if path == ("training", "output_dir"):
        message = "each run of a sweep has its own folder"
        return Problem(override, message, COMMAND_LINE, "one folder, and `hydra.sweep.subdir=` for those inside it")
    return fault(override, path, True, key.startswith("~"))


def _setting_fault(override: str) -> Problem | None:
    key = override.partition("=")[0].lstrip("+")  # Hydra's prefix for adding a key
    expected = (
        "hydra/launcher=, hydra/sweeper=, hydra.launcher.*, hydra.sweeper.*, hydra.sweep.dir or hydra.sweep.subdir"
    )
    if key not in _CHOICES and (not key.startswith(_SETTINGS) or "_target_" in override or key.startswith(_PARAMS)):
        return Problem(override, "is no setting of a launcher or a sweeper", COMMAND_LINE, expected)
    if _is_sweep(override.partition("=")[2]):
        return Problem(override, "settings of the sweep itself have one value", COMMAND_LINE)
    return None


def _refused(loader: Any, settings: Sequence[str], override: str) -> Problem | None:
    """Problem for an invalid setting of Hydra."""
    try:
        loader.load_configuration(_NAME, list(settings), RunMode.MULTIRUN)
    except (HydraException, OmegaConfBaseException) as error:
        key, _, name = override.partition("=")
        if key not in _CHOICES:
            return Problem(override, _first_line(error), COMMAND_LINE)
        known = loader.get_group_options(key, ObjectType.CONFIG)
        hint = f", or pip install {_PLUGINS[name]}" if name in _PLUGINS else ""
        kind = key.partition("/")[2]
        return Problem(override, f"no {kind} of this name is installed", COMMAND_LINE, ", ".join(known) + hint)
    return None


def _first_line(error: BaseException) -> str:
    """Message of a Hydra error, or of its cause."""
    return (str(error) or str(error.__cause__)).partition("\n")[0]


def _declare(tree: dict[str, Any], path: Sequence[str]) -> None:
    """A key without a value at `path`."""
    *sections, last = path
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = None


def _names(key: str, raw: str) -> Iterator[str]:
    """Presets among the values of a swept group, if they can be listed."""
    override = OverridesParser.create().parse_override(f"{key}={raw}")
    if override.is_discrete_sweep() and override.value_type is not ValueType.GLOB_CHOICE_SWEEP:
        for value in override.sweep_iterator():
            yield value.text if isinstance(value, QuotedString) else str(value)


@contextlib.contextmanager
def separate_store() -> Iterator[Any]:
    """Context with a copy of Hydra's config store, so that it works inside another Hydra application."""
    store, app, version = ConfigStore.instance(), GlobalHydra.instance(), VersionBase.instance()
    before = store.repo, app.hydra, version.version_base, HydraConfig.instance().cfg
    store.repo, app.hydra = dict(store.repo), None
    try:
        yield store
    finally:
        app = GlobalHydra.instance()
        store.repo, app.hydra, version.version_base, HydraConfig.instance().cfg = before
