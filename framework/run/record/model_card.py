"""Model card of an export: `README.md` with base, data, recipe, results, and planned and measured memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import yaml

from framework.build.data.report import DataReport
from framework.build.model.heads import model_class
from framework.build.sources.find_files import is_local
from framework.errors import SaveFailed
from framework.memory.units import size
from framework.run.record.layout import replace_file
from framework.schema.config import TrainingConfig
from framework.text import dump

FILE = "README.md"
_SEAL = "\n<!-- Written by tunesmith; a later run leaves it alone once it is changed. {:08x} -->\n"
_SEALED = _SEAL.index("{")
_OF_MACHINE = {"training": ("output_dir", "fallback_dir"), "gpu": ()}
"""Keys omitted from the recipe in a card, by section; an empty list omits the whole section."""
PACKAGES = ("tunesmith", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Trained:
    """Contents of a card: resolved config, rows, evaluations in order, `memory.json`, `environment.json`."""

    config: TrainingConfig
    report: DataReport
    steps: int
    evals: Sequence[Mapping[str, float]]
    memory: Mapping[str, Any]
    environment: Mapping[str, Any]
    has_adapter: bool
    """Whether the export is an adapter without its base."""


def write_card(folder: Path, trained: Trained) -> None:
    """Write the card of an export, unless there is one that a user wrote or changed. Raises SaveFailed."""
    try:
        if is_ours(folder / FILE):
            text = model_card(trained, folder.parent.name)
            replace_file(folder / FILE, f"{text}{_SEAL.format(crc32(text.encode()))}")
    except OSError as error:
        raise SaveFailed(
            f"{folder / FILE} could not be written: {error.strerror}. The model next to it is complete."
        ) from error


def is_ours(file: Path) -> bool:
    """Whether the file is missing, or unchanged since it was written here."""
    if not file.exists():
        return True
    text = file.read_text(encoding="utf-8", errors="replace")
    card = text[: text.rfind(_SEAL[:_SEALED])]
    return text == f"{card}{_SEAL.format(crc32(card.encode()))}"


def model_card(trained: Trained, title: str) -> str:
    """The card as Markdown. Local paths are shortened to their last part."""
    config = trained.config
    front = yaml.safe_dump(_front(trained), sort_keys=False, allow_unicode=True)
    parts = [f"---\n{front}---\n\n# {title}\n", _summary(trained)]
    loader = model_class(trained.config.training.task).__name__
    if trained.has_adapter:
        loader = f"AutoPeft{loader.removeprefix('Auto')}"
    library = "peft" if trained.has_adapter else "transformers"
    usage = f'```python\nfrom {library} import {loader}\n\nmodel = {loader}.from_pretrained("PATH_OR_ID")\n```'
    parts += [_section("Use", usage), _section("Data", "\n".join(_data(trained)))]
    if trained.evals:
        first, last = trained.evals[0], trained.evals[-1]
        table = [f"| | step {first['step']:.0f} | step {last['step']:.0f} |\n| --- | ---: | ---: |"]
        for name, value in last.items():
            if name != "step":
                table.append(f"| {_cell(name)} | {first.get(name, float('nan')):.4f} | {value:.4f} |")
        parts.append(_section("Evaluation", "\n".join(table)))
    parts.append(_section("Memory", "\n".join(_memory(trained.memory))))
    # Settings that differ from the defaults, without machine-specific ones.
    document: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    for section, names in _OF_MACHINE.items():
        kept = {key: value for key, value in document.pop(section, {}).items() if key not in names}
        document |= {section: kept} if kept and names else {}
    recipe = {section: _without_folders(values) for section, values in document.items()}
    parts.append(_section("Recipe", f"```yaml\n{dump(recipe)}```"))
    return "\n".join(parts)


def _front(trained: Trained) -> dict[str, Any]:
    """The hub's metadata: library, task, base, data sets, tags."""
    config = trained.config
    base, sources = config.model.model_name, [source.path for source in config.data.train]
    method = [str(config.peft.peft_method)] if config.training.use_peft else []
    front: dict[str, Any] = {"library_name": "peft" if trained.has_adapter else "transformers"}
    front["pipeline_tag"] = "text-classification" if config.training.task.facts.is_of_rows else "text-generation"
    if base is not None and not _is_path(base) and config.model.load_pretrained_weights:
        front["base_model"] = base
    if hub := [path for path in dict.fromkeys(sources) if not is_local(path) and "/" in path]:
        front["datasets"] = hub
    return {**front, "tags": ["tunesmith", str(config.training.task), *method]}


def _summary(trained: Trained) -> str:
    config = trained.config
    what = f"{config.peft.peft_method} adapter" if config.training.use_peft else "model"
    name = config.model.model_name
    base = f" of {_last(name)}" if name is not None and config.model.load_pretrained_weights else ""
    packages = trained.environment.get("packages") or {}
    made = ", ".join(f"{package} {packages[package]}" for package in PACKAGES if packages.get(package))
    return f"A {what}{base}, trained for {config.training.task} in {trained.steps} steps with {made}.\n"


def _data(trained: Trained) -> Iterator[str]:
    data, report = trained.config.data, trained.report
    yield "| | source | split | format |\n| --- | --- | --- | --- |"
    for name, sources in (("training", data.train), ("evaluation", data.eval)):
        for source in sources:
            cells = (source.eval_set or name, _last(source.path), source.split, str(source.format or "detected"))
            yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""
    for name, split in (("Training", report.train), ("Evaluation", report.eval)):
        if split is not None:
            seen = f" ({split.stream})" if split.stream else ""
            rows = f"{split.kept:,} rows{seen} of at most {split.limit:,} tokens"
            yield f"{name}: {rows}, {split.supervised - split.supervised_lost:,} tokens supervised."


def _memory(memory: Mapping[str, Any]) -> Iterator[str]:
    measured, predicted = memory["measured"], memory["predicted"]
    device = measured.get("device_name") or "CPU"
    yield f"On {device} ({measured['counter']}).\n\n| peak | planned | measured |\n| --- | ---: | ---: |"
    for name in ("allocated", "reserved"):
        key = f"{name}_bytes"
        planned = size(predicted["peak"][key]) if predicted is not None else "not planned"
        yield f"| {name} | {planned} | {size(measured[key] - measured['baseline_bytes'])} |"


def _without_folders(value: Any) -> Any:
    """A value with its absolute paths shortened to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _is_path(name: str) -> bool:
    return os.path.isabs(name) or Path(name).exists()


def _last(name: str) -> str:
    """A hub id unchanged, a path's last part."""
    return Path(name).name if _is_path(name) else name
