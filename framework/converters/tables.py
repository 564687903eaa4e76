"""Tables of the tools (`tables/*.yaml`) and the engine that applies them.

A table has, at its top and in groups that hold under a condition (`adapter`, `sharded`, `preference`, ...):

- `same`: their key -> ours, where the value means the same.
- `values`: their key -> ours -> their value -> ours. Theirs is in lower case, may be a pattern of `fnmatch`, and `else`
  is any other. Ours is a value, `{value:, comment:}`, or a reason why it is not carried, `{default: text}`, with theirs
  for `{value}`. `nothing` stands for our key where only reasons follow.
- `defaults`: their key -> ours -> the value it has there where none is written.
- `switches`: section -> the key that turns it on; what stands there while that is not true asks for nothing.
- `left`: reason (a name of `Why`) -> text -> keys, in one string.

At the top, `refused` lists what makes a file none of ours. Whatever else a table holds, its tool's module reads.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from framework.converters.translation import Translation, Why
from framework.schema.choices import Attention, Scheduler, Tracker
from framework.schema.optimizers import Optimizer

WHY = {"absent": Why.ABSENT, "default": Why.DEFAULT, "not_ours": Why.NOT_OURS, "write": Why.WRITE}


@cache
def table(name: str) -> dict[str, Any]:
    """The named table."""
    rows: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "tables" / f"{name}.yaml").read_text("utf-8"))
    return rows


def refuse(t: Translation, rows: Mapping[str, Any]) -> None:
    """Raises RequestError for the first row of `refused` that the file matches.

    A row matches where one of its `keys` has a value: any, one of `in`, or none of `not_in`.
    """
    for row in rows["refused"]:
        for key in row["keys"].split():
            word = t.source.text(key)
            is_named = any(fnmatchcase(word, pattern) for pattern in row.get("in", row.get("not_in", ())))
            has_value = t.source.get(key) is not None or any(t.source.below(key))
            is_asked = bool(word) if "in" in row or "not_in" in row else has_value
            if is_asked and is_named is not ("not_in" in row or "in" not in row):
                raise t.source.refuse(key, _filled(t, key, row["message"]), row["expected"])


def apply(t: Translation, rows: Mapping[str, Any], tool: str) -> None:
    """Apply a table, or a group of one. If two keys set the same key of ours, the first one applies."""
    for theirs, targets in rows.get("values", {}).items():
        for ours, choices in targets.items():
            _carry_value(t, theirs, ours, choices)
    for theirs, ours in rows.get("same", {}).items():
        value = t.source.get(theirs)
        if value is not None and all(theirs != row.key for row in t.left):
            t.source.misread.pop(theirs, None)  # by the preceding words
            _put(t, ours, value, theirs)
    for theirs, targets in rows.get("defaults", {}).items():
        for ours, value in targets.items():
            is_moot = ours == "training.num_train_epochs" and t.has("training.max_steps")
            if t.source.get(theirs) is None and not is_moot and ours not in t.entries:
                value, comment = _with_comment(value)
                t.put(ours, value, theirs, comment=comment or f"{tool}'s default")


def leave(t: Translation, rows: Mapping[str, Any], section: str = "") -> None:
    """Record the reasons of `left` for values without a result; keys are relative to `section`."""
    for part, switch in rows.get("switches", {}).items():
        if t.source.get(switch) is not True:
            for key in filter(t.is_open, list(t.source.below(part))):
                t.leave(key, Why.DEFAULT, f"off: {switch} is not true")
    for why, texts in rows["left"].items():
        for text, keys in texts.items():
            for name in keys.split():
                for key in (f"{section}{name}", *t.source.below(f"{section}{name}")):
                    if key in t.source.leaves and t.is_open(key):
                        t.leave_unless_off(key, WHY[why], text)


def _carry_value(t: Translation, theirs: str, ours: str, choices: Mapping[Any, Any]) -> None:
    value = t.source.get(theirs)
    if value is None:
        return
    word = "" if isinstance(value, list | dict) else str(value).lower()
    named = {str(choice).lower(): found for choice, found in choices.items()}
    matched = next((choice for choice in named if choice != "else" and fnmatchcase(word, choice)), "else")
    if matched not in named:
        t.source.text(theirs)  # a value that is not a text is recorded there
        return
    found = named[matched]
    reason = next(iter(found), "") if isinstance(found, dict) else ""
    if reason in WHY:
        t.leave(theirs, WHY[reason], _filled(t, theirs, found[reason]))
        return
    found, comment = _with_comment(found)
    _put(t, ours, found, theirs, comment)


def _put(t: Translation, ours: str, value: Any, theirs: str, comment: str = "") -> None:
    there = t.entries.get(ours)
    if there is None:
        t.put(ours, value, theirs, comment=comment)
    elif there.value == value:
        t.put(ours, value, *there.of, theirs, comment=there.comment)


def _with_comment(value: Any) -> tuple[Any, str]:
    return (value["value"], value.get("comment", "")) if isinstance(value, dict) else (value, "")


def _filled(t: Translation, key: str, text: str) -> str:
    return text.replace("{value}", str(t.source.get(key)))


OTHER_KERNEL = {"xformers": "sdpa's memory-efficient kernel is that of xformers"}


def carry_optimizer(t: Translation, key: str) -> None:
    """The optimizer, by its name in transformers."""
    word = t.source.text(key)
    name = table("transformers")["optimizers"].get(word, word)
    if name in {str(choice) for choice in Optimizer}:
        t.put("training.optimizer", name, key)
    elif word:
        t.leave(key, Why.WRITE, f"training.optimizer, one of {', '.join(Optimizer)}; until then it is adamw_torch")


def carry_schedule(t: Translation, schedule: str, ratio: str, steps: str) -> None:
    """Schedule and warm-up. Hugging Face's `constant` never has a warm-up."""
    word = t.source.text(schedule)
    if word in {str(choice) for choice in Scheduler} or word == "constant_with_warmup":
        t.put("training.lr_scheduler_type", word.removesuffix("_with_warmup"), schedule)
    elif word:
        t.leave(schedule, Why.WRITE, f"training.lr_scheduler_type, one of {', '.join(Scheduler)}; until then linear")
    if word == "constant":
        for key in (ratio, steps):
            t.leave(key, Why.DEFAULT, "the schedule `constant` there has no warm-up")
        return
    count = t.source.number(steps)
    if count is not None and 0 < count < 1:  # transformers 5 takes a share of the steps under this key too
        t.put("training.warmup_ratio", count, steps)
        t.leave(ratio, Why.DEFAULT, f"{steps} goes before it")
    elif count:
        t.put("training.warmup_steps", count, steps)
        t.leave(ratio, Why.DEFAULT, f"{steps} goes before it")
    else:
        t.carry(ratio, "training.warmup_ratio")
        t.leave(steps, Why.DEFAULT)


def carry_steps(t: Translation, key: str) -> None:
    """The length in steps; -1 means none in transformers."""
    steps = t.source.number(key)
    if steps is not None and steps <= 0:
        t.leave(key, Why.DEFAULT, "off: the epochs count")
    else:
        t.carry(key, "training.max_steps")


def carry_per_epoch(t: Translation, key: str, ours: str) -> None:
    """Times per epoch: once is `epoch`, more often a share of the run's epochs, which must be converted first."""
    count, epochs = t.source.number(key), t.entries.get("training.num_train_epochs")
    if not count or count < 0:
        return t.leave(key, Why.DEFAULT, "none in between")
    if count == 1:
        return t.put(ours, "epoch", key)
    if epochs is None or t.has("training.max_steps"):
        return t.leave(key, Why.WRITE, f"{ours}: optimizer steps, or a share of them below 1")
    t.put(ours, float(f"{1 / (count * epochs.value):.6g}"), key, comment=f"{count:g} times in an epoch")


def carry_attention(t: Translation, key: str) -> None:
    """The attention kernel; hub kernels are those of the package of the same name."""
    word = t.source.text(key)
    name = table("transformers")["attention"].get(word, Attention.other_spellings().get(word, word))
    if name in {str(choice) for choice in Attention}:
        t.put("model.attn_implementation", name, key, comment=OTHER_KERNEL.get(word, ""))
    elif word == "auto":
        t.leave(key, Why.DEFAULT)
    elif word:
        t.leave(key, Why.WRITE, f"model.attn_implementation, one of {', '.join(Attention)}")


def carry_trackers(t: Translation, key: str) -> None:
    """`report_to`: one tracker or several."""
    known = {str(tracker): str(tracker) for tracker in Tracker} | Tracker.other_spellings()
    names = [name.lower() for name in t.source.strings(key)]
    ours = [known[name] for name in names if name in known]
    if ours:
        t.put("training.trackers", ours, key)
    elif names in ([], ["none"]):
        t.leave(key, Why.DEFAULT, "only metrics.jsonl")
    for name in names:
        if name not in (*known, "none"):
            t.leave(key, Why.ABSENT, f"of {name}: trackers are {', '.join(Tracker)}")


def carry_deepspeed_file(t: Translation) -> None:
    """A file of DeepSpeed settings, whose name gives the stage: the separate file is not read."""
    key = "deepspeed"
    word = t.source.text(key)
    if not word:
        return
    found = re.search(r"(?:zero|z)[_-]?([0-3])", word.rpartition("/")[2])
    if found is None:
        t.leave(key, Why.WRITE, "fsdp.enable_fsdp: true where that file has stage 1, 2 or 3")
        return
    carry_stage(t, int(found[1]), "offload" in word, key)


def carry_stage(t: Translation, stage: int, is_on_host: bool, *of: str) -> None:
    """A ZeRO stage as sharding."""
    if stage == 0:
        for key in of:
            t.leave(key, Why.DEFAULT, "stage 0 splits nothing: each device holds a copy")
        return
    comment = f"ZeRO-{stage}" if stage > 1 else "ZeRO-1, and gradients are split as well"
    t.put("fsdp.enable_fsdp", True, *of, comment=comment)
    t.put("fsdp.sharding_strategy", "FULL_SHARD" if stage == 3 else "SHARD_GRAD_OP", *of)
    if is_on_host:
        t.put("fsdp.cpu_offload", True, *of, comment="weights, gradients and states go together")


def carry_layer_class(t: Translation, key: str) -> None:
    """The class of the blocks; a list of several is inferred instead."""
    classes = t.source.get(key)
    if isinstance(classes, str) and "," not in classes:
        t.put("fsdp.transformer_layer_cls", classes, key)
    else:
        t.leave(key, Why.DEFAULT, "the blocks of the model, inferred and printed")


def put_precision(t: Translation, held: str | None, computed: str | None, *of: str, comment: str = "") -> None:
    """dtype of the weights and of autocast."""
    if held:
        t.put("model.torch_dtype_str", held, *of, comment=comment)
    if computed:
        t.put("training.mixed_precision_dtype", computed, *of)


def carry_share(t: Translation, key: str) -> None:
    """A validation set split from the training rows: a share, or a number of rows of a single source."""
    size = t.source.number(key)
    sources = t.entries.get("data.train")
    if not size:
        t.leave(key, Why.DEFAULT, "no rows are held out")
    elif size < 1:
        t.put("data.eval_fraction", size, key)
    elif sources and len(sources.value) == 1 and "[" not in sources.value[0].get("split", ""):
        split, count = sources.value[0].get("split", "train"), int(size)
        t.put("data.eval", [{**sources.value[0], "split": f"{split}[:{count}]"}], *sources.of, key)
        t.put("data.train", [{**sources.value[0], "split": f"{split}[{count}:]"}], *sources.of, key)
    else:
        t.leave(key, Why.WRITE, f"data.eval_fraction: the share that {int(size)} rows are of all")


def product(share: float, whole: float) -> float:
    """A fraction, without binary rounding noise."""
    return float(f"{share * whole:.12g}")


def first_rows(source: dict[str, Any], count: int) -> dict[str, Any]:
    """The source, limited to its first rows."""
    return {**source, "split": f"{source.get('split', 'train')}[:{count}]"}
