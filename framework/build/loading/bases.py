"""Records of the frozen models that a run reads (an adapter's base, a teacher), to detect changes of them.

An adapter is useless without the weights that it was trained on, and a teacher or reference determines the result. A
run records a digest of the weights and the architecture of each, and compares them on resume and when its adapter is
used.
"""

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from framework.build.adapters.quantize import quantize, require_bitsandbytes
from framework.build.loading.document_isolation import refuse_leaks
from framework.build.loading.model import build_model, check_weights, read_architecture
from framework.build.model_folder import KEY, checkpoint_files, local_folder
from framework.build.place import Place
from framework.build.text.tokenizer import build_tokenizer
from framework.errors import Problem, RequestError
from framework.schema.architecture import position_count, scales_positions
from framework.schema.choices import TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.peft import PeftParams
from framework.schema.plural import counted
from framework.schema.tasks import Task

TEACHER_KEY = "training.teacher"
MISSING_WORDS = 0.01
"""Share of the tokens that the teacher's tokenizer may lack: a family's next release adds a few special tokens."""


def teachers_config(config: TrainingConfig) -> TrainingConfig:
    """A config with the teacher as its model, on the same rows; a quantized teacher is described like the base of an
    adapter."""
    teacher = config.training.teacher
    if teacher is None:
        expected = "a model_name, or an architecture"
        raise RequestError([Problem(TEACHER_KEY, "there is no teacher to distill from", expected=expected)])
    model = ModelParams(
        model_name=teacher.model_name,
        architecture=teacher.architecture,
        load_pretrained_weights=teacher.load_pretrained_weights,
        torch_dtype_str=teacher.torch_dtype_str or TorchDtype.AUTO,
        attn_implementation=teacher.attn_implementation,
        model_max_length=config.model.model_max_length,
        trust_remote_code=teacher.trust_remote_code,
        model_revision=teacher.model_revision,
    )
    packing = PeftParams(q_lora=teacher.bits is not None, q_lora_bits=teacher.bits or 4)
    changes = {"task": Task.SFT, "teacher": None, "use_peft": packing.q_lora}
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"model": model, "training": training, "peft": packing})


def read_teacher(config: TrainingConfig, student: PretrainedConfig) -> PretrainedConfig:
    """The teacher's Hugging Face config.

    Raises RequestError if it cannot be read, is stored quantized, has another vocabulary size than the student, has
    fewer positions than a row, or mixes the documents of a row.
    """
    of_teacher = teachers_config(config)
    with as_teachers():
        architecture = read_architecture(of_teacher)
        refuse_leaks(of_teacher, architecture)
    if getattr(architecture, "quantization_config", None) is not None and config.training.teacher is not None:
        message = (
            f"the weights of {config.training.teacher.model_name} are stored quantized, so their size cannot be planned"
        )
        expected = f"the original checkpoint, with {TEACHER_KEY}.bits=4, which quantizes it as it loads"
        raise RequestError([Problem(f"{TEACHER_KEY}.model_name", message, expected=expected)])
    theirs, own = (item.get_text_config().vocab_size for item in (architecture, student))
    if theirs != own:
        message = f"the teacher has {theirs:,} tokens in its vocabulary, the student {own:,}"
        raise RequestError([Problem(f"{TEACHER_KEY}.model_name", message, expected="a teacher of the same family")])
    settings = architecture.get_text_config().to_dict()
    positions = position_count(settings)
    if positions is not None and config.longest > positions and not scales_positions(settings):
        message = f"rows of {config.longest} tokens are more than the teacher's {positions} positions"
        raise RequestError([Problem("model.model_max_length", message, expected=f"at most {positions}")])
    return architecture


def build_teacher(config: TrainingConfig, place: Place, computed: torch.dtype | None) -> nn.Module:
    """The teacher on its device, frozen and in eval mode. Raises RequestError as `build_model` does."""
    of_teacher = teachers_config(config)
    if of_teacher.peft.q_lora:
        require_bitsandbytes(f"{TEACHER_KEY}.bits", "unset (the teacher in bfloat16)")
    with as_teachers():
        model, _ = build_model(of_teacher, read_architecture(of_teacher), place, computed)
    if of_teacher.peft.q_lora:
        quantize(of_teacher.peft, model, computed or model.dtype, place)
    teacher: nn.Module = model.requires_grad_(False)
    return teacher.eval()


def refuse_other_vocabulary(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise RequestError if token ids differ between the tokenizers of student and teacher. A teacher without a
    tokenizer is only compared by vocabulary size."""
    try:
        theirs = build_tokenizer(teachers_config(config), ()).get_vocab()
    except RequestError:
        return
    own = tokenizer.get_vocab()
    other = [token for token, number in own.items() if theirs.get(token, number) != number]
    missing = len(own.keys() - theirs.keys())
    if other or missing > MISSING_WORDS * len(own):
        what = (
            f"{counted(len(other), 'token has another id', 'tokens have other ids')}, first {other[0]!r}"
            if other
            else f"{counted(missing, 'token is', 'tokens are')} missing"
        )
        message = f"the teacher's tokenizer differs from the student's: {what}"
        raise RequestError([Problem(f"{TEACHER_KEY}.model_name", message, expected="a teacher of the same family")])


@contextlib.contextmanager
def as_teachers() -> Iterator[None]:
    """Reraise problems with keys of `model` under `training.teacher`."""
    try:
        yield
    except RequestError as error:
        of_teacher = re.compile(r"^model\.")
        named = ((problem, of_teacher.sub(f"{TEACHER_KEY}.", problem.key)) for problem in error.problems)
        raise RequestError([replace(problem, key=key) for problem, key in named]) from None


BASE, TEACHER = "model.base", "training.teacher"
"""`--allow` names of the trained or adapted model, and of the teacher."""
ALLOWED_MODELS = (BASE, TEACHER)
WHOLE_BYTES = 256 << 20
"""A checkpoint of at most this many bytes is hashed whole: a second on two cores of an EPYC."""
BLOCKS, BLOCK_BYTES = 16, 4096
"""Number and size of the blocks that are hashed of each tensor of a larger checkpoint, evenly spaced including its
first and last bytes: 39 MB for the 723 tensors of Llama 3.1 70B (benchmarks/results/base_digest_cpu.json). Training and
merging change a tensor everywhere, so some of its blocks change."""
_VOLATILE = (
    *("transformers_version", "_name_or_path", "architectures", "use_cache", "dtype", "torch_dtype", "pad_token_id"),
    *("num_labels", "id2label", "label2id", "problem_type", "attn_implementation", "_attn_implementation"),
    *("output_router_logits", "router_aux_loss_coef"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder"),
)
"""Keys of a Hugging Face config that do not affect the model's body, or that a run sets itself."""


@dataclass(frozen=True)
class Base:
    """Record of a model. `weights` is a digest, None if they are not safetensors or were initialized at random, with
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
        """Parse a record. Raises ValueError if it is not one."""
        try:
            names = {name: document.get(name) for name in ("name", "weights", "commit", "drawn")}
            return cls(**names, architecture=dict(document["architecture"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is not a record of a model: {type(error).__name__} {error}") from None


def models_read(
    config: TrainingConfig, architecture: PretrainedConfig
) -> Iterator[tuple[str, TrainingConfig, PretrainedConfig]]:
    """(name for `--allow`, a config that is about the model, its own config) of each model that a run reads."""
    yield BASE, config, architecture
    if config.training.task.facts.has_teacher:
        of_teacher = teachers_config(config)
        with as_teachers():
            shape = read_architecture(of_teacher)
        yield TEACHER, of_teacher, shape


def read_bases(config: TrainingConfig, architecture: PretrainedConfig) -> dict[str, Base]:
    """Current records of the models that a resolved config reads. Raises RequestError if files are damaged."""
    return {name: read_base(about, shape) for name, about, shape in models_read(config, architecture)}


def read_base(config: TrainingConfig, architecture: PretrainedConfig) -> Base:
    """Record of `config.model`. Reads a part of its weights: seconds even for 140 GB."""
    model = config.model
    has_weights = model.load_pretrained_weights and model.model_name is not None
    files = checkpoint_files(model) if has_weights else []
    parts = files[0].parts if files else ()
    is_cached = "snapshots" in parts[:-1] and local_folder(str(model.model_name)) is None
    commit = parts[parts.index("snapshots") + 1] if is_cached else None
    return Base(model.model_name, weights_digest(files) if files else None, commit, _stable(architecture.to_dict()))


def differences(before: Base, now: Base, weights_matter: bool = True) -> list[str]:
    """Differences between two records, as text. Weights are compared only if they matter, since a checkpoint may
    contain all of them."""
    found = []
    for key in sorted(before.architecture.keys() & now.architecture.keys()):
        old, new = before.architecture[key], now.architecture[key]
        if old != new:
            found.append(f"its {key} was {old} and is {new}")
    is_known = before.weights is not None and now.weights is not None
    if weights_matter and is_known and before.weights != now.weights:
        found.append("its weights have other values")
    if weights_matter and None not in (before.drawn, now.drawn) and before.drawn != now.drawn:
        found.append("its weights are initialized at random, and differ on this device or with these versions")
    return found


def weights_digest(files: list[Path]) -> str:
    """Digest of the tensors in safetensors files, independent of their distribution over files: names, dtypes, shapes
    and values, all or blocks of each (see `WHOLE_BYTES`). Raises RequestError for a file that cannot be read."""
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
            digest = hashlib.blake2b(f"{name} {tensor['dtype']} {tensor['shape']}".encode(), digest_size=16)
            for start, size in _blocks(end - begin, whole):
                stored.seek(8 + length + begin + start)
                digest.update(stored.read(size))
            yield name, digest.digest()


def _blocks(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the hashed blocks of a tensor of `size` bytes."""
    if whole or size <= BLOCKS * BLOCK_BYTES:
        step = 1 << 24
        yield from ((start, min(step, size - start)) for start in range(0, size, step))
        return
    yield from ((index * (size - BLOCK_BYTES) // (BLOCKS - 1), BLOCK_BYTES) for index in range(BLOCKS))


def _stable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config as JSON, without `_VOLATILE` keys."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    kept = {key: value for key, value in plain.items() if key not in _VOLATILE}
    return {key: _stable(value) if isinstance(value, dict) else value for key, value in kept.items()}


def check_all_weights(
    config: TrainingConfig, architecture: PretrainedConfig, in_folders: bool = False
) -> Iterator[Problem]:
    """A warning for each checkpoint of a run with unused weights; with `in_folders` only for local folders. Raises
    RequestError as `check_weights` does."""
    for name, about, shape in models_read(config, architecture):
        if in_folders and local_folder(str(about.model.model_name)) is None:
            continue
        key = KEY if name == BASE else f"{TEACHER}.model_name"
        with as_teachers() if name == TEACHER else nullcontext():
            left_over = check_weights(about, shape)
        if left_over:
            weights = counted(len(left_over), "weight", "weights")
            message = f"this task's model does not use {weights} of {about.model.model_name}, first {left_over[0]}"
            yield Problem(key, message)
