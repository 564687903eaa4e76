"""Normalization of logs: colors, ranks, times and boxes are removed from lines, which are grouped by process; and the
phase of a run from a traceback. No torch."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_RANK = re.compile(
    r"\[(?:rank|default)\d+\]:"  # torch.distributed and torchrun --tee
    r"|\[\d+,\d+\]<std(?:out|err)>:?"  # mpirun --tag-output
    r"|\([\w.-]+ (?:rank=\d+, )?pid=\d+[^)]*\)"  # Ray
    r"|\d+: (?=\S|  )"  # srun --label, also of a stack's indented lines
    r"|[\w.-]+\s+\| "  # docker compose
)
"""Prefix that identifies the writer of a line. Lines with equal prefixes belong together."""
_TIME = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: std(?:out|err) [FP](?= |$))?"  # CRI
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?:"  # journald, syslog
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\[\d+\] "  # numbered lines
    r"|[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\]"  # glog
)
_LEVEL = re.compile(r"(?:- )?\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\]?:?(?: -)?(?=\s)")
_FRAME = re.compile(r"[│║┃▏|>#]+(?=\s|$)")
_BAR = re.compile(
    r"(?:^\s*[^|:]{0,60}: +)?\d{1,3}%\|[^|]*\|\s*[\d.,kKMG]+/[\d.,kKMG?]+\s*\[(?:(?!\bnan\b|\binf\b)[^\]])*\]"  # tqdm
    r"|(?:^\s*[^|:]{0,60}: +)?\b\d+(?:it| examples| steps) \[\d[^\]]*(?:s/it|/s)\]"  # tqdm that knows no end
    r"|^[^━]*[━╸╺]{4}.*$"  # rich
)
"""Progress bars written into the middle of a message by another thread; kept if they show a loss of nan."""
_ENDING = re.compile(r"[\s│║┃]+")
BEFORE, AFTER = 400, 60
"""Number of lines before a message that may hold its stack, and after it that may hold its rest."""
_PARTS = (_RANK, _TIME, _LEVEL, _FRAME)


@dataclass(frozen=True)
class Line:
    """One line: its number in the log from 0, the writer's prefix (possibly empty) and the text."""

    number: int
    writer: str
    text: str


def clean(text: str, is_telling: Callable[[str], bool]) -> list[Line]:
    """The lines of a log near a telling one; a log may have a million others.

    A carriage return, as written by progress bars, also ends a line.
    """
    raw = re.split(r"\r\n|\n|\r", _COLOUR.sub("", text))
    wanted: set[int] = set()
    for number, line in enumerate(raw):
        if is_telling(line):
            wanted.update(range(max(number - BEFORE, 0), min(number + AFTER, len(raw))))
    return [_clean(number, line) for number in sorted(wanted) for line in _of_record(raw[number], is_telling)]


def _of_record(line: str, is_telling: Callable[[str], bool]) -> list[str]:
    """The lines within a JSON record, as written by containers and torchrun's error files; else the line itself."""
    if not line.lstrip().startswith("{"):
        return [line]
    try:
        texts = list(_texts(json.loads(line)))
    except (ValueError, RecursionError):
        return [line]
    is_elsewhere = is_telling(line) and not any(map(is_telling, texts))  # for example in the value of a metric
    return [line] if is_elsewhere or not texts else [part for text in texts for part in text.splitlines()]


def _texts(value: Any) -> Iterator[str]:
    """The texts of a record, without single words such as a stream's name or a time."""
    if isinstance(value, str) and len(value.split(" ")) + value.count("\n") > 1:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _clean(number: int, line: str) -> Line:
    writer, text = "", _BAR.sub("", _COLOUR.sub("", line))
    left = text.lstrip()
    while found := next((match for part in _PARTS if (match := part.match(left))), None):
        if found.re is _RANK:
            writer = writer or found.group().strip()
        text = left[found.end() :]
        left = text.lstrip()
    ending = _ENDING.match(text[::-1])  # searching from the front is quadratic in the spaces within
    return Line(number, writer, text[: len(text) - ending.end()] if ending else text)


def by_writer(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each writer, in order."""
    for writer in dict.fromkeys(line.writer for line in lines):
        yield [line for line in lines if line.writer == writer]


class Compact:
    """Lines joined without white space, so that a message reads the same however it was wrapped."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self._starts: list[int] = []
        parts, length = [], 0
        for line in lines:
            self._starts.append(length)
            parts.append("".join(line.text.split()))
            length += len(parts[-1])
        self.text = "".join(parts)

    def line_at(self, position: int) -> int:
        """Index in `lines` of the line that holds a position of `text`."""
        return bisect_right(self._starts, position) - 1


_PYTHON = re.compile(r'File "([^"]+)", line \d+, in (\S+)')
_RICH = re.compile(r"(\S{1,400}\.py):\d+ in (\w+)\s*$")
_NOTEBOOK = re.compile(r"^(?:File )?(\S+\.py)(?::\d+)?(?:,)? in ([\w.<>]+)\(")
_POINTED = re.compile(r"^\s*(?:-+>\s*\d+|❱\s*\d+\s*[│|]?)\s*(.*)$")
_START = "Traceback (most recent call last)"
_MOST_LINES = 400


@dataclass(frozen=True)
class Frame:
    """One call on the stack: file, function and line of code, as far as shown."""

    file: str
    function: str
    code: str = ""


RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern))
    for phase, pattern in (
        ("resume", r"load_checkpoint|_load_from_checkpoint|_load_optimizer_and_scheduler|load_optimizer"),
        ("resume", r"torch/optim/\S+ load_state_dict|optimizer\.load_state_dict"),
        ("optimizer_step", r"torch/optim/|bitsandbytes/optim|torchao/optim|/optimizers?/\S+ step\b|apex/optimizers"),
        ("optimizer_step", r"clip_grad_norm_?\b|get_total_norm|/clipping\.py|grad_scaler\.py|unscale_"),
        ("optimizer_step", r"optim(?:izer)?\w*\.step\(|scaler\.step\(|_init_group|optimizer_step\b"),
        (
            "save",
            r"save_checkpoint|_save_checkpoint|save_model|save_pretrained|torch\.save\(|torch/serialization\.py save",
        ),
        (
            "save",
            r"full_tensor\(|state_dict_type|_full_post_state_dict|get_model_state_dict|get_state_dict\b|\.state_dict\(",
        ),
        ("load", r"from_pretrained|load_state_dict|_load_pretrained|load_model|materialize|init_weights|\b_apply\b"),
        ("load", r"\b(?:model|module|net)\w*\.(?:to|cuda|half|bfloat16)\(|prepare_model\b|deepspeed\.initialize"),
        ("load", r"fully_shard\b|FullyShardedDataParallel\(|DistributedDataParallel\(|_init_param_handle"),
        ("load", r"prepare_model_for_kbit_training|load_checkpoint_and_dispatch|dispatch_model|safe_open|load_file\("),
        ("backward", r"\.backward\(|run_backward| backward\b|\bmanual_backward\b|torch/autograd/__init__\.py grad\b"),
        ("eval", r"evaluat(?:e|ion_loop)\b|prediction_step|prediction_loop|eval_step|validat(?:e|ion_step|ion_loop)\b"),
        ("eval", r"nested_concat|pad_across_processes|gather_for_metrics|compute_metrics"),
        (
            "loss",
            r"cross_entropy|nll_loss|log_softmax|loss_function\(|loss_fn\(|\bloss_fct\(|ForCausalLMLoss|criterion\(",
        ),
        ("loss", r"logits = logits\.float\(\)|logits\.float\(\)|upcast.*logits|shift_logits = "),
        ("forward", r" forward\b|_call_impl\b|\.forward\("),
    )
)
"""Phase and its pattern in `file function code`, first match first."""

_WITHIN = ("forward", "loss")
"""Phases that also occur inside others: in backward for recomputed blocks, and in evaluation."""


def read_frames(lines: Sequence[Line], message_line: int) -> tuple[Frame, ...]:
    """The stack of the message, outermost first. Debuggers print it after the message, innermost first."""
    before = [line for line in lines if line.number <= message_line][-_MOST_LINES:]
    starts = [index for index, line in enumerate(before) if _START in line.text]
    found = _frames(before[starts[-1] :] if starts else before)
    if found:
        return found
    return _frames([line for line in lines if line.number > message_line][:_MOST_LINES])[::-1]


def _frames(lines: Sequence[Line]) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    for index, line in enumerate(lines):
        text = line.text.strip()
        if match := _PYTHON.search(text):
            following = lines[index + 1].text.strip() if index + 1 < len(lines) else ""
            code = "" if following.startswith("File ") else following
            frames.append(Frame(match.group(1), match.group(2), code))
        elif match := _RICH.search(text) or _NOTEBOOK.search(text):
            frames.append(Frame(match.group(1), match.group(2)))
        elif frames and (match := _POINTED.match(line.text)):
            frames[-1] = Frame(frames[-1].file, frames[-1].function, match.group(1))
    return tuple(frames)


def read_phase(frames: Sequence[Frame]) -> str | None:
    """The phase of a stack; None if no frame shows it.

    The innermost telling frame decides. A forward pass within a backward pass or an evaluation counts as that.
    """
    found: str | None = None
    for frame in reversed(frames):
        place = f"{frame.file.replace(chr(92), '/')} {frame.function} {frame.code}"
        own = next((phase for phase, pattern in RULES if pattern.search(place)), None)
        if found is None:
            found = own
        elif found in _WITHIN and own in ("backward", "eval"):
            return own
    return found


def makes_states(frames: Sequence[Frame]) -> bool:
    """Whether an optimizer was creating its states, which happens only in its first step."""
    made = re.compile(r"_init_group|init_state|zeros_like\(p|get_state_buffer|exp_avg(?:_sq)?['\"]\] = |init_zeros")
    return any(made.search(f"{frame.function} {frame.code}") for frame in frames)


def is_pinning(frames: Sequence[Frame]) -> bool:
    """Whether host memory was being pinned, whose failure CUDA reports like one of its own memory. FSDP2 pins gradients
    when it sends them to the host."""
    pinned = re.compile(r"pin_memory|^foreach_reduce .*\.to\(")
    return any(pinned.search(f"{frame.function} {frame.code}") for frame in frames)
