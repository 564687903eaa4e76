"""Mappings that several tools share, since they hand these values to Hugging Face's `TrainingArguments`."""

import re
from typing import Any

from framework.converters.tables import table
from framework.converters.translation import Translation, Why
from framework.schema.choices import Attention, Scheduler, Tracker
from framework.schema.optimizers import Optimizer

OTHER_KERNEL = {"xformers": "sdpa's memory-efficient kernel is that of xformers"}


def carry_optimizer(t: Translation, key: str) -> None:
    """The optimizer by its name in transformers."""
    word = t.source.text(key)
    name = table("transformers")["optimizers"].get(word, word)
    if name in {str(choice) for choice in Optimizer}:
        t.put("training.optimizer", name, key)
    elif word:
        t.leave(key, Why.WRITE, f"training.optimizer, one of {', '.join(Optimizer)}; until then it is adamw_torch")


def carry_schedule(t: Translation, schedule: str, ratio: str, steps: str) -> None:
    """Shape of the rate and its warm-up. Hugging Face's `constant` has none, whatever is written next to it."""
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
    """The length in steps; transformers writes -1 for none."""
    steps = t.source.number(key)
    if steps is not None and steps <= 0:
        t.leave(key, Why.DEFAULT, "off: the epochs count")
    else:
        t.carry(key, "training.max_steps")


def carry_per_epoch(t: Translation, key: str, ours: str) -> None:
    """How often in an epoch: once is `epoch`, more often a share of the run's epochs, which are carried before."""
    count, epochs = t.source.number(key), t.entries.get("training.num_train_epochs")
    if not count or count < 0:
        return t.leave(key, Why.DEFAULT, "none in between")
    if count == 1:
        return t.put(ours, "epoch", key)
    if epochs is None or t.has("training.max_steps"):
        return t.leave(key, Why.WRITE, f"{ours}: optimizer steps, or a share of them below 1")
    t.put(ours, float(f"{1 / (count * epochs.value):.6g}"), key, comment=f"{count:g} times in an epoch")


def carry_attention(t: Translation, key: str) -> None:
    """The attention kernel; kernels that are fetched from a hub are those of the package of that name."""
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
        t.leave(key, Why.DEFAULT, "metrics.jsonl alone")
    for name in names:
        if name not in (*known, "none"):
            t.leave(key, Why.ABSENT, f"of {name}: trackers are {', '.join(Tracker)}")


def carry_deepspeed_file(t: Translation, key: str) -> None:
    """A file of DeepSpeed settings, which its name tells the stage of: it is another file, and not read."""
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
    """The class of the blocks; a list of several is left to be inferred."""
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
    """A validation set cut from the training rows: a share of them, or so many of the one source."""
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
    """The part of a number, without the noise of binary fractions."""
    return float(f"{share * whole:.12g}")


def first_rows(source: dict[str, Any], count: int) -> dict[str, Any]:
    """The source, of its first rows alone."""
    return {**source, "split": f"{source.get('split', 'train')}[:{count}]"}
