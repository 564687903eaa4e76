"""`training.teacher` becomes a frozen model next to the one that is trained."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from framework.build.adapters.quantize import quantize, require_bitsandbytes
from framework.build.loading.document_isolation import refuse_leaks
from framework.build.loading.model import build_model, read_architecture
from framework.build.place import Place
from framework.build.text.tokenizer import build_tokenizer
from framework.errors import Problem, RequestError
from framework.schema.architecture import position_count, scales_positions
from framework.schema.choices import Task, TorchDtype
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.peft import PeftParams
from framework.schema.plural import counted

KEY = "training.teacher"
MISSING_WORDS = 0.01
"""Share of the tokens that the teacher's tokenizer may lack: a family's next release has a few special tokens more."""


def teachers_config(config: TrainingConfig) -> TrainingConfig:
    """A config whose model is the teacher of this one, on the same rows; one to be packed as the base of an adapter."""
    teacher = config.training.teacher
    if teacher is None:
        expected = "a model_name, or an architecture"
        raise RequestError([Problem(KEY, "there is no teacher to distil from", expected=expected)])
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

    Raises RequestError where it cannot be read, is stored packed, has another vocabulary than the student, fewer
    positions than a row has tokens, or mixes the documents of a row.
    """
    of_teacher = teachers_config(config)
    with as_teachers():
        architecture = read_architecture(of_teacher)
        refuse_leaks(of_teacher, architecture)
    if getattr(architecture, "quantization_config", None) is not None and config.training.teacher is not None:
        message = (
            f"the weights of {config.training.teacher.model_name} are stored packed, which no plan knows the size of"
        )
        expected = f"the checkpoint that they were packed from, with {KEY}.bits=4, which packs it as it loads"
        raise RequestError([Problem(f"{KEY}.model_name", message, expected=expected)])
    words, own = (item.get_text_config().vocab_size for item in (architecture, student))
    if words != own:
        message = f"the teacher has {words:,} tokens in its vocabulary, the model that learns from it {own:,}"
        raise RequestError([Problem(f"{KEY}.model_name", message, expected="a teacher of the same family")])
    settings = architecture.get_text_config().to_dict()
    positions = position_count(settings)
    if positions is not None and config.longest > positions and not scales_positions(settings):
        message = f"rows of {config.longest} tokens are more than the teacher's {positions} positions"
        raise RequestError([Problem("model.model_max_length", message, expected=f"at most {positions}")])
    return architecture


def build_teacher(config: TrainingConfig, place: Place, computed: torch.dtype | None) -> nn.Module:
    """The teacher on its place, frozen and for inference. Raises RequestError as `build_model` does."""
    of_teacher = teachers_config(config)
    if of_teacher.peft.q_lora:
        require_bitsandbytes(f"{KEY}.bits", "unset (the teacher in bfloat16)")
    with as_teachers():
        model, _ = build_model(of_teacher, read_architecture(of_teacher), place, computed)
    if of_teacher.peft.q_lora:
        quantize(of_teacher.peft, model, computed or model.dtype, place)
    teacher: nn.Module = model.requires_grad_(False)
    return teacher.eval()


def refuse_other_words(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises RequestError where a token of the rows is another token to the teacher. One that comes without a tokenizer
    is taken at the size of its vocabulary."""
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
        message = f"the teacher's tokenizer is not the one of the rows: {what}"
        raise RequestError([Problem(f"{KEY}.model_name", message, expected="a teacher of the same family")])


@contextlib.contextmanager
def as_teachers() -> Iterator[None]:
    """What is found wrong with `model` inside is raised of `training.teacher`."""
    try:
        yield
    except RequestError as error:
        raise RequestError([_of_teacher(problem) for problem in error.problems]) from None


def _of_teacher(problem: Problem) -> Problem:
    """What is wrong with its `model` is said of `training.teacher`."""
    head, _, rest = problem.key.partition(".")
    key = f"{KEY}.{rest}" if head == "model" else problem.key
    return Problem(key, problem.message, where=problem.where, expected=problem.expected, nearest=problem.nearest)
