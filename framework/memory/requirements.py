"""Requirements of settings on card and machine, from the levers table, checked before anything is loaded; and configs
with changed values that meet them. No torch."""

import importlib.util
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from typing import Any

from pydantic import ValidationError

from framework.memory.cards import capability_of
from framework.memory.levers import LEVERS, Lever, Setting, format_value
from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig
from framework.schema.gpu import GPUParams
from framework.schema.keys import value_of
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict
from framework.schema.rules.every import RULES


def unmet_requirements(config: TrainingConfig, runs_here: bool) -> Iterator[Conflict]:
    """A conflict for each setting that the config's card does not support or, if it `runs_here`, whose package is
    missing.

    A card other than `cpu` without a known capability is assumed to support everything.
    """
    for lever, setting in _in_effect(config):
        if not suits(setting.hardware, config.gpu):
            is_cpu = config.gpu.name == "cpu"
            named = "this is the cpu" if is_cpu else f"{config.gpu.name} has capability {config.gpu.capability}"
            message = f"{_name(lever, setting)} needs {_described(setting.hardware)}, and {named}"
            yield Conflict((lever.key, "gpu.name"), message, _nearest(lever, setting, config.gpu))
        elif runs_here and (missing := [name for name in _packages(config, lever, setting) if not is_installed(name)]):
            packages = " and ".join(missing)
            message = f"{_name(lever, setting)} needs {packages}, not installed here"
            nearest = _nearest(lever, setting, config.gpu)
            yield Conflict((lever.key,), message, f"pip install {' '.join(missing)}, or {nearest}")
    if runs_here and config.training.compile is True:
        yield from _missing_compilers(config.gpu)
    if runs_here and quantizes_teacher(config) and not is_installed("bitsandbytes"):
        message = "a quantized teacher needs bitsandbytes, not installed here"
        yield Conflict(("training.teacher.bits",), message, "pip install bitsandbytes, or unset")


def unusable_settings(card: GPUParams) -> dict[str, str]:
    """Settings of levers (`key=value`) that this machine with such a card does not support -> their requirement."""
    found = dict[str, str]()
    for lever in LEVERS:
        for setting in lever.settings:
            missing = [name for name in setting.package.split(", ") if name and not is_installed(name)]
            needs = [] if suits(setting.hardware, card) else [_described(setting.hardware)]
            if needs or missing:
                found[f"{lever.key}={format_value(setting.value)}"] = ", ".join([*needs, *missing])
    return found


def _described(hardware: str) -> str:
    text = re.sub(r"cuda (\S+) to \1", r"capability \1 and no other", hardware)
    text = re.sub(r"cuda (\S+) to (\S+)", r"capability \1 to \2", text)
    text = re.sub(r"cuda (\S+)", r"capability \1", text)
    return text.replace("cuda", "a CUDA GPU").replace(", ", " or ")


def missing_trackers(config: TrainingConfig) -> Iterator[Conflict]:
    """A conflict for each tracker whose package is not installed here. A plan needs no trackers."""
    for index, tracker in enumerate(config.training.trackers):
        if importlib.util.find_spec(str(tracker)) is None:
            message = f"the package {tracker} is not installed"
            yield Conflict((f"training.trackers[{index}]",), message, f"pip install {tracker}, or no such tracker")


def workers_over_cores(config: TrainingConfig) -> Iterator[Conflict]:
    """A warning if `data.workers` asks for more processes than this machine has cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers, ranks = config.data.workers, config.gpu.count if isinstance(config.gpu.count, int) else 1
    if workers * ranks > cores:
        many = f"{workers} a device on {ranks} devices are {workers * ranks}" if ranks > 1 else f"{workers}"
        message = f"{many} processes for {counted(cores, 'core')}: they slow each other and the training down"
        most = f"at most {max(0, (cores - ranks) // ranks)}"
        yield Conflict(("data.workers",), message, most, is_warning=True)


def quantizes_teacher(config: TrainingConfig) -> bool:
    """Whether the teacher is quantized to 4 or 8 bits."""
    return config.training.teacher is not None and config.training.teacher.bits is not None


def decomposes(config: TrainingConfig, operators: Container[str]) -> bool:
    """Whether matrices are decomposed on the card, for an adapter's initialization or by an operator of a step."""
    starts = config.training.use_peft and ADAPTERS[config.peft.peft_method].is_decomposed
    return config.gpu.name != "cpu" and ("linalg_qr" in operators or starts or config.starts_from_rows)


def needs_package(config: TrainingConfig, name: str) -> bool:
    """Whether a setting in effect uses this package."""
    if name == "bitsandbytes" and quantizes_teacher(config):
        return True
    return any(name in _packages(config, lever, setting) for lever, setting in _in_effect(config))


def _packages(config: TrainingConfig, lever: Lever, setting: Setting) -> list[str]:
    """Packages that a setting uses. fp8 needs torchao except for a frozen base, whose products are implemented here."""
    if lever.key == "training.fp8" and config.training.use_peft:
        return []
    return [name for name in setting.package.split(", ") if name]


def _missing_compilers(card: GPUParams) -> Iterator[Conflict]:
    """Compilers missing for torch.compile: a C++ compiler for the CPU; for a GPU triton, which needs a C compiler.

    Found as torch and triton find them: torch/_inductor/config.py (`cpp.cxx`), triton/runtime/build.py.
    """
    if card.name == "cpu":
        variable, names = "CXX", ["g++"]
    else:
        variable, names = "CC", ["gcc", "clang"]
        if not (is_installed("triton") or is_installed("pytorch-triton-rocm")):
            message = "compile needs triton, not installed here"
            yield Conflict(("training.compile",), message, "pip install triton, or false")
    if not any(shutil.which(name) for name in (os.environ.get(variable) or names[0], *names[1:])):
        message = f"compile needs a {'C++' if card.name == 'cpu' else 'C'} compiler, and there is no {names[0]} here"
        yield Conflict(("training.compile",), message, f"{' or '.join(names)} installed, or false")


def _in_effect(config: TrainingConfig) -> Iterator[tuple[Lever, Setting]]:
    for lever in LEVERS:
        chosen: Any = config
        for name in lever.key.split("."):
            chosen = getattr(chosen, name)
        for setting in lever.settings:
            if isinstance(chosen, bool | str) and type(setting.value) is not int and chosen == setting.value:
                yield lever, setting


def _name(lever: Lever, setting: Setting) -> str:
    return lever.key.rpartition(".")[2] if setting.value is True else str(setting.value)


def _nearest(lever: Lever, setting: Setting, card: GPUParams) -> str:
    """The closest earlier setting in the table that needs no package and suits the card."""
    before = lever.settings[: lever.settings.index(setting)]
    found = next((item.value for item in reversed(before) if not item.package and suits(item.hardware, card)), None)
    return "leave it unset" if found is None else str(found).lower() if isinstance(found, bool) else str(found)


def suits(hardware: str, card: GPUParams) -> bool:
    """Whether `Setting.hardware` includes a card."""
    if not hardware or (card.capability is None and card.name != "cpu"):
        return True
    return any(_is_one_of(part.strip(), card) for part in hardware.split(","))


def _is_one_of(part: str, card: GPUParams) -> bool:
    kind, _, limits = part.partition(" ")
    if kind == "cpu" or card.capability is None:
        return kind == "cpu" and card.name == "cpu"
    lowest, _, highest = limits.partition(" to ")
    has = capability_of(card.capability)
    return capability_of(lowest or "0.0") <= has <= capability_of(highest or "99.0")


def is_installed(package: str) -> bool:
    """Whether a package of this name is installed. Imports nothing."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def default_of(key: str) -> Any:
    """Default of a dotted key."""
    return value_of(TrainingConfig(), key)


def with_values(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """The config with new values of dotted keys, validated. Raises pydantic's ValidationError."""
    document = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section[part]
        section[name] = value
    return TrainingConfig.model_validate(document)


def possible(config: TrainingConfig, changes: Mapping[str, Any], runs_here: bool = True) -> TrainingConfig | None:
    """The config with new values; None if they conflict with it, its card, or this machine."""
    try:
        changed = with_values(config, changes)
    except ValidationError:
        return None
    of_rules = (conflict for rule in RULES for conflict in rule(changed))  # read up to the first that refuses it
    conflicts = chain(of_rules, unmet_requirements(changed, runs_here))
    return changed if all(conflict.is_warning for conflict in conflicts) else None
