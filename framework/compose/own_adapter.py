"""`peft.adapter_path`: the config of a trained adapter overrides presets and defaults.

Values of the recipe's body and the command line must agree with it. Its targets are compared when it is built.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.compose.layers import Layer, highest
from framework.compose.origins import Node, Origin, node_of
from framework.compose.paths import looks_local
from framework.compose.trained_folders import ADAPTER_FILE, describe_trained, read_json, trained_folder
from framework.errors import Problem
from framework.hub import hub_is_reachable
from framework.paths import path_like
from framework.schema.choices import PeftMethod
from framework.schema.keys import Path as Key
from framework.schema.keys import dotted

KEY: Key = ("peft", "adapter_path")
BASE_RECORD = "base_model.json"
"""Record of an adapter's base: see framework/build/loading/bases.py."""
_METHODS = {
    "LORA": PeftMethod.LORA,
    "VERA": PeftMethod.VERA,
    "IA3": PeftMethod.IA3,
    "PREFIX_TUNING": PeftMethod.PREFIX,
    "PROMPT_TUNING": PeftMethod.PROMPT,
}
"""peft's `peft_type` -> our method."""
_NUMBERS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "num_virtual_tokens": "num_virtual_tokens",
}
"""peft's keys -> ours, for sizes and scales that the adapter determines."""
_LISTS = {
    "exclude_modules": "lora_exclude_modules",
    "layers_to_transform": "layers_to_transform",
    "modules_to_save": "lora_modules_to_save",
}
_FREE = {"lora_dropout": "lora_dropout", "vera_dropout": "lora_dropout"}
"""peft's keys -> ours, for values that a recipe may change."""
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "projection_prng_key": (None, 0),
    "encoder_hidden_size": (None,),
    "prefix_projection": (None, False),
}
"""peft's settings with the supported values; an adapter whose initial values were subtracted from the base
(`init_lora_weights: pissa`) needs that modified base."""


def with_own_adapter(layers: list[Layer], problems: list[Problem], warnings: list[Problem]) -> list[Layer]:
    """The layers with the adapter's own values below them, in place of presets' values. Adds a problem for each written
    value that differs, and for a missing adapter."""
    path, use = highest(layers, KEY), highest(layers, ("training", "use_peft"))
    if path is None or not isinstance(path.value, str) or not path.value or (use is not None and use.value is False):
        return layers
    found = find_adapter(path.value)
    refused = [found] if isinstance(found, Problem) else list(_refusals(*found))
    if refused or isinstance(found, Problem):
        problems.extend(replace(problem, where=path.origin.place) for problem in refused)
        return layers
    folder, config = found
    own = dict(_own(config))
    kept = [replace(layer, tree=_without_presets(layer.tree, own)) for layer in layers]
    problems.extend(_differences(kept, own, folder))
    sections: dict[str, Any] = {"peft": own, "training": {"use_peft": True}}
    # The adapter's base and its saved tokenizer, if none are written.
    base, model = config.get("base_model_name_or_path"), dict[str, str]()
    if isinstance(base, str) and base and not _writes(layers, "model_name", "architecture"):
        model["model_name"] = base
    if (folder / "tokenizer_config.json").exists() and not _writes(layers, "tokenizer_name", "tokenizer"):
        model["tokenizer_name"] = str(folder)
    if "model_name" not in model:
        warnings.extend(_other_base(layers, folder, config))
    sections |= {"model": model} if model else {}
    return [Layer(0, node_of(sections, Origin("default", str(folder / ADAPTER_FILE)))), *kept]


def _refusals(folder: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems for adapters that cannot be trained here."""
    file = folder / ADAPTER_FILE
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            yield Problem(dotted(KEY), f"{file} has {name}: {config[name]}", expected="an adapter without")
    if method_of(config) is None:
        known = ", ".join(sorted(set(_METHODS.values())))
        yield Problem(dotted(KEY), f"{file} is of the kind {config.get('peft_type')}", expected=f"one of: {known}")
    try:
        _token_rows(config)
    except (TypeError, ValueError) as error:
        yield Problem(dotted(KEY), f"{file} has unsupported trainable_token_indices: {error}")


def _differences(layers: list[Layer], own: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """A problem for each written value that differs from the adapter's."""
    for name, value in own.items():
        written = highest(layers, ("peft", name))
        is_compared = name not in ("lora_target_modules", *_FREE.values())
        if written is not None and is_compared and not _same(written.plain(), value):
            message = f"is {written.plain()}, and the adapter in {folder} has {value}"
            yield Problem(f"peft.{name}", message, written.origin.place, "unset: the adapter decides")


def _writes(layers: list[Layer], *names: str) -> bool:
    return any(highest(layers, ("model", name)) is not None for name in names)


def _other_base(layers: list[Layer], folder: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    """A warning if the model's name differs from the adapter's base and there is no record of the base to compare."""
    model, base = highest(layers, ("model", "model_name")), config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or (folder / BASE_RECORD).exists() or _is_same_model(model, base):
        return
    is_named = f"is {model.value}" if model is not None else "is unset"
    place = model.origin.place if model is not None else None
    message = f"{is_named}, and the adapter in {folder} was trained on {base}"
    yield Problem("model.model_name", message, place, base)


def find_adapter(written: str) -> tuple[Path, dict[str, Any]] | Problem:
    """The folder and config of an adapter, downloaded from the hub if needed; or a problem."""
    folder = Path(os.path.expanduser(written))
    if os.path.isdir(folder):  # False too for a name that no folder can have
        found = trained_folder(folder)
        config = read_json(found / ADAPTER_FILE)
        if config is not None:
            return found, config
        if (found / ADAPTER_FILE).exists():
            return Problem(dotted(KEY), f"{found / ADAPTER_FILE} cannot be read", expected="the file as it was saved")
        if (found / "config.json").exists():
            expected = f"model.model_name={found}, and no adapter_path"
            return Problem(dotted(KEY), f"{found} holds a full model, not an adapter", expected=expected)
        message, expected = describe_trained(folder) or (f"{folder} has no {ADAPTER_FILE}", "an adapter's folder")
        return Problem(dotted(KEY), message, expected=expected)
    if looks_local(written) or written.count("/") > 1:
        return Problem(dotted(KEY), f"there is no folder {written}", nearest=path_like(written, Path.is_dir))
    from huggingface_hub import hf_hub_download  # takes a tenth of a second to import

    try:
        file = Path(hf_hub_download(written, ADAPTER_FILE, local_files_only=not hub_is_reachable()))
    except Exception as error:  # the hub client raises many types
        reason = " ".join(str(error).split())[:200] if hub_is_reachable() else "the hub cannot be reached from here"
        return Problem(dotted(KEY), f"no folder and no adapter {written!r}: {reason}", expected="a folder or a hub id")
    config = read_json(file)
    if config is None:
        return Problem(dotted(KEY), f"{file} cannot be read", expected="an adapter of peft")
    return file.parent, config


def _token_rows(config: Mapping[str, Any]) -> list[int] | None:
    """Trained token rows of the matrices; None without. Raises ValueError if they differ between matrices."""
    written = config.get("trainable_token_indices")
    lists = [*written.values()] if isinstance(written, dict) else [written] if written else []
    if any(sorted(rows) != sorted(lists[0]) for rows in lists):
        raise ValueError("the rows of embedding and head differ")
    return sorted(lists[0]) if lists else None


def method_of(config: Mapping[str, Any]) -> PeftMethod | None:
    """The adapter kind of peft's config, or None if it is not supported."""
    method = _METHODS.get(str(config.get("peft_type")))
    variants = [name for name in ("use_rslora", "use_dora") if config.get(name)]
    if len(variants) > 1:
        return None
    return PeftMethod(variants[0].removeprefix("use_")) if variants else method


def _own(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Our keys of `peft` with the values of peft's config."""
    yield "peft_method", str(method_of(config))
    for name, key in (_NUMBERS | _FREE).items():
        if config.get(name) is not None:
            yield key, config[name]
    for name, key in _LISTS.items():
        value = config.get(name)
        if value:
            yield key, sorted(value) if isinstance(value, list) else [value]
    if rows := _token_rows(config):
        yield "trainable_token_indices", rows
    modules, stacked = config.get("target_modules"), config.get("target_parameters") or []
    if isinstance(modules, str) and not stacked:
        yield "lora_target_modules", modules
    elif modules or stacked:
        yield "lora_target_modules", [*sorted(modules or []), *sorted(stacked)]


def _without_presets(tree: Node, own: Mapping[str, Any]) -> Node:
    for name in own:
        node = tree.at(("peft", name))
        if node is not None and node.origin.kind == "group":
            tree = tree.without(("peft", name))
    return tree


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return sorted(map(str, one)) == sorted(map(str, other))
    return bool(one == other)


def _is_same_model(model: Node | None, base: str) -> bool:
    if model is None or not isinstance(model.value, str):
        return False
    return model.value == base or Path(model.value).expanduser().absolute() == Path(base).expanduser().absolute()
