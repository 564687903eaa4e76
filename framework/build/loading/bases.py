"""The models whose weights a run reads and does not write: what they were, so that a change of them is found.

An adapter means nothing without the weights that it was trained beside; a teacher and a reference decide what is
learned. Of each model a run records a digest of its weights and its architecture, and compares them when it goes on and
when its adapter is used.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from framework.build.loading.model import check_weights, read_architecture
from framework.build.loading.teacher import as_teachers, teachers_config
from framework.build.model_folder import KEY, checkpoint_files, local_folder
from framework.errors import Problem, RequestError
from framework.schema.choices import Task
from framework.schema.config import TrainingConfig
from framework.schema.plural import counted

BASE, TEACHER = "model.base", "training.teacher"
"""What `--allow` calls the model that is trained or adapted, and the one that is distilled from."""
ALLOWED_MODELS = (BASE, TEACHER)
WHOLE_BYTES = 256 << 20
"""A checkpoint of at most this many bytes is hashed whole: a second on two cores of an EPYC."""
BLOCKS, BLOCK_BYTES = 16, 4096
"""Of each tensor of a larger one so many blocks, evenly spaced, its first and last bytes among them: 39 MB of the 723
tensors of Llama 3.1 70B (benchmarks/results/base_digest_cpu.json). Training and merging change a tensor all over, so
that some of its blocks change."""
_VOLATILE = (
    *("transformers_version", "_name_or_path", "architectures", "use_cache", "dtype", "torch_dtype", "pad_token_id"),
    *("num_labels", "id2label", "label2id", "problem_type", "attn_implementation", "_attn_implementation"),
    *("output_router_logits", "router_aux_loss_coef"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"),
)
"""Keys of a Hugging Face config that change nothing of what the model's body computes, or that a run sets itself."""


@dataclass(frozen=True)
class Base:
    """A model as it was read. `weights` is None where they are not stored as safetensors, or were drawn at random, with
    the fingerprint `drawn`; `commit` is that of a hub model."""

    name: str | None
    weights: str | None
    commit: str | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)
    drawn: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Base":
        """Raises ValueError for what is no such record."""
        try:
            names = {name: document.get(name) for name in ("name", "weights", "commit", "drawn")}
            return cls(**names, architecture=dict(document["architecture"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is no record of a model: {type(error).__name__} {error}") from None


def models_read(
    config: TrainingConfig, architecture: PretrainedConfig
) -> Iterator[tuple[str, TrainingConfig, PretrainedConfig]]:
    """(name for `--allow`, a config that is about the model, its own config) of each model that a run reads."""
    yield BASE, config, architecture
    if config.training.task is Task.DISTILLATION:
        of_teacher = teachers_config(config)
        with as_teachers():
            shape = read_architecture(of_teacher)
        yield TEACHER, of_teacher, shape


def read_bases(config: TrainingConfig, architecture: PretrainedConfig) -> dict[str, Base]:
    """What each model that a settled config reads is now. Raises RequestError where its files are damaged."""
    return {name: read_base(about, shape) for name, about, shape in models_read(config, architecture)}


def read_base(config: TrainingConfig, architecture: PretrainedConfig) -> Base:
    """The record of `config.model`. Reads some of its weights: seconds also where they are 140 GB."""
    model = config.model
    has_weights = model.load_pretrained_weights and model.model_name is not None
    files = checkpoint_files(model) if has_weights else []
    parts = files[0].parts if files else ()
    is_cached = "snapshots" in parts[:-1] and local_folder(str(model.model_name)) is None
    commit = parts[parts.index("snapshots") + 1] if is_cached else None
    return Base(model.model_name, weights_digest(files) if files else None, commit, _stable(architecture.to_dict()))


def differences(before: Base, now: Base, weights_matter: bool = True) -> list[str]:
    """What has changed of a model, in words. Of its weights where they matter: a checkpoint may hold all of them."""
    found = []
    for key in sorted(before.architecture.keys() & now.architecture.keys()):
        old, new = before.architecture[key], now.architecture[key]
        if old != new:
            found.append(f"its {key} was {old} and is {new}")
    is_known = before.weights is not None and now.weights is not None
    if weights_matter and is_known and before.weights != now.weights:
        found.append("its weights have other values")
    if weights_matter and None not in (before.drawn, now.drawn) and before.drawn != now.drawn:
        found.append("its weights are drawn at random, and come out otherwise on this device or with these versions")
    return found


def weights_digest(files: list[Path]) -> str:
    """A digest of the tensors in safetensors files, whatever file each is in: names, dtypes, shapes and values, all of
    them or blocks of each (see `WHOLE_BYTES`). Raises RequestError for a file that cannot be read."""
    whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    found: dict[str, bytes] = {}
    for file in files:
        try:
            found.update(_tensor_digests(file, whole))
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise RequestError([Problem(KEY, f"{file} cannot be read: {type(error).__name__}: {error}")]) from None
    together = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        together.update(found[name])
    return together.hexdigest()


def _tensor_digests(file: Path, whole: bool) -> Iterator[tuple[str, bytes]]:
    with file.open("rb") as stored:
        (length,) = struct.unpack("<Q", stored.read(8))
        header = json.loads(stored.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            said = hashlib.blake2b(f"{name} {tensor['dtype']} {tensor['shape']}".encode(), digest_size=16)
            for start, size in _blocks(end - begin, whole):
                stored.seek(8 + length + begin + start)
                said.update(stored.read(size))
            yield name, said.digest()


def _blocks(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    """(start, bytes) of what is read of a tensor of `size` bytes."""
    if whole or size <= BLOCKS * BLOCK_BYTES:
        step = 1 << 24
        yield from ((start, min(step, size - start)) for start in range(0, size, step))
        return
    yield from ((index * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for index in range(BLOCKS))


def _stable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config as JSON holds it, without `_VOLATILE` keys."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    kept = {key: value for key, value in plain.items() if key not in _VOLATILE}
    return {key: _stable(value) if isinstance(value, dict) else value for key, value in kept.items()}


def check_all_weights(
    config: TrainingConfig, architecture: PretrainedConfig, in_folders: bool = False
) -> Iterator[Problem]:
    """What of the checkpoints that a run reads is left over, as a warning each; with `in_folders` of those that lie in
    a folder here. Raises RequestError as `check_weights` does."""
    for name, about, shape in models_read(config, architecture):
        if in_folders and local_folder(str(about.model.model_name)) is None:
            continue
        key = KEY if name == BASE else f"{TEACHER}.model_name"
        with as_teachers() if name == TEACHER else nullcontext():
            left_over = check_weights(about, shape)
        if left_over:
            weights = counted(len(left_over), "weight", "weights")
            message = f"{weights} of {about.model.model_name} are not used by this task's model, first {left_over[0]}"
            yield Problem(key, message)
