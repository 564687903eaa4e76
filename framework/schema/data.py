"""`data`: the rows, which slice of a source they are, and which of their tokens are supervised."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from framework.schema.choices import Mixing, RowFormat, Supervise, Task, Truncation
from framework.schema.facts import FREE, NO_MEMORY, UsedUnless, UsedWith
from framework.schema.params import FrozenMapping, Number, Params, parse_sequence
from framework.schema.training import Count, Positive
from framework.schema.urls import DataPath

_PART = re.compile(
    r"(?P<name>[\w.-]+)"
    r"(?P<slice>\[(?P<first>-?\d[\d_]*)?(?P<first_share>(?<=\d)%)?:(?P<last>-?\d[\d_]*)?(?P<last_share>(?<=\d)%)?\])?"
)


@dataclass(frozen=True)
class Bound:
    """One end of a slice: a row number, negative ones from the end, or with `is_share` a percentage of the rows."""

    number: int
    is_share: bool

    @property
    def needs_count(self) -> bool:
        """Whether the number of rows has to be known to say which row is meant."""
        return self.is_share or self.number < 0

    def of(self, count: int) -> int:
        """The row that is meant among `count`, rounded and clipped as `datasets` does."""
        row = round(self.number * count / 100) if self.is_share else self.number
        return min(max(row + count, 0) if row < 0 else row, count)


@dataclass(frozen=True)
class Split:
    """`train`, `train[:1000]`, `train[10%:]`, `test[-500:]`: rows from `first` up to but not `last`, None is open."""

    name: str
    first: Bound | None = None
    last: Bound | None = None

    @property
    def is_whole(self) -> bool:
        return self.first is None and self.last is None

    @property
    def needs_count(self) -> bool:
        """Whether the rows have to be counted before the slice can be taken."""
        return any(bound is not None and bound.needs_count for bound in (self.first, self.last))

    def rows(self, count: int | None) -> tuple[int, int | None]:
        """First row and the one after the last (None: to the end); `count` may be None where it is not needed."""
        if count is None:
            return (self.first.number if self.first else 0), (self.last.number if self.last else None)
        return (self.first.of(count) if self.first else 0), (self.last.of(count) if self.last else count)


def parse_split(written: str) -> Split:
    """One split or slice. Raises ValueError for what is none."""
    found = _PART.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r} is no split; expected `train`, `train[:1000]`, `train[10%:]` or `train[-500:]`")
    ends = [
        Bound(int(found[end]), found[f"{end}_share"] is not None) if found[end] is not None else None
        for end in ("first", "last")
    ]
    return Split(found["name"], *ends)


def check_split(written: str) -> str:
    """The text itself. Raises ValueError unless it is a split, or several joined by `+`."""
    for part in written.split("+"):
        parse_split(part.strip())
    return written


class DatasetParams(Params):
    """One source of rows."""

    path: DataPath
    """Local file (JSONL, JSON, CSV, text, each also as .gz, .bz2, .xz or .zst; Parquet, Arrow), a folder of them, one
    that `save_to_disk` wrote, a glob, a URL of such files (`s3://`, `gs://`, `https://`,
    `hf://datasets/owner/name/file`), which are fetched, a hub id, `python_stdlib` or `python_docstrings`, which every
    Python has, or `python_rows`, rows that a program hands to `framework.train`."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: Annotated[str, AfterValidator(check_split)] = "train"
    """Split of a hub dataset or a folder, or a slice of it (of a file too): `train[:1000]`, `train[10%:]`,
    `train[-500:]`. A share or a negative number has the rows counted first, which reads a local source twice."""
    weight: Annotated[Number, Field(gt=0)] | None = None
    """Share of this source in a mixture (`data.mixing`), next to the other weights: 3 and 1 are 75 % and 25 %."""
    format: RowFormat | None = None
    """Shape of the rows (docs/data.md). Unset: detected from the columns, and printed."""
    columns: FrozenMapping = FrozenMapping()
    """Our name -> the file's column, where they differ: `{text: body}`."""
    eval_set: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Of `data.eval`: the named set that the source belongs to. `eval: {code: [..], chat: [..]}` says the same."""
    template: FrozenMapping | str | None = None
    """Columns made of the row's own by Jinja, in place of them: `{prompt: "{{ question }}?", completion: ..}`, or one
    text, which is the column `text`. A template that is one column takes its value as it is."""
    digest: str | None = None
    """What rows from Python add up to, written into the run's config; with it, other rows are refused."""


Datasets = Annotated[tuple[DatasetParams, ...], BeforeValidator(parse_sequence)]


Names = Annotated[tuple[str, ...], BeforeValidator(parse_sequence)]

_CUT = UsedUnless(
    "training.task",
    (Task.PRETRAIN,),
    "pretrain splits a long document into consecutive rows and loses nothing of it",
)


class DataParams(Params):
    """What the model reads."""

    train: Annotated[Datasets, NO_MEMORY] = ()
    """Sources to learn from."""
    eval: Datasets = ()
    """Sources to evaluate on. A mapping of names to lists makes named sets: `eval_loss` and the other metrics are of
    all of them, `eval_loss/NAME` of one."""
    mixing: Annotated[Mixing, NO_MEMORY] = Mixing.CONCATENATE
    """How several training sources become an epoch. `concatenate`: all rows of all. The others draw the source of each
    row by `weight`: `first_exhausted` stops when one source has given all its rows, so others lose some;
    `all_exhausted` goes on until every source has, so others repeat. 8 bytes a row drawn."""
    eval_fraction: Annotated[Number, Field(ge=0, lt=1), UsedWith("data.eval", ((),))] = 0.0
    """Share of the training rows held out for evaluation when `eval` is empty."""
    packing: bool = False
    """Put several rows into one of at most `model.model_max_length` tokens, each a document that does not see the
    others. Little padding, so fewer steps; a row of the batch sizes is then a pack. `eager` and `sdpa` need a mask of
    rows x length x length for it, which the fastest kernels do not take; flash_attention_2 needs none."""
    padding_free: bool = False
    """Put the rows of a micro batch end to end, so that nothing is padded: the same step from fewer positions. For
    flash_attention_2 and flex_attention; `eager` and `sdpa` need a mask of all tokens x all tokens for it."""
    group_by_length: Annotated[bool, NO_MEMORY] = False
    """Make steps of rows of about the same length, so that less is padded. The order stays random from step to step;
    which rows meet in a step is no longer. No memory."""
    pad_to_multiple_of: Positive | None = None
    """Pad each micro batch to a multiple of this many tokens, so that few lengths occur: compiled code is made for each
    (up to 8 lengths; else for one that varies). Costs the padding, in the worst batch too when it divides no
    `model.model_max_length`. Unset: to the longest row."""
    streaming: Annotated[bool, NO_MEMORY] = False
    """Read training rows as they are needed, so that no source is held as a whole. Needs `training.max_steps`; rows to
    evaluate on are read whole."""
    shuffle_buffer: Annotated[Positive, NO_MEMORY, UsedWith("data.streaming")] = 1000
    """Rows of a stream, as they are read, that are shuffled (and packed) among each other; 1 keeps their order. Two
    times so many rows are in host memory."""
    supervise: Annotated[Supervise | None, NO_MEMORY] = None
    """Tokens the loss is taken over. Unset: the assistant's turns in a chat, the completion of a prompt, every token of
    a text; under `pretrain` every token of all."""
    labels: Annotated[Names | None, UsedWith("training.task", (Task.CLASSIFICATION, Task.REGRESSION), refused=True)] = (
        None
    )
    """Names of the classes of `classification` (of the numbers of `regression`) in the order of the model's outputs.
    Unset: those that occur in the training rows, sorted; a plan, which reads no rows, assumes two (one). No memory to
    speak of."""
    multi_label: Annotated[bool | None, NO_MEMORY, UsedWith("training.task", (Task.CLASSIFICATION,), refused=True)] = (
        None
    )
    """Whether a row may have several classes, or none. Unset: when labels are lists. No memory."""
    truncation: Annotated[Truncation, NO_MEMORY, _CUT] = Truncation.RIGHT
    """What happens to a row longer than `model.model_max_length`."""
    cache: Annotated[bool, FREE] = True
    """Keep tokenised rows in `~/.cache/tunesmith/rows` for the next run with the same files, tokenizer and limits, and
    take them from there: mapped files of 8 bytes a token. Costs disk, 20 GiB at most."""
    workers: Annotated[Count, FREE] = 0
    """Processes that prepare batches. Each costs 200 MiB of host memory; a run with more than there is room for is
    refused, with the number that fits."""

    @property
    def joins_rows(self) -> bool:
        """Whether a row of a batch may hold several rows of the data."""
        return self.packing or self.padding_free
