"""A tokenizer as llama.cpp reads it: byte-level BPE, whose splitting of words is one that llama.cpp has by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import Problem, RequestError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's kinds of tokens."""
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORD + r"\p{N}{1,3}" + _REST: "llama-bpe", _WORD + r"\p{N}" + _REST: "qwen2"}
"""Regular expression of a tokenizer -> llama.cpp's name (its src/llama-vocab.cpp)."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer. `types` as llama.cpp numbers them; `split` is its name of how words are
    split; `special` names of special tokens -> ids."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    split: str
    special: dict[str, int]
    adds_start: bool
    template: str | None


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a folder, padded to the `size` of the embedding. Raises RequestError for one that llama.cpp
    would read as another."""
    from transformers import AutoTokenizer

    file = folder / "tokenizer.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    model = document.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise _refused(folder, f"a tokenizer of the kind {model.get('type') or 'without tokenizer.json'}")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for text, index in model["vocab"].items():
        tokens[index], types[index] = text, NORMAL
    for added in document.get("added_tokens", ()):
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    special = {name: index for name, index in named.items() if index is not None}
    starts = tokenizer("a")["input_ids"][:1] == [special.get("bos")]
    template = tokenizer.chat_template
    return Vocabulary(tokens, types, merges, _split(folder, document), special, starts, template)


def _split(folder: Path, document: dict[str, Any]) -> str:
    """llama.cpp's name of how the tokenizer splits words."""
    before: dict[str, Any] = document.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if len(steps) == 1 and levels and levels[0].get("use_regex", True) and not levels[0].get("add_prefix_space"):
        return "gpt-2"
    if len(patterns) == 1 and levels and patterns[0] in SPLITS:
        return SPLITS[patterns[0]]
    raise _refused(folder, "how its tokenizer splits words")


def _refused(folder: Path, what: str) -> RequestError:
    message = f"{folder}: {what} is not one that can be written for llama.cpp"
    return RequestError([Problem("RUN", message, expected="a byte-level BPE of Llama 3, Qwen 2 or 3, or GPT-2's")])
