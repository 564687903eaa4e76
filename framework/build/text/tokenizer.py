"""The tokenizer: loaded or trained on the training text, with the recipe's chat template and added tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from framework.build.hub import cached_models, hub_host, leave_to_run_code, nearest, one_line
from framework.build.model_folder import local_folder, missing_folder, read_object, require_readable
from framework.build.text.named_templates import read_template
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.plural import counted


def own_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the token that the tokenizer puts before a text; empty if there is none."""
    return _written(tokenizer, 0, tokenizer.bos_token, tokenizer.cls_token)


def own_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of the token that the tokenizer puts after a text; empty if there is none."""
    return _written(tokenizer, -1, tokenizer.eos_token, tokenizer.sep_token)


def without_end(text: str, token: str) -> str:
    """The text without this token at its end, or whitespace after it, since generation stops before it."""
    bare = text.rstrip() if token else text
    return bare.removesuffix(token) if token and bare.endswith(token) else text


def _written(tokenizer: PreTrainedTokenizerBase, at: int, *tokens: str | list[str] | None) -> str:
    ids = tokenizer("a", verbose=False)["input_ids"]
    found = (each for each in tokens if isinstance(each, str) and each)
    return next((each for each in found if ids and ids[at] == tokenizer.convert_tokens_to_ids(each)), "")


KEY = "model.added_tokens"


@dataclass(frozen=True)
class Vocabulary:
    """Size of a tokenizer with its added tokens, and for each added token its id and the ids that it was split into
    before."""

    tokens: int
    added: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the added tokens."""
        return tuple(number for number, _ in self.added)


def add_tokens(tokenizer: PreTrainedTokenizerBase, written: Sequence[str]) -> Vocabulary:
    """Add the tokens that the tokenizer does not have. They are not special tokens: decoding keeps them.

    Raises RequestError for a text that is empty or written twice.
    """
    problems = list[Problem]()
    for index, token in enumerate(written):
        if not token.strip():
            problems.append(Problem(f"{KEY}[{index}]", f"{token!r} is not a token", expected="a text"))
        elif token in written[:index]:
            problems.append(Problem(f"{KEY}[{index}]", f"{token!r} is written twice", expected="each token once"))
    if problems:
        raise RequestError(problems)
    known = tokenizer.get_vocab()
    new = [token for token in written if token not in known]
    parts = [tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in new]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    numbers = tokenizer.convert_tokens_to_ids(new)
    return Vocabulary(len(tokenizer), tuple(zip(numbers, parts, strict=True)))


END_TOKEN = "<|endoftext|>"
"""Separates documents and precedes the first, as in GPT-2, so the first token of a text is supervised too."""

END_TOKEN_ID = 0
"""Special tokens come first in a vocabulary trained here."""

PAD_TOKEN = "<|pad|>"

BPE_CHARACTERS = 8_000_000
"""Maximum text for the BPE trainer. Merges of a small vocabulary converge long before this; 2.6 s on 2 cores of an EPYC
(tokenizers 0.23, 2026-07), and time is proportional."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")
"""Files of which a folder needs at least one to hold a tokenizer."""


def build_tokenizer(config: TrainingConfig, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with `model.chat_template` set so that it is saved with the model.

    `texts` is read only if `model.tokenizer` asks to train a tokenizer. A missing pad token stays missing (see
    `padding_id`). Raises RequestError if it can be neither trained nor loaded.
    """
    model = config.model
    if model.tokenizer is None:
        tokenizer = load_tokenizer(model)
        add_tokens(tokenizer, model.added_tokens)
    elif model.tokenizer_name is not None:
        message = "is set, and model.tokenizer asks to build one; set only one of them"
        raise RequestError([Problem("model.tokenizer_name", message)])
    else:
        tokenizer = train_tokenizer(texts, model.tokenizer.vocab_size)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
    return tokenizer


def vocabulary_of(model: ModelParams) -> Vocabulary:
    """Vocabulary of a config's tokenizer with its added tokens. Raises RequestError as `build_tokenizer` does."""
    read = ("model_name", "tokenizer_name", "added_tokens", "trust_remote_code", "model_revision")
    return _vocabulary(ModelParams(**{name: getattr(model, name) for name in read}))


@lru_cache(8)
def _vocabulary(model: ModelParams) -> Vocabulary:
    return add_tokens(load_tokenizer(model), model.added_tokens)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (as GPT-2's: every text round-trips) of at most `vocab_size` tokens.

    The same texts give the same tokenizer. Reads at most `BPE_CHARACTERS` characters. Raises RequestError when there
    is no text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    limit = BPE_CHARACTERS
    sample = []
    for text in texts:
        sample.append(text[:limit])
        limit -= len(sample[-1])
        if not limit:
            break
    if not any(sample):
        raise RequestError([Problem("model.tokenizer", "there is no training text to build the tokenizer on")])
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills short rows: the pad token, else the end token, else 0.

    Any id works, because labels and attention mask are made from positions and never from ids.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0


def load_tokenizer(model: ModelParams) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises RequestError if there is none or it is damaged."""
    key = "model.tokenizer_name" if model.tokenizer_name is not None else "model.model_name"
    name = model.tokenizer_name or model.model_name
    if name is None:
        expected = "a hub id, a folder, or `model.tokenizer: {train: bpe, vocab_size: 4096}` to build one"
        raise RequestError([Problem("model.tokenizer_name", "there is no tokenizer", expected=expected)])
    folder = local_folder(name)
    if folder is not None and not folder.is_dir():
        raise RequestError([missing_folder(name, key)])
    if folder is not None:
        return read_tokenizer_of(folder, key, model.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=model.model_revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=not hub_is_reachable(),
        )
    except (
        Exception
    ) as error:  # transformers, tokenizers and the hub client raise many types here, some plain Exception
        raise RequestError([_not_found(name, key, error)]) from error
    return _as_saved(tokenizer, name, key)


def read_tokenizer_of(folder: Path, key: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder. Raises RequestError, under `key`, naming the missing or damaged file."""
    require_readable(folder, key)
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        message = f"the folder {folder.absolute()} has no tokenizer files; it has {found}"
        raise RequestError([Problem(key, message, expected="tokenizer.json, or set model.tokenizer_name")])
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # many types, some plain Exception
        if (folder / TOKENIZER_FILES[0]).exists():
            read_object(folder / TOKENIZER_FILES[0], key)
        message = f"the tokenizer in {folder.absolute()} does not load: {one_line(error)}"
        raise RequestError([Problem(key, message, expected=leave_to_run_code(error))]) from error
    return _as_saved(tokenizer, str(folder), key)


def _as_saved(tokenizer: PreTrainedTokenizerBase, name: str, key: str) -> PreTrainedTokenizerBase:
    """The tokenizer without transformers' notes on how it was loaded, which would be saved with it."""
    # A folder with no vocabulary still loads for some model types, as a tokenizer that knows only its special tokens.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        message = f"the tokenizer of {name!r} has no vocabulary, only {counted(len(tokenizer), 'special token')}"
        raise RequestError([Problem(key, message)])
    if not isinstance(tokenizer.model_max_length, int | float):  # every call compares with it
        message = f"the tokenizer of {name!r} has model_max_length {tokenizer.model_max_length!r}"
        raise RequestError([Problem(key, message, expected="a number in its tokenizer_config.json")])
    for note in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(note, None)
    return tokenizer


def _not_found(name: str, key: str, error: Exception) -> Problem:
    tried = f"no folder {Path(name).absolute()}"
    if hub_is_reachable():
        tried += f"; {hub_host()} answered: {one_line(error)}"
    else:
        tried += f"; {hub_host()} cannot be reached from here; and it is not among the models downloaded before"
    known = cached_models()
    return Problem(
        key,
        f"no tokenizer {name!r} was found: {tried}",
        expected=f"one of the downloaded models: {', '.join(known[:8])}" if known else None,
        nearest=nearest(name, known),
    )


ROWS_LOOKED_AT = 64
"""Rows from which the end token of answers is read: a template ends all of them alike, and some are truncated."""


def supervised_ends(rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the special tokens that are the last supervised token in one of the first rows."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    labels = (rows[index]["labels"] for index in range(min(len(rows), ROWS_LOOKED_AT)))
    last = {next((label for label in reversed(row) if label >= 0), None) for row in labels}
    return sorted(number for number in last if number in special and number is not None)


def stop_at(model: PreTrainedModel, ends: Sequence[int]) -> None:
    """Add these tokens to the stop tokens of the model's generation config, which is exported."""
    if not (ends and model.can_generate()):
        return
    known = model.generation_config.eos_token_id
    listed = known if isinstance(known, list) else [] if known is None else [known]
    if new := [end for end in ends if end not in listed]:
        model.generation_config.eos_token_id = [*listed, *new]
