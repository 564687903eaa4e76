"""`model.added_tokens`: tokens that a tokenizer is given, and what they were made of before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import AddedToken, PreTrainedTokenizerBase

from framework.errors import Problem, RequestError

KEY = "model.added_tokens"


@dataclass(frozen=True)
class Vocabulary:
    """How many tokens a tokenizer has, with those that are added, and of each added one its id and the ids of the
    tokens that spelled it before."""

    tokens: int
    added: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the added tokens."""
        return tuple(number for number, _ in self.added)


def add_tokens(tokenizer: PreTrainedTokenizerBase, written: Sequence[str]) -> Vocabulary:
    """Give the tokenizer each token that it does not have. They are no special tokens: decoding keeps them.

    Raises RequestError for a text that is empty or written twice.
    """
    if problems := list(_unusable(written)):
        raise RequestError(problems)
    known = tokenizer.get_vocab()
    new = [token for token in written if token not in known]
    parts = [tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in new]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    numbers = tokenizer.convert_tokens_to_ids(new)
    return Vocabulary(len(tokenizer), tuple(zip(numbers, parts, strict=True)))


def _unusable(written: Sequence[str]) -> Iterator[Problem]:
    for index, token in enumerate(written):
        if not token.strip():
            yield Problem(f"{KEY}[{index}]", f"{token!r} is no token", expected="a text")
        elif token in written[:index]:
            yield Problem(f"{KEY}[{index}]", f"{token!r} is written twice", expected="each token once")
