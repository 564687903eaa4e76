"""Targets of an adapter: the modules and stacked expert weights for `peft.lora_target_modules`."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from peft.utils import constants
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.hub import nearest
from framework.build.model.heads import head_layers
from framework.errors import Problem, RequestError
from framework.schema.choices import PeftMethod
from framework.schema.peft import PeftParams
from framework.schema.plural import counted

_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Targets:
    """Full names of the adapted modules and stacked weights, with notes for the user."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """Full names of the modules that get an adapter layer, including those with adapted stacked weights."""
        return (*self.modules, *(name.rpartition(".")[0] for name in self.parameters))


def fits(pattern: str, name: str) -> bool:
    """Whether a name, or a regular expression for its end, matches a module, as in peft's patterns."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def of_pattern(patterns: dict[str, float], name: str, default: float) -> float:
    """The value of the first pattern that matches a target, as in peft (`get_pattern_key`)."""
    return next((value for pattern, value in patterns.items() if fits(pattern, name)), default)


def without_excluded(params: PeftParams, targets: Targets) -> Targets:
    """The targets in the requested blocks without excluded ones. Raises RequestError if none is left, or a name
    excludes nothing."""
    problems = list(_invalid(params))
    if problems:
        raise RequestError(problems)
    names = [*targets.modules, *targets.parameters]
    for index, pattern in enumerate(params.lora_exclude_modules):
        if not any(fits(pattern, name) for name in names):
            problems.append(_unmatched(f"peft.lora_exclude_modules[{index}]", pattern, names))
    blocks = {_block(name) for name in names}
    for block in params.layers_to_transform or ():
        if block not in blocks:
            last = max((each for each in blocks if each is not None), default=0)
            message = f"no target is in block {block}"
            problems.append(Problem("peft.layers_to_transform", message, expected=f"numbers from 0 to {last}"))
    kept = {
        name
        for name in names
        if (params.layers_to_transform is None or _block(name) in params.layers_to_transform)
        and not any(fits(pattern, name) for pattern in params.lora_exclude_modules)
    }
    if not kept and not problems:
        keys = "peft.lora_exclude_modules" if params.lora_exclude_modules else "peft.layers_to_transform"
        problems.append(Problem(keys, "no target is left to adapt", expected="fewer exclusions"))
    if problems:
        raise RequestError(problems)
    return replace(
        targets,
        modules=tuple(name for name in targets.modules if name in kept),
        parameters=tuple(name for name in targets.parameters if name in kept),
    )


def check_patterns(params: PeftParams, targets: Targets) -> None:
    """Raise RequestError for a pattern without a match, or with an invalid value."""
    problems, names = list[Problem](), targets.modules  # peft supports no patterns for stacked weights
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern, value in getattr(params, key).items():
            where = f"peft.{key}.{pattern}"
            whole = isinstance(value, int) and not isinstance(value, bool)
            number = whole if key == "rank_pattern" else whole or isinstance(value, float)
            if not number or not value > 0:
                expected = "a whole number above 0" if key == "rank_pattern" else "a number above 0"
                problems.append(Problem(where, f"{value!r} is none", expected=expected))
            elif not any(fits(pattern, name) for name in names):
                problems.append(_unmatched(where, pattern, names))
    if problems:
        raise RequestError(problems)


def _block(name: str) -> int | None:
    """Index of the transformer block of a module."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def _invalid(params: PeftParams) -> Iterator[Problem]:
    """Problems for invalid regular expressions."""
    keys = [(f"peft.lora_exclude_modules[{index}]", text) for index, text in enumerate(params.lora_exclude_modules)]
    for name in ("rank_pattern", "alpha_pattern"):
        keys += [(f"peft.{name}.{pattern}", pattern) for pattern in getattr(params, name)]
    for key, pattern in keys:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(key, f"{pattern!r} is not a regular expression: {error}")


def _unmatched(key: str, pattern: str, names: Sequence[str]) -> Problem:
    ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
    return Problem(key, f"{pattern!r} matches none of the adapted modules", expected=f"one of {ends}, or an expression")


KEY = "peft.lora_target_modules"
ALL_LINEAR = "all-linear"
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj")
_DENSE = ("self_attention.dense", "attention.dense", "self_attn.dense", "attention.output.dense")
_WIDENING = ("gate_up_proj", "c_fc", "fc1", "lin1", "dense_h_to_4h", "mlp.Wi", "intermediate.dense")
ROLES = (
    ("q_proj", "query", "q_lin", *_FUSED),
    ("k_proj", "key", "k_lin", *_FUSED),
    ("v_proj", "value", "v_lin", *_FUSED),
    ("o_proj", "out_proj", "out_lin", "attn.c_proj", "attn.Wo", *_DENSE),
    ("gate_proj", "w1", *_WIDENING),
    ("up_proj", "w3", *_WIDENING),
    ("down_proj", "w2", "mlp.c_proj", "fc2", "lin2", "dense_4h_to_h", "mlp.Wo", "output.dense"),
)
"""Names of layers with the same role in transformers' model families: queries, keys, values, output projection of
attention; gate, up and down projections of the feed-forward network."""
_ON_EXPERTS = (PeftMethod.LORA, PeftMethod.RSLORA)
"""Kinds that peft supports on stacked weights (ParamWrapper in peft/tuners/lora/layer.py), without dropout."""


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Full names of all linear layers except the head."""
    head, kinds = head_layers(model), (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module not in head]


def stacked_experts(model: nn.Module) -> list[str]:
    """Full names of stacked expert weights: three-dimensional parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


def find_targets(params: PeftParams, model: PreTrainedModel) -> Targets:
    """The written targets, else peft's defaults for the model and adapter, without exclusions.

    Raises RequestError, with the existing linear layers, if nothing matches or a pattern matches no target.
    """
    targets = without_excluded(params, _written_targets(params, model))
    check_patterns(params, targets)
    return targets


def _written_targets(params: PeftParams, model: PreTrainedModel) -> Targets:
    wanted = params.lora_target_modules
    if wanted is None:
        wanted = _default(params, model)
    if not wanted:
        expected = f"[{ALL_LINEAR}], or some of {_available(model)}; unset is peft's choice for the model"
        raise RequestError([Problem(KEY, "names no module to adapt", expected=expected)])
    if wanted in (ALL_LINEAR, (ALL_LINEAR,)):
        return _all_linear(params, model)
    modules, experts = [name for name, _ in model.named_modules() if name], stacked_experts(model)
    if isinstance(wanted, str):
        return _by_expression(params, model, wanted, modules, experts)
    found: dict[str, list[str]] = {target: _named(target, [*modules, *experts]) for target in wanted}
    renamed = _renamed_experts(params, model)
    missing = [target for target, names in found.items() if not names and target not in renamed]
    if len(missing) == len(found):
        raise RequestError([_no_match(f"{KEY}[{list(found).index(target)}]", target, model) for target in missing])
    warnings = [_partial(_no_match(KEY, target, model)) for target in missing]
    names = [name for target, hits in found.items() for name in hits or _named(renamed.get(target, ""), experts)]
    return _split(params, model, names, warnings)


def modules_within(model: nn.Module, named: Sequence[str]) -> set[str]:
    """Full names of the modules matched by a name or its end, and of all modules inside them."""
    names = [name for name, _ in model.named_modules() if name]
    roots = [found for wanted in named for found in _named(wanted, names)]
    return {name for name in names for root in roots if name == root or name.startswith(f"{root}.")}


def _named(target: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _by_expression(
    params: PeftParams, model: PreTrainedModel, text: str, modules: list[str], experts: list[str]
) -> Targets:
    """Targets of a text: a regular expression for full names, or, without special characters, one name."""
    try:
        expression = re.compile(text)
    except re.error as error:
        raise RequestError([Problem(KEY, f"{text!r} is not a regular expression: {error}")]) from None
    names = _named(text, [*modules, *experts]) or [name for name in [*modules, *experts] if expression.fullmatch(name)]
    leaves = {name for name in names if name in experts or not list(model.get_submodule(name).children())}
    if not leaves:
        raise RequestError([_no_match(KEY, text, model)])
    return _split(params, model, [name for name in names if name in leaves], [])


def _default(params: PeftParams, model: PreTrainedModel) -> tuple[str, ...]:
    tables = {
        PeftMethod.IA3: constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
        PeftMethod.OFT: constants.TRANSFORMERS_MODELS_TO_OFT_TARGET_MODULES_MAPPING,
        PeftMethod.VERA: constants.TRANSFORMERS_MODELS_TO_VERA_TARGET_MODULES_MAPPING,
    }
    table = tables.get(params.peft_method, constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
    known = table.get(model.config.model_type)
    if known is None:
        message = f"peft has no default for {model.config.model_type}: name the targets"
        raise RequestError([Problem(KEY, message, expected=f"[{ALL_LINEAR}], or some of {_available(model)}")])
    return tuple(known)


def _all_linear(params: PeftParams, model: PreTrainedModel) -> Targets:
    """All linear layers except the head and modules trained in full, and all stacked expert weights if the kind of
    adapter supports them."""
    experts, whole = stacked_experts(model), modules_within(model, params.lora_modules_to_save)
    linear = [name for name in linear_modules(model) if name not in whole]
    modules, warnings = _without_clashes(params, model, linear)
    if experts and (reason := _unreachable(params)):
        warnings.append(f"{KEY}: the experts are not adapted: {reason}")
        experts = []
    return Targets(tuple(modules), tuple(experts), tuple(warnings))


def _split(params: PeftParams, model: PreTrainedModel, names: list[str], warnings: list[str]) -> Targets:
    experts = set(stacked_experts(model))
    parameters = tuple(dict.fromkeys(name for name in names if name in experts))
    if parameters and (reason := _unreachable(params)):
        raise RequestError([Problem(KEY, f"{parameters[0]} cannot be adapted: {reason}")])
    kept, clashes = _without_clashes(params, model, [name for name in names if name not in experts])
    modules, warnings = tuple(dict.fromkeys(kept)), [*warnings, *clashes]
    if not modules or parameters or not experts:
        return Targets(modules, parameters, tuple(warnings))
    suffixes = sorted({".".join(name.rsplit(".", 2)[-2:]) for name in experts})
    reason = _unreachable(params)  # else a written list leaves them out
    how = f"{reason}, then " if reason else ""
    warning = f"{KEY}: experts are at 0 %; {how}[{ALL_LINEAR}] or {', '.join(suffixes)} adapt them"
    return Targets(modules, parameters, (*warnings, warning))


def _without_clashes(params: PeftParams, model: PreTrainedModel, names: list[str]) -> tuple[list[str], list[str]]:
    """The names without those that peft would take for experts (convert_peft_config_for_transformers), and a warning.

    It would do so here and at each reload, so layers with such names in a mixture of experts cannot be adapted.
    """
    renamed = _renamed_experts(params, model)
    clashing = [name for name in names if name.rsplit(".", 1)[-1] in renamed]
    if not clashing:
        return names, []
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in clashing}))
    layers = counted(len(clashing), "layer outside the experts is", "layers outside the experts are")
    warning = f"{KEY}: {layers} not adapted: peft takes {kinds} for experts' names"
    return [name for name in names if name not in clashing], [warning]


def _unreachable(params: PeftParams) -> str | None:
    """Why this adapter does not support stacked weights, with the setting that does."""
    if params.peft_method not in _ON_EXPERTS:
        return f"peft does not support {params.peft_method} on stacked weights, but peft.peft_method=lora"
    if params.lora_dropout:
        return "peft supports no dropout on stacked weights, but peft.lora_dropout=0"
    return None


def _renamed_experts(params: PeftParams, model: PreTrainedModel) -> dict[str, str]:
    """Names of experts before transformers 5 stacked them, which peft translates: old name -> stacked weight."""
    if params.peft_method in (PeftMethod.VERA, PeftMethod.IA3, PeftMethod.OFT) or not stacked_experts(model):
        return {}
    pattern = _MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return {old: new for old, new in _MOE_TARGET_MODULE_MAPPING.get(pattern, {}).items() if old != "gate"}


def _no_match(key: str, target: str, model: PreTrainedModel) -> Problem:
    suffixes = linear_suffixes(model)
    message = f"{target!r} names no module of this model"
    if any(sign in target for sign in "*[](|)^$\\+?"):
        message += " (a regular expression is one text, not an item of a list, and matches whole names)"
    names = [word for word in re.split(r"[^A-Za-z0-9_]+", target) if word]
    known = [ALL_LINEAR, *suffixes]
    aliases = [alias for role in ROLES for alias in role]
    near = next((found for word in [target, *names] if (found := nearest(word, [*known, *aliases]))), None)
    near = _of_same_role(near or target, model) or (near if near in known else None)
    near = ALL_LINEAR if target.lower() in ("all", "linear") else near
    return Problem(key, message, expected=f"[{ALL_LINEAR}], or some of {_available(model)}", nearest=near)


def _partial(problem: Problem) -> str:
    """Warning about a target without a match if others match."""
    hint = f"; did you mean {problem.nearest}?" if problem.nearest else ""
    return f"{problem.key}: {problem.message}; the others do{hint}"


def _of_same_role(target: str, model: PreTrainedModel) -> str | None:
    """This model's names for the layers with the role of another family's name."""
    names, last = linear_modules(model), target.rsplit(".", 1)[-1]
    equivalents = [alias for role in ROLES if any(_named(last, [alias]) for alias in role) for alias in role]
    return ", ".join(alias for alias in dict.fromkeys(equivalents) if _named(alias, names)) or None


def _available(model: nn.Module) -> str:
    return ", ".join(f"{name} ({count})" for name, count in linear_suffixes(model).most_common())


def linear_suffixes(model: nn.Module) -> Counter[str]:
    """Last name segment of linear layers, and last two of stacked expert weights, with counts."""
    linear = (nn.Linear, Conv1D)
    names = [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, linear)]
    return Counter([*names, *(".".join(name.rsplit(".", 2)[-2:]) for name in stacked_experts(model))])
