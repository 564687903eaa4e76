"""`data`: sources of rows, their slices, and which of their tokens are supervised."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from framework.schema.choices import Mixing, RowFormat, Supervise, Truncation
from framework.schema.facts import FREE, NO_MEMORY, UsedUnless, UsedWith
from framework.schema.params import FrozenMapping, Number, Params, parse_sequence
from framework.schema.tasks import tasks_with, used_by_tasks_with
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
        """Whether resolving it needs the number of rows."""
        return self.is_share or self.number < 0

    def of(self, count: int) -> int:
        """The row index among `count` rows, rounded and clipped as in `datasets`."""
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
    """Parse one split or slice. Raises ValueError."""
    found = _PART.fullmatch(written)
    if found is None:
        raise ValueError(
            f"{written!r} is not a split, such as `train`, `train[:1000]`, `train[10%:]` or `train[-500:]`"
        )
    ends = [
        Bound(int(found[end]), found[f"{end}_share"] is not None) if found[end] is not None else None
        for end in ("first", "last")
    ]
    return Split(found["name"], *ends)


def check_split(written: str) -> str:
    """Check a split, or several joined by `+`. Raises ValueError."""
    for part in written.split("+"):
        parse_split(part.strip())
    return written


class DatasetParams(Params):
    """One source of rows."""

    path: DataPath
    """Local file (JSONL, JSON, CSV, text, each also as .gz, .bz2, .xz or .zst; Parquet, Arrow), a folder of them, a
    folder written by `save_to_disk`, a glob, a URL of such files (`s3://`, `gs://`, `https://`,
    `hf://datasets/owner/name/file`), which are downloaded, a hub id, the built-in `python_stdlib` or
    `python_docstrings`, or `python_rows`, rows passed to `framework.train`."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: Annotated[str, AfterValidator(check_split)] = "train"
    """Split of a hub dataset or a folder, or a slice of it (of a file too): `train[:1000]`, `train[10%:]`,
    `train[-500:]`. A percentage or a negative number needs the number of rows, so a local source is read twice."""
    weight: Annotated[Number, Field(gt=0)] | None = None
    """Weight of this source in a mixture (`data.mixing`), relative to the others: 3 and 1 are 75 % and 25 %."""
    format: RowFormat | None = None
    """Shape of the rows (docs/data.md). Unset: detected from the columns, and printed."""
    columns: FrozenMapping = FrozenMapping()
    """Our name -> the file's column, if they differ: `{text: body}`."""
    eval_set: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """In `data.eval`, the named set of the source. `eval: {code: [..], chat: [..]}` is the same."""
    template: FrozenMapping | str | None = None
    """Columns rendered from the row's own with Jinja, which replace them: `{prompt: "{{ question }}?", completion:
    ..}`, or one text for the column `text`. A template that is just one column keeps its value as it is."""
    digest: str | None = None
    """Digest of rows from Python, written to the run's config; if set, other rows are refused."""


Datasets = Annotated[tuple[DatasetParams, ...], BeforeValidator(parse_sequence)]


Names = Annotated[tuple[str, ...], BeforeValidator(parse_sequence)]

_CUT = UsedUnless(
    "training.task",
    tasks_with(lambda facts: facts.splits_documents),
    "pretrain splits a long document into consecutive rows and loses nothing of it",
)


class DataParams(Params):
    """Rows for training and evaluation."""

    train: Annotated[Datasets, NO_MEMORY] = ()
    """Sources of training rows."""
    eval: Datasets = ()
    """Sources of evaluation rows. A mapping of names to lists makes named sets: `eval_loss` and the other metrics cover
    all of them, `eval_loss/NAME` one."""
    mixing: Annotated[Mixing, NO_MEMORY] = Mixing.CONCATENATE
    """How training sources are combined into an epoch. `concatenate`: all rows of all. The others sample the source of
    each row by `weight`: `first_exhausted` stops when the first source runs out, so other sources lose rows;
    `all_exhausted` continues until every source has run out, so rows of the others repeat. 8 bytes per sampled row."""
    eval_fraction: Annotated[Number, Field(ge=0, lt=1), UsedWith("data.eval", ((),))] = 0.0
    """Share of the training rows held out for evaluation if `eval` is empty."""
    packing: bool = False
    """Pack several rows into one of at most `model.model_max_length` tokens; each is a document that does not see the
    others. Less padding, so fewer steps; the batch sizes then count packs. `eager` and `sdpa` need a mask of rows x
    length x length for it, which the fastest kernels do not take; flash_attention_2 needs none."""
    padding_free: bool = False
    """Concatenate the rows of a micro-batch, so that nothing is padded: the same step with fewer positions. For
    flash_attention_2 and flex_attention; `eager` and `sdpa` need a mask of all tokens x all tokens for it."""
    group_by_length: Annotated[bool, NO_MEMORY] = False
    """Put rows of similar length into a step, so that less is padded. The order of steps stays random; the rows within
    a step are no longer. No memory."""
    pad_to_multiple_of: Positive | None = None
    """Pad each micro-batch to a multiple of this many tokens, so that few lengths occur: code is compiled for each (up
    to 8 lengths; else once for a dynamic length). Costs the padding, in the worst batch too if it does not divide
    `model.model_max_length`. Unset: pad to the longest row."""
    streaming: Annotated[bool, NO_MEMORY] = False
    """Read training rows as they are needed, so that no source is held in memory as a whole. Needs
    `training.max_steps`; evaluation rows are read completely."""
    shuffle_buffer: Annotated[Positive, NO_MEMORY, UsedWith("data.streaming")] = 1000
    """Rows of a stream that are shuffled (and packed) together; 1 keeps their order. Twice as many rows are in host
    memory."""
    supervise: Annotated[Supervise | None, NO_MEMORY] = None
    """Tokens that the loss is computed on. Unset: the assistant's turns in a chat, the completion of a prompt, every
    token of a text; under `pretrain` every token."""
    labels: Annotated[Names | None, used_by_tasks_with(lambda facts: facts.label)] = None
    """Names of the classes of `classification` (of the numbers of `regression`) in the order of the model's outputs.
    Unset: those that occur in the training rows, sorted; a plan, which reads no rows, assumes two (one). Negligible
    memory."""
    multi_label: Annotated[bool | None, NO_MEMORY, used_by_tasks_with(lambda facts: facts.label == "class")] = None
    """Whether a row may have several classes, or none. Unset: when labels are lists. No memory."""
    truncation: Annotated[Truncation, NO_MEMORY, _CUT] = Truncation.RIGHT
    """Handling of rows longer than `model.model_max_length`."""
    cache: Annotated[bool, FREE] = True
    """Cache tokenized rows in `~/.cache/tunesmith/rows` for the next run with the same files, tokenizer and limits:
    memory-mapped files of 8 bytes a token. Costs disk, 20 GiB at most."""
    workers: Annotated[Count, FREE] = 0
    """Number of processes that prepare batches. Each costs 200 MiB of host memory; a run whose workers do not fit is
    refused, with the number that does."""

    @property
    def joins_rows(self) -> bool:
        """Whether a row of a batch may hold several data rows."""
        return self.packing or self.padding_free
