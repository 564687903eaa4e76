"""Rules about sources, mixtures, packing, batches and steps."""

from collections.abc import Iterator

from framework.schema.choices import Attention, Mixing
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted
from framework.schema.rules.conflict import Conflict


def data_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Mixtures, whose weights and rule need each other, and settings that conflict with streaming."""
    yield from _mixing(config)
    if config.data.streaming:
        yield from _streaming(config)


def _streaming(config: TrainingConfig) -> Iterator[Conflict]:
    data, key = config.data, "data.streaming"
    if config.training.max_steps is None:
        message = "the length of streamed data is not known, so the number of steps must be"
        yield Conflict((key, "training.max_steps"), message, "training.max_steps")
    if data.eval_fraction and not data.eval:
        message = "rows can be held out of a stream only by reading all of it first"
        yield Conflict((key, "data.eval_fraction"), message, "data.eval, such as a slice: `split: train[:500]`")
    if data.group_by_length:
        message = "the lengths of streamed rows are not known before they are read"
        yield Conflict((key, "data.group_by_length"), message, "data.packing or data.padding_free")
    if config.training.asks_reference_once:
        message = "the reference cannot be computed before the first step for streamed rows"
        yield Conflict((key, "training.preference.precompute_reference"), message, "false")
    if data.workers > 1:
        message = "a stream is read in order, by one process"
        yield Conflict((key, "data.workers"), message, "0 or 1")
    if config.training.task.facts.label == "class" and not data.labels:
        message = "the classes of a stream are not known before its end"
        yield Conflict((key, "data.labels"), message, "data.labels: [their names]")


def _mixing(config: TrainingConfig) -> Iterator[Conflict]:
    data, rules = config.data, "first_exhausted or all_exhausted"
    weighted = [index for index, source in enumerate(data.train) if source.weight is not None]
    for index, source in enumerate(data.eval):
        if source.weight is not None:
            message = "evaluation reads every row once, so its sources have no weights"
            yield Conflict((f"data.eval[{index}].weight",), message, "no weight")
    if data.mixing is Mixing.CONCATENATE:
        if weighted:
            keys = (f"data.train[{weighted[0]}].weight", "data.mixing")
            yield Conflict(keys, "weights need a rule for the end of an epoch", f"data.mixing: {rules}")
        return
    if len(data.train) == 1:
        yield Conflict(("data.mixing", "data.train"), "there is one source, so nothing to mix", "concatenate")
    elif unweighted := [index for index in range(len(data.train)) if index not in weighted]:
        names = ", ".join(f"data.train[{index}].weight" for index in unweighted)
        message = f"a mixture needs the weight of every source, and {names} is not set"
        yield Conflict(("data.mixing", f"data.train[{unweighted[0]}].weight"), message, "a weight, such as 1, in each")


def rows_of_global_batch(config: TrainingConfig, accumulation: int | None, most: int) -> int | None:
    """Rows per forward pass for a written global batch: as `accumulation` determines them, else the largest divisor of
    a device's share up to `most`. None if no global batch is written or the shares are unequal.
    """
    world = max(1, config.gpu.count // config.sharing)
    share, rest = divmod(config.training.global_batch_size or 0, world * (accumulation or 1))
    if rest or not share:
        return None
    return share if accumulation is not None else next(rows for rows in range(most, 0, -1) if not share % rows)


def padding_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Padding together with padding-free batches."""
    if config.data.padding_free and config.data.pad_to_multiple_of is not None:
        message = "concatenated rows are not padded"
        yield Conflict(("data.pad_to_multiple_of", "data.padding_free"), message, "one of the two")


def row_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Packing and padding-free batches."""
    data, kernel = config.data, config.model.attn_implementation
    if data.packing and data.padding_free:
        message = "packs are already full: concatenating them would only need a larger mask"
        yield Conflict(("data.padding_free", "data.packing"), message, "one of the two")
    if data.padding_free and kernel in (None, Attention.EAGER, Attention.SDPA):
        message = f"{kernel or 'sdpa'} needs a mask of all tokens x all tokens of a micro-batch for it"
        keys = ("data.padding_free", "model.attn_implementation")
        yield Conflict(keys, message, "flash_attention_2 or flex_attention", is_warning=True)


def batch_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Batch sizes that do not divide."""
    training = config.training
    micro = training.per_device_train_batch_size
    if "auto" in (micro, training.gradient_accumulation_steps):
        if micro == "auto" and training.global_batch_size is None:
            both = ("training.per_device_train_batch_size", "training.global_batch_size")
            message = "a search keeps the global batch, which must be written if this is `auto`"
            yield Conflict(both, message, "training.global_batch_size in addition")
        return
    try:
        _ = config.batch
    except ValueError as error:
        sizes = ["global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"]
        keys = (*(f"training.{key}" for key in sizes), "gpu.count")
        world = max(1, config.gpu.count // config.sharing)
        fewer = f", or of {world} with fewer rows per device" if micro != 1 and world != 1 else ""
        yield Conflict(keys, str(error), f"a multiple of {int(micro) * world}{fewer}")


def step_conflicts(config: TrainingConfig) -> Iterator[Conflict]:
    """Warm-up, minimum rate and evaluations that do not fit steps, peak rate and data."""
    training, data = config.training, config.data
    if training.max_steps is not None and (training.warmup_steps or 0) > training.max_steps:
        warm_up = counted(training.warmup_steps or 0, "warm-up step does", "warm-up steps do")
        message = f"{warm_up} not fit in {counted(training.max_steps, 'step')}"
        yield Conflict(("training.warmup_steps", "training.max_steps"), message, f"at most {training.max_steps}")
    if training.min_learning_rate > training.learning_rate:
        keys = ("training.min_learning_rate", "training.learning_rate")
        yield Conflict(keys, "is above the peak rate", f"at most {training.learning_rate:g}")
    if training.eval_steps is not None and not data.eval and not data.eval_fraction:
        three = ("training.eval_steps", "data.eval", "data.eval_fraction")
        yield Conflict(three, "evaluation is requested, but there is no data for it", "data.eval or data.eval_fraction")
