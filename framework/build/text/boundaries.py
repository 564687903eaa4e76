"""Start and end tokens that stand in a text already, where the tokenizer or training would add them once more."""

from transformers import PreTrainedTokenizerBase


def own_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that the tokenizer puts before a text, as it is written; empty where there is none."""
    return _written(tokenizer, 0, tokenizer.bos_token, tokenizer.cls_token)


def own_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that the tokenizer puts behind a text, as it is written; empty where there is none."""
    return _written(tokenizer, -1, tokenizer.eos_token, tokenizer.sep_token)


def without_end(text: str, token: str) -> str:
    """The text without this token at its end, nor the line breaks and spaces behind it: generation stops before."""
    bare = text.rstrip() if token else text
    return bare.removesuffix(token) if token and bare.endswith(token) else text


def _written(tokenizer: PreTrainedTokenizerBase, at: int, *tokens: str | list[str] | None) -> str:
    ids = tokenizer("a", verbose=False)["input_ids"]
    found = (each for each in tokens if isinstance(each, str) and each)
    return next((each for each in found if ids and ids[at] == tokenizer.convert_tokens_to_ids(each)), "")
