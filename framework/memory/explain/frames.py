"""Tracebacks: which phase of a run a failure interrupted, told from the functions on the stack. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from framework.memory.explain.lines import Line

_PYTHON = re.compile(r'File "([^"]+)", line \d+, in (\S+)')
_RICH = re.compile(r"(\S{1,400}\.py):\d+ in (\w+)\s*$")
_NOTEBOOK = re.compile(r"^(?:File )?(\S+\.py)(?::\d+)?(?:,)? in ([\w.<>]+)\(")
_POINTED = re.compile(r"^\s*(?:-+>\s*\d+|❱\s*\d+\s*[│|]?)\s*(.*)$")
_START = "Traceback (most recent call last)"
_MOST_LINES = 400


@dataclass(frozen=True)
class Frame:
    """One call on the stack: file, function and the line of code, as far as the text shows them."""

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
"""Phase and what gives it away in `file function code`, first match first."""

_WITHIN = ("forward", "loss")
"""Phases that also occur inside others: of a recomputed block in backward, and of a model that is evaluated."""


def read_frames(lines: Sequence[Line], message_line: int) -> tuple[Frame, ...]:
    """The stack that the message ended, outermost first. Debuggers print it after the message, innermost first."""
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
    """The phase that was running; None when no frame tells.

    The innermost frame that tells decides. A forward pass within a backward pass or an evaluation belongs to that.
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
    """Whether an optimizer was making its states, which it does in its first step alone."""
    made = re.compile(r"_init_group|init_state|zeros_like\(p|get_state_buffer|exp_avg(?:_sq)?['\"]\] = |init_zeros")
    return any(made.search(f"{frame.function} {frame.code}") for frame in frames)


def is_pinning(frames: Sequence[Frame]) -> bool:
    """Whether host memory was being pinned, whose failure CUDA words like that of its own memory. FSDP2 pins gradients
    where it sends them to the host."""
    pinned = re.compile(r"pin_memory|^foreach_reduce .*\.to\(")
    return any(pinned.search(f"{frame.function} {frame.code}") for frame in frames)
