"""`tunesmith merge`: a trained adapter and its base become one plain Hugging Face folder."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from framework.build.assembly import autocast_dtype
from framework.build.hub import hub_is_reachable, one_line
from framework.build.merge import merge
from framework.build.model import build_model, settle
from framework.build.place import real_place
from framework.build.quantize import quantize, quantized_kinds
from framework.compose import load
from framework.errors import Problem, RequestError
from framework.run.checkpoint import written_aside
from framework.run.export import BASE_FOLDER, write_model
from framework.schema.config import TrainingConfig

ADAPTER_FILE, CONFIG_FILE, MERGED_FOLDER = "adapter_config.json", "config.yaml", "merged"


@dataclass(frozen=True)
class Merged:
    """Where the plain model is, its dtype, and from what it was dequantised (empty: the base was plain)."""

    folder: Path
    dtype: str
    dequantized: str


def merge_run(source: Path, output: Path | None = None) -> Merged:
    """Write the model that a run's adapter and its base are together, to `output` (else `merged/` in `source`).

    `source` is a run folder, or a folder with an adapter whose base can be loaded by its name. The weights are in the
    dtype that the run would export. Raises RequestError when there is no adapter to merge, saying what the folder is.
    """
    target = output if output is not None else source / MERGED_FOLDER
    adapter = _adapter_folder(source)
    if target.exists():
        raise RequestError([Problem("--output", f"{target} is already there", expected="a folder that is not")])
    base, dtype = _base(source, adapter)
    kinds = ", ".join(quantized_kinds(base))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            adapted = PeftModel.from_pretrained(base, str(adapter))
    except (ValueError, RuntimeError, OSError) as error:
        raise RequestError([Problem("RUN", f"{adapter} does not go on its base: {one_line(error)}")]) from None
    with written_aside(target) as aside:
        write_model(merge(adapted, dtype), aside, dtype)
        if (adapter / "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(adapter).save_pretrained(aside)
    return Merged(target, str(dtype).removeprefix("torch."), kinds)


def _adapter_folder(source: Path) -> Path:
    """The folder with the adapter. Raises RequestError saying what there is instead."""
    final = source / "final"
    for folder in (final, source):
        if (folder / ADAPTER_FILE).exists():
            kind = json.loads((folder / ADAPTER_FILE).read_text()).get("peft_type", "")
            if kind in ("PREFIX_TUNING", "PROMPT_TUNING"):
                message = f"{folder} holds tokens before the row ({kind}): there is nothing to add to the weights"
                raise RequestError([Problem("RUN", message, expected="the adapter as it is, with its base")])
            return folder
        if (folder / "config.json").exists():
            raise RequestError([Problem("RUN", f"{folder} is a plain model already: there is no adapter to merge")])
    if (source / CONFIG_FILE).exists():
        message = f"{source} is a run that has not finished: it has no final/"
        raise RequestError([Problem("RUN", message, expected=f"tunesmith train {source / CONFIG_FILE} --resume")])
    what = "has neither an adapter nor a run in it" if source.is_dir() else "is no folder"
    raise RequestError([Problem("RUN", f"{source} {what}", expected="a run folder, or one with adapter_config.json")])


def _base(source: Path, adapter: Path) -> tuple[PreTrainedModel, torch.dtype]:
    """The weights that the adapter was trained on, as they were held then, and the dtype to write."""
    written = source / CONFIG_FILE
    if written.exists():
        return _base_of_run(load(str(written)), adapter)
    name = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if not name:
        message = f"{adapter} does not say which base it belongs on"
        raise RequestError([Problem("RUN", message, expected="the run folder that it came from")])
    model = _loaded(name)
    return model, model.dtype


def _loaded(name: str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto", local_files_only=not hub_is_reachable()
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise RequestError([Problem("RUN", f"its base {name} does not load: {one_line(error)}")]) from None
    return model


def _base_of_run(config: TrainingConfig, adapter: Path) -> tuple[PreTrainedModel, torch.dtype]:
    config, architecture = settle(config)
    stated = architecture.dtype  # building writes the training dtype over it
    if (adapter / BASE_FOLDER).exists():
        model = _loaded(str(adapter / BASE_FOLDER))
    else:
        is_too_large = config.model.offload_frozen_base is True
        place = real_place(torch.device("cuda" if torch.cuda.is_available() and not is_too_large else "cpu"))
        set_seed(config.training.seed)  # random weights come out as they did for the run
        autocast = autocast_dtype(config.training)
        model, _ = build_model(config, architecture, place, autocast)
        if config.peft.q_lora:
            quantize(config.peft, model, autocast or model.dtype, place)
    return model, getattr(torch, stated) if isinstance(stated, str) else stated or model.dtype
