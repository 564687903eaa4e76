"""Loading the trained model of a run or folder: a plain model, or an adapter with its base."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from framework.build.adapters.quantize import is_quantized, quantize, settle_4bit_layers
from framework.build.hub import leave_to_run_code, one_line
from framework.build.loading.bases import BASE, Base, differences, read_base
from framework.build.loading.model import build_model, read_architecture, unreported
from framework.build.loading.unmatched import sort_unmatched
from framework.build.model.freeze import fingerprint
from framework.build.model.heads import model_class, pad_like
from framework.build.model_folder import KEY, local_folder, read_object, require_model, weight_files
from framework.build.place import autocast_dtype, real_place
from framework.build.resolve_model import settle
from framework.compose.own_adapter import BASE_RECORD
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.run.checkpoints.export import BASE_FOLDER
from framework.run.checkpoints.saved_model import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    PICKLED_WEIGHTS,
    SavedModel,
)
from framework.run.inputs import MOST
from framework.run.state import seed_all
from framework.schema.config import TrainingConfig
from framework.schema.model import ModelParams
from framework.schema.tasks import Task
from framework.schema.training import TrainingParams

if TYPE_CHECKING:
    from peft import PeftModel


def load_plain(name: str, task: Task, trusts_code: bool) -> PreTrainedModel:
    """Load a plain model of the task's class, in the dtype it was written in. Raises RequestError for a missing,
    damaged or surplus weight."""
    folder = local_folder(name)
    if folder is not None:
        require_model(folder, "RUN")
        weight_files(folder, "RUN")
    try:
        with unreported():
            model, info = model_class(task).from_pretrained(
                name,
                dtype="auto",
                local_files_only=folder is not None or not hub_is_reachable(),
                trust_remote_code=trusts_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                use_safetensors=True,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for a bad config
        message = f"{name} does not load: {one_line(error)}"
        raise RequestError([Problem("RUN", message, expected=leave_to_run_code(error))]) from None
    if new := sort_unmatched(model, info, name, "RUN").new:
        raise RequestError([Problem("RUN", f"{name} has no {new[0]}, so that its answers would be random")])
    loaded: PreTrainedModel = model
    return loaded


def load_base(saved_model: SavedModel) -> tuple[PreTrainedModel, torch.dtype]:
    """Load the weights that the adapter was trained on, held as in training, and return them with the dtype to write.

    Raises RequestError if the adapter does not name them, they do not load, or have changed since.
    """
    with _as_run():
        return _found_base(saved_model)


@contextlib.contextmanager
def _as_run() -> Iterator[None]:
    """Add to problems with the base the place that names it."""
    try:
        yield
    except RequestError as error:
        expected = f"the base where it was, or where it is now as model.model_name in the run's {CONFIG_FILE}"
        raise RequestError(
            [
                replace(problem, expected=expected) if problem.key == KEY and not problem.expected else problem
                for problem in error.problems
            ]
        ) from None


def _found_base(saved_model: SavedModel) -> tuple[PreTrainedModel, torch.dtype]:
    if saved_model.config is not None:
        return _base_of_run(saved_model.config, saved_model)
    if saved_model.task.facts.is_of_rows:
        message = f"{saved_model.folder} does not say how many classes its model has, nor their names"
        raise RequestError([Problem("RUN", message, expected="the run folder that it came from")])
    name = read_object(saved_model.folder / ADAPTER_FILE, "RUN").get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        message = f"{saved_model.folder} does not say which base it belongs on"
        raise RequestError([Problem("RUN", message, expected="the run folder that it came from")])
    about = _about(name, saved_model)
    _require_same_base(saved_model, about, read_architecture(about))
    model = load_plain(name, saved_model.task, saved_model.trusts_code)
    return model, model.dtype


def _about(name: str, saved_model: SavedModel) -> TrainingConfig:
    model = ModelParams(model_name=name, trust_remote_code=saved_model.trusts_code)
    return TrainingConfig(model=model, training=TrainingParams(task=saved_model.task))


def _require_same_base(saved_model: SavedModel, config: TrainingConfig, architecture: PretrainedConfig) -> None:
    """Raise RequestError if `config.model` is not the recorded base of the adapter."""
    _require_base(saved_model, config, lambda before: differences(before, read_base(config, architecture)))


def _require_base(saved_model: SavedModel, config: TrainingConfig, compare: Callable[[Base], list[str]]) -> None:
    record = saved_model.folder / BASE_RECORD
    if not record.exists() or saved_model.allows_other_base:
        return
    try:
        before = Base.from_json(read_object(record, "RUN"))
    except ValueError as error:
        raise RequestError([Problem("RUN", f"{record} {error}", expected=f"--allow {BASE}")]) from None
    if changed := compare(before):
        base, what = config.model.model_name or "the base", "; ".join(changed[:MOST])
        message = f"{base} is not what the adapter was trained on: {what}"
        raise RequestError([Problem(BASE, message, expected=f"the base as it was, or --allow {BASE}")])


def with_adapter(base: PreTrainedModel, saved_model: SavedModel) -> "PeftModel":
    """Apply the adapter to the base. Raises RequestError if it does not fit."""
    if not (saved_model.folder / ADAPTER_WEIGHTS).exists():  # otherwise peft looks for them on a hub
        is_pickled = (saved_model.folder / PICKLED_WEIGHTS).exists()
        message = f"{saved_model.folder} has no {ADAPTER_WEIGHTS}"
        message += f", and {PICKLED_WEIGHTS} is pickled, which is not read" if is_pickled else ""
        raise RequestError([Problem("RUN", message, expected="weights in safetensors")])
    from peft import PeftModel  # takes seconds to import

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            # peft reads a property that transformers 5.20 renamed; nothing a user could change
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: PeftModel = PeftModel.from_pretrained(base, str(saved_model.folder))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # peft raises many kinds of errors for a bad adapter_config
        message = f"{saved_model.folder} does not fit its base: {one_line(error)}"
        raise RequestError([Problem("RUN", message)]) from None
    if (saved_model.folder / GENERATION_CONFIG_NAME).exists():
        base.generation_config = GenerationConfig.from_pretrained(str(saved_model.folder))
    return adapted


def load_model(saved_model: SavedModel) -> Any:
    """Load the model, or base and adapter, for inference: in evaluation mode, on the GPU if there is one."""
    if saved_model.adapter_kind is None:
        model: Any = load_plain(str(saved_model.folder), saved_model.task, saved_model.trusts_code)
    else:
        model = with_adapter(load_base(saved_model)[0], saved_model)
    if is_quantized(model):
        settle_4bit_layers(model)
    on_card = any(parameter.is_cuda for parameter in model.parameters())  # quantized weights are there already
    return (model if on_card or not torch.cuda.is_available() else model.to("cuda")).eval()


def _base_of_run(config: TrainingConfig, saved_model: SavedModel) -> tuple[PreTrainedModel, torch.dtype]:
    config, architecture = settle(config)
    stated = architecture.dtype  # building overwrites it with the training dtype
    if (saved_model.folder / BASE_FOLDER).exists():
        about = _about(str(saved_model.folder / BASE_FOLDER), saved_model)
        _require_same_base(saved_model, about, architecture)
        model = load_plain(str(saved_model.folder / BASE_FOLDER), saved_model.task, saved_model.trusts_code)
    else:
        _require_same_base(saved_model, config, architecture)
        if config.training.task.facts.is_of_rows:
            pad_like(architecture, saved_model.tokenizer)
        is_too_large = config.model.offload_frozen_base is True
        place = real_place(torch.device("cuda" if torch.cuda.is_available() and not is_too_large else "cpu"))
        seed_all(config.training.seed)  # random weights are the same as in the run
        autocast = autocast_dtype(config.training)
        model, _ = build_model(config, architecture, place, autocast)
        if not config.model.load_pretrained_weights:
            now = Base(None, None, drawn=f"{fingerprint(model.parameters()):016x}")
            _require_base(saved_model, config, lambda before: differences(replace(before, architecture={}), now))
        if config.peft.q_lora:
            quantize(config.peft, model, autocast or model.dtype, place)
    return model, getattr(torch, stated) if isinstance(stated, str) else stated or model.dtype
