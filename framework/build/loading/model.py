"""Building or loading of the transformers model of a config, on its device and in its dtype."""

import contextlib
import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from framework.build.adapters.quantize import quantization, refuse_other_quantization
from framework.build.attention.flex_attention import NAME as FLEX_ATTENTION
from framework.build.attention.flex_attention import know_flex_attention
from framework.build.attention.ring_attention import NAME as RING_ATTENTION
from framework.build.attention.ring_attention import know_ring_attention
from framework.build.hub import leave_to_run_code, nearest, one_line
from framework.build.loading.config_values import (
    explain_refusal,
    refuse_impossible_values,
    refuse_unreadable_values,
    scale_positions,
)
from framework.build.loading.unmatched import Unmatched, refuse_untied, sort_unmatched
from framework.build.loading.vocabulary import as_stored, changes_rows, fill_rows, rows_for
from framework.build.model.heads import fit_head, model_class, read_by_model
from framework.build.model_folder import (
    CONFIG_FILE,
    checkpoint_files,
    local_folder,
    read_object,
    reads_own_config,
    require_model,
    weight_files,
)
from framework.build.place import TORCH_DTYPES, Place, rehearsal_place
from framework.build.text.tokenizer import END_TOKEN_ID
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.schema.architecture import laid_over
from framework.schema.choices import PeftMethod, TorchDtype
from framework.schema.config import TrainingConfig


def read_architecture(config: TrainingConfig) -> PretrainedConfig:
    """The Hugging Face config: that of `model.model_name`, overridden by `model.architecture`; or `model.architecture`
    alone, if it is complete for a hub model, or there are no weights to load.

    The head is set for the task, and positions are scaled by `model.rope_scaling`. Raises RequestError if neither gives
    a config, a written key is unknown to the config class, its dtype is not floating point, or the model cannot do this
    task.
    """
    model = config.model
    written = model.architecture.thaw() if model.architecture is not None else {}
    if reads_own_config(model):
        architecture = _named_architecture(config, written)
    elif model.architecture is not None:
        architecture = _written_architecture(written)
    else:
        raise RequestError([Problem("model.model_name", "no model is named", expected="model_name or architecture")])
    if model.tokenizer is not None and model.load_pretrained_weights is False:
        architecture.vocab_size = model.tokenizer.vocab_size
        # otherwise generation would stop at the id of the original tokenizer's end token
        architecture.bos_token_id = architecture.eos_token_id = END_TOKEN_ID
    scale_positions(model, architecture)
    refuse_impossible_values(architecture, f"the config.json of {model.model_name!r}", written)
    dtype = architecture.dtype
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):  # such as int8
        key = "model.model_name" if reads_own_config(model) else "model.architecture.dtype"
        message = f"its config says that the weights are {dtype}, which is not a floating-point dtype"
        raise RequestError([Problem(key, message, expected="float32, bfloat16 or float16")])
    fit_head(config, architecture)
    return architecture


def _written_architecture(written: dict[str, Any]) -> PretrainedConfig:
    key = "model.architecture"
    refuse_unreadable_values(written, "it", key)
    try:
        known = AutoConfig.for_model(written["model_type"])
    except KeyError:
        raise RequestError([Problem(f"{key}.model_type", "is missing", expected="a transformers model type")]) from None
    except ValueError:
        unknown = Problem(f"{key}.model_type", f"transformers knows no {written['model_type']!r}")
        raise RequestError([unknown]) from None
    _refuse_unknown(known, written["model_type"], written)
    try:
        return AutoConfig.for_model(**written)
    except Exception as error:  # config classes raise many types
        raise RequestError([Problem(key, f"{type(known).__name__} refuses it: {one_line(error)}")]) from None


def _refuse_unknown(known: PretrainedConfig, model_type: str, written: dict[str, Any]) -> None:
    """Raise RequestError for each written key that the config class does not know."""
    names = set(known.to_dict()) | set(known.attribute_map) | {"dtype", "architectures"}
    unknown_keys = [
        Problem(f"model.architecture.{name}", f"is not a key of {type(known).__name__}", nearest=nearest(name, names))
        for name in sorted(set(written) - names)
        if not read_by_model(known, name) and not _is_older_name(model_type, name, written[name])
    ]
    if unknown_keys:
        raise RequestError(unknown_keys)


def _is_older_name(model_type: str, name: str, value: Any) -> bool:
    """Whether the config class accepts a key as an older name, such as `torch_dtype` or `rope_theta`, and stores it
    under another; it stores unknown keys under their own name."""
    try:
        own = deepcopy(value)  # transformers modifies it in place
        return name not in vars(AutoConfig.for_model(model_type, **{name: own}))
    except Exception:
        return True  # the class knows the key, and its error is reported later


def _named_architecture(config: TrainingConfig, written: dict[str, Any]) -> PretrainedConfig:
    """The config next to the weights, overridden by `written`; `written` alone if its model_type differs."""
    model, key = config.model, "model.model_name"
    folder = local_folder(str(model.model_name))
    if folder is not None:
        require_model(folder, key)
        own = read_object(folder / CONFIG_FILE, key)
        refuse_unreadable_values(own, f"the config.json of {model.model_name!r}", key)
    refuse_unreadable_values(written, "it", "model.architecture")
    try:
        read: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder) if folder is not None else model.model_name,
            revision=model.model_revision or "main",
            trust_remote_code=model.trust_remote_code,
            local_files_only=folder is not None or not hub_is_reachable(),
        )
    except Exception as error:  # the hub client and its cache raise many types, none of them an internal fault
        message = f"the config.json of {model.model_name!r} could not be read: {one_line(error)}"
        raise RequestError([Problem(key, message, expected=leave_to_run_code(error))]) from None
    if "/" in (kernel := str(read._attn_implementation)):  # transformers would fetch and run it
        message = f"the config.json of {model.model_name!r} names code of a hub as its attention: {kernel}"
        raise RequestError([Problem(key, message, expected="a config.json without it")])
    if not written:
        return read
    if written.get("model_type", read.model_type) != read.model_type:
        return _written_architecture(written)
    _refuse_unknown(read, read.model_type, written)
    try:
        laid: PretrainedConfig = type(read).from_dict(laid_over(read.to_dict(), written))
        return laid
    except Exception as error:
        message = f"{type(read).__name__} refuses it: {one_line(error)}"
        raise RequestError([Problem("model.architecture", message)]) from None


def build_model(
    config: TrainingConfig, architecture: PretrainedConfig, place: Place, computed: torch.dtype | None = None
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The task's model in train mode, with pretrained weights loaded onto the device or random ones; and the names of
    the head's weights that the checkpoint lacks, so that they are random.

    `model.torch_dtype_str` must be resolved; `auto` is the checkpoint's dtype (float32 if it states none). `computed`
    is autocast's dtype, the compute dtype of a base that is quantized while it loads. Raises RequestError if the
    weights cannot be loaded, do not match the architecture, or are stored in another quantization than requested.
    """
    refuse_other_quantization(config, architecture)
    dtype = TORCH_DTYPES.get(config.model.torch_dtype_str or TorchDtype.AUTO) or architecture.dtype or torch.float32
    attention = str(config.model.attn_implementation) if config.model.attn_implementation else None
    of_rows = config.training.task.facts.is_of_rows
    know_ring_attention()
    if attention == FLEX_ATTENTION:
        know_flex_attention()
    quantized = quantization(config.peft, computed or dtype, of_rows) if is_quantized_when_loaded(config) else None
    if config.model.load_pretrained_weights and not place.rehearsed:
        model, new = _pretrained(config, architecture, dtype, attention, place, quantized)
    else:
        model, new = _random(config, architecture, dtype, attention, place), ()
    if config.model.sdpa_backend is not None and model.config._attn_implementation not in ("sdpa", RING_ATTENTION):
        message = f"{architecture.model_type} does not use torch's attention here"
        raise RequestError([Problem("model.sdpa_backend", message, expected="leave it unset")])
    if config.training.task.facts.is_of_rows:
        # BERT and GPT-2 check ids for padding, to warn: that synchronizes with the GPU, and our masks follow positions.
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.warn_if_padding_and_no_attention_mask = lambda *_: None
    model.train()
    return model, new


def is_quantized_when_loaded(config: TrainingConfig) -> bool:
    """Whether weights are quantized one by one while loading; LoftQ needs the full weights for their quantization
    error."""
    return config.training.use_peft and config.peft.q_lora and config.peft.peft_method is not PeftMethod.LOFTQ


def _random(
    config: TrainingConfig, architecture: PretrainedConfig, dtype: torch.dtype, attention: str | None, place: Place
) -> PreTrainedModel:
    settings = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": config.model.trust_remote_code}
    try:
        with torch.device(place.device), no_init_weights() if place.rehearsed else contextlib.nullcontext():
            model = model_class(config.training.task).from_config(architecture, **settings)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any type, caused by the values in the config
        raise RequestError([_refused(config, architecture, error)]) from None
    built: PreTrainedModel = model
    built.tie_weights()  # skipped with the initialization in a rehearsal
    return built


def _refused(config: TrainingConfig, architecture: PretrainedConfig, error: Exception) -> Problem:
    """Problem for an error of transformers while building, under the key that caused it: attention kernel or
    architecture."""
    attention, name = config.model.attn_implementation, config.model.model_name
    reason = explain_refusal(architecture, error) or one_line(error)
    if attention is not None and "attention" in reason.lower():
        missing = f"{attention} cannot be used with {architecture.model_type}: {reason}"
        return Problem("model.attn_implementation", missing, nearest="eager, or leave it unset")
    if reads_own_config(config.model) and config.model.architecture is None:
        return Problem("model.model_name", f"transformers cannot build the config.json of {name!r}: {reason}")
    return Problem("model.architecture", f"transformers cannot build it: {reason}")


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Suppress transformers' table of missing and unexpected weights, which we report by name, and its progress bar,
    which would also go to pipes and files."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_error)  # its warnings include a list of weights that tensor parallelism does not split
    had_bar = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        if had_bar:
            enable_progress_bar()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _pretrained(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    place: Place,
    quantized: BitsAndBytesConfig | None,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    if config.model.model_name is None:
        raise RequestError(
            [
                Problem(
                    "model.load_pretrained_weights",
                    "there are no weights to load without model.model_name",
                    expected="model.model_name, or load_pretrained_weights: false for random weights",
                )
            ]
        )
    # Quantized later, from the host
    loses_first = config.training.use_peft and config.peft.q_lora and quantized is None
    device = torch.device("cpu") if loses_first else place.device
    loaded, unmatched = _loaded(config, architecture, dtype, attention, device, quantized)
    if changes_rows(config.model):
        fill_rows(loaded, config, architecture.get_text_config().vocab_size)
    return loaded, unmatched.new


def check_weights(config: TrainingConfig, architecture: PretrainedConfig) -> tuple[str, ...]:
    """Names of unused weights of `model.model_name` that this task's model may ignore, such as another task's head.

    The checkpoint is loaded as for training, but onto the meta device: only names and shapes are read, and a few rows
    of tied matrices. Raises RequestError as `build_model` does for weights that are missing, damaged, left over or of
    another shape, and if matrices that the config ties are stored with different values.
    """
    # such a checkpoint loads only onto a GPU
    stored_quantized = getattr(architecture, "quantization_config", None) is not None
    if not config.model.load_pretrained_weights or config.model.model_name is None or stored_quantized:
        return ()
    shape = deepcopy(architecture)  # loading writes into it
    model, unmatched = _loaded(config, shape, torch.float32, None, torch.device("meta"), None)
    refuse_untied(model, checkpoint_files(config.model), str(config.model.model_name), "model.model_name")
    return unmatched.left_over


def embedding_rows(config: TrainingConfig) -> tuple[int, int]:
    """Rows of the embedding in the checkpoint and in the model."""
    stored: int = read_architecture(config).get_text_config().vocab_size
    return stored, rows_for(config.model, stored) if changes_rows(config.model) else stored


def _loaded(
    config: TrainingConfig,
    architecture: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    device: torch.device,
    quantized: BitsAndBytesConfig | None,
) -> tuple[PreTrainedModel, Unmatched]:
    name, key = str(config.model.model_name), "model.model_name"
    if (folder := local_folder(name)) is not None:
        require_model(folder, key)
        weight_files(folder, key)
    if changes_rows(config.model):
        architecture = as_stored(architecture, embedding_rows(config)[0])
    try:
        with unreported():
            model, info = model_class(config.training.task).from_pretrained(
                str(folder) if folder is not None else name,
                config=architecture,
                dtype=dtype,
                attn_implementation=attention,
                revision=config.model.model_revision or "main",
                trust_remote_code=config.model.trust_remote_code,
                local_files_only=folder is not None or not hub_is_reachable(),
                device_map={"": device},
                quantization_config=quantized,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                use_safetensors=True,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers and the hub client raise many types
        if attention is not None and "attention" in str(error).lower():
            raise RequestError([_refused(config, architecture, error)]) from None
        # raises if the config is the cause
        _random(config, deepcopy(architecture), dtype, attention, rehearsal_place("cpu"))
        message = f"the weights of {name!r} do not load: {one_line(error)}"
        raise RequestError([Problem(key, message)]) from None
    return model, sort_unmatched(model, info, name, key)
