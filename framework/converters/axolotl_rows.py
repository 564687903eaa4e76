"""Axolotl's datasets: a path, and a `type` that names a strategy of reading prompts."""

from typing import Any

from framework.converters.shared_mappings import carry_share
from framework.converters.tables import leave, table
from framework.converters.translation import Translation, Why

LENGTHS = {"drop": "drop", "truncate": "right", "raise": "error"}
_PAIRS = ("chosen", "rejected")
CARRIED = (
    "path", "name", "split", "type", "field", "field_messages", "field_chosen", "field_rejected",
    "message_property_mappings.role", "message_property_mappings.content",
    "message_field_role", "message_field_content",
)  # fmt: skip
"""Keys of a source that ours is made of, unless something was said of them."""


def carry_data(t: Translation) -> None:
    """Sources, their forms, which tokens are trained on, and what is held out."""
    source = t.source
    for section, ours in {"datasets": "train", "pretraining_dataset": "train", "test_datasets": "eval"}.items():
        _carry_sources(t, section, f"data.{ours}")
    if isinstance(source.get("pretraining_dataset"), str):
        t.carry("pretraining_dataset", "data.train", lambda path: [{"path": path}])
    if source.has("pretraining_dataset") and t.has("training.max_steps"):
        t.put("data.streaming", True, comment="Axolotl streams what it pretrains on")
    is_whole = t.has("training.task", "preference") or t.has("training.task", "reward")
    if is_whole and source.get("sample_packing") is True:
        t.leave("sample_packing", Why.ABSENT, "answers are compared as wholes, a sequence each")
    else:
        t.carry("sample_packing", "data.packing")
    _carry_length(t)
    if t.has("data.streaming") or t.has("data.eval"):
        t.leave("val_set_size", Why.WRITE if source.number("val_set_size") else Why.DEFAULT, "data.eval")
    else:
        carry_share(t, "val_set_size")


def _carry_length(t: Translation) -> None:
    """Rows that are too long are dropped there, but texts of `completion` are cut into several."""
    key, word = "excess_length_strategy", t.source.text("excess_length_strategy") or "drop"
    kinds = {t.source.text(f"{item}.type") for item in t.source.items("datasets")}
    if word in LENGTHS and t.has("data.train") and not kinds & {"completion", "pretrain"}:
        t.put("data.truncation", LENGTHS[word], key, comment="" if t.source.has(key) else "Axolotl's default")


def _carry_sources(t: Translation, section: str, ours: str) -> None:
    found, of = [], []
    for item in t.source.items(section):
        made = _source(t, item)
        if made:
            found.append(made)
            of += [f"{item}.{name}" for name in CARRIED if t.is_open(f"{item}.{name}")]
    if found:
        t.put(ours, found, *of)


def _source(t: Translation, item: str) -> dict[str, Any]:
    """One source. What of it is not carried is left."""
    get, path = t.source.get, t.source.get(f"{item}.path")
    if not isinstance(path, str):
        return {}
    made: dict[str, Any] = {"path": path}
    files = t.source.strings(f"{item}.data_files")
    if files:
        t.leave(f"{item}.data_files", Why.WRITE, f"the file under `path`, downloaded: {', '.join(files)} of {path}")
    if isinstance(get(f"{item}.name"), str):
        made["name"] = get(f"{item}.name")
    if isinstance(get(f"{item}.split"), str) and get(f"{item}.split") != "train":
        made["split"] = get(f"{item}.split")
    made |= _form(t, item)
    leave(t, table("axolotl")["source"], f"{item}.")
    return made


def _form(t: Translation, item: str) -> dict[str, Any]:
    """Form and columns of a source, by its `type`."""
    source = t.source
    kind = source.text(f"{item}.type")
    messages, mappings = source.get(f"{item}.field_messages"), f"{item}.message_property_mappings"
    content = source.text(f"{mappings}.content") or source.text(f"{item}.message_field_content")
    if t.has("training.task", "preference") or t.has("training.task", "reward"):
        names = {side: source.get(f"{item}.field_{side}") or side for side in _PAIRS}
        if kind.startswith("chat_template"):
            names["prompt"] = messages or "messages"
        elif not kind.startswith("bradley_terry"):
            text = "columns of this source, from our prompt, chosen and rejected (docs/preference.md) to its own"
            t.leave(f"{item}.type", Why.WRITE, text)
        columns = {ours: theirs for ours, theirs in names.items() if ours != theirs}
        is_unpaired = t.has("training.preference.loss_type", "kto")
        return {"format": "unpaired" if is_unpaired else "preference"} | ({"columns": columns} if columns else {})
    if kind.startswith(("chat_template", "sharegpt")):
        is_sharegpt = content == "value" or kind.startswith("sharegpt")
        form, column = ("sharegpt", "conversations") if is_sharegpt else ("messages", "messages")
        theirs = messages or column
        return {"format": form} | ({"columns": {column: theirs}} if theirs != column else {})
    if kind == "alpaca":
        return {"format": "alpaca"}
    if kind in ("completion", "pretrain"):
        field = source.get(f"{item}.field") or "text"
        return {"format": "text"} | ({"columns": {"text": field}} if field != "text" else {})
    if source.has(f"{item}.type"):
        text = "format and columns of this source (docs/data.md); until then they are told from its columns"
        t.leave(f"{item}.type", Why.WRITE, text)
    return {}
