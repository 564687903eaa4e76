"""What the first step was fed."""

import math
from collections.abc import Iterator

from framework.build.assembly import Assembly
from framework.build.verify.reading import FirstStep, Reading


def read_micro_batches(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Rows per micro batch and their number. The last step of an epoch may have fewer of both."""
    batch, rows = assembly.config.batch, [rows for rows, _ in step.micro_batches]
    is_short = sum(rows) < batch.per_device * batch.accumulation
    for key, asked, found in (
        ("training.per_device_train_batch_size", batch.per_device, max(rows)),
        ("training.gradient_accumulation_steps", batch.accumulation, len(rows)),
    ):
        said = asked if is_short and found < asked else found
        yield Reading(key, str(asked), str(said), f"micro batches of the first step: {_shapes(step.micro_batches)}")


def read_eval_batches(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Rows per batch of the evaluation before the first step, when there was one."""
    if step.eval_batches:
        asked, found = assembly.config.eval_rows, max(r for r, _ in step.eval_batches)
        said = asked if found < asked and len(step.eval_batches) <= step.eval_sets else found
        source = f"batches of the first evaluation: {_shapes(step.eval_batches)}"
        yield Reading("training.per_device_eval_batch_size", str(asked), str(said), source)


def read_longest_row(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """No row is longer than asked."""
    limit, longest = assembly.config.longest, max(tokens for _, tokens in step.micro_batches)
    asked = f"at most {limit}"
    found = asked if longest <= limit else str(longest)
    yield Reading("model.model_max_length", asked, found, f"longest row of the first step: {longest} tokens")


def read_padded_lengths(assembly: Assembly, step: FirstStep) -> Iterator[Reading]:
    """Widths of the micro batches: multiples of what was asked for."""
    multiple = assembly.config.data.pad_to_multiple_of
    if multiple is not None and step.micro_batches:
        found = math.gcd(*(tokens for _, tokens in step.micro_batches))
        said = multiple if found % multiple == 0 else found
        source = f"widths of the first step's micro batches: {_shapes(step.micro_batches)}"
        yield Reading("data.pad_to_multiple_of", str(multiple), str(said), source)


def _shapes(batches: tuple[tuple[int, int], ...]) -> str:
    first = " ".join(f"{rows}x{tokens}" for rows, tokens in batches[:4])
    return first + (f" and {len(batches) - 4} more" if len(batches) > 4 else "")
