"""The final saved model: a folder that plain `from_pretrained` loads, tokenizer and chat template included."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from framework.build.assembly import Assembly
from framework.build.averages import take_average
from framework.build.loading.bases import weights_digest
from framework.build.model.parts import causal_model
from framework.build.model_folder import weight_files
from framework.compose.own_adapter import BASE_RECORD
from framework.errors import SaveFailed
from framework.run.checkpoints.checkpoint import written_aside
from framework.run.checkpoints.read_back import differing, told, verify_tensors
from framework.run.record.layout import aside_of, discard
from framework.schema.choices import PeftSaveMode
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.build.adapters.adapter import Adapter

BASE_FOLDER = "base_model"
"""Where the base is written next to its adapter."""


def export(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    base: Mapping[str, Any] | None = None,
    fallback: Path | None = None,
) -> torch.dtype:
    """Write model (or adapter) and tokenizer to `target`, complete or not at all. Returns the dtype written.

    `base` is the record of what an adapter was trained on.

    A model is written in its checkpoint's dtype, whatever it was trained in, and `config.json` says the same; an
    adapter is written as it is, with its base next to it or added into the base when that was asked for. An optimizer's
    average takes the place of the weights, and the model is taken apart and cast in place: call this when training
    is over. Raises SaveFailed when the folder cannot be written or does not read back, also where `fallback` then
    could.
    """
    take_average(assembly)
    if assembly.streamed is not None:
        assembly.streamed.dissolve(assembly.model)
    dtype, write = _prepared(assembly, tokenizer, base)
    try:
        write(target)
    except SaveFailed as error:
        if fallback is None:
            raise
        try:
            write(fallback)
        except SaveFailed as second:
            raise SaveFailed(f"{error}\n{second}") from second
        raise SaveFailed(f"{error} The export is {fallback}") from error
    return dtype


def recasts(assembly: Assembly) -> bool:
    """Whether the export changes trained tensors in place, which then must be saved before."""
    adapter, mode = assembly.adapter, assembly.config.peft.peft_save_mode
    if adapter is not None:
        return mode is not PeftSaveMode.ADAPTER_ONLY
    return any(parameter.dtype != assembly.export_dtype for parameter in assembly.trained)


def _prepared(
    assembly: Assembly, tokenizer: PreTrainedTokenizerBase, base: Mapping[str, Any] | None
) -> tuple[torch.dtype, Callable[[Path], None]]:
    """The dtype of what is exported, and what writes it to a folder, again where that has failed."""
    adapter, mode, dtype = assembly.adapter, assembly.config.peft.peft_save_mode, assembly.export_dtype
    if adapter is None:
        return dtype, _writing(causal_model(assembly.model).to(dtype), dtype, tokenizer)
    from framework.build.adapters.adapter import adapter_state  # peft takes seconds to import
    from framework.build.adapters.merge import detach, merge

    if mode is PeftSaveMode.MERGED:
        return dtype, _writing(merge(adapter.model, dtype), dtype, tokenizer)
    tensors = {name: item.detach().cpu().contiguous() for name, item in adapter_state(adapter.model)}
    with_base, bases = mode is PeftSaveMode.ADAPTER_AND_BASE_MODEL, list[PreTrainedModel]()

    def write_both(target: Path) -> None:
        with written_aside(target) as aside:
            base_folder = str(target.absolute() / BASE_FOLDER) if with_base else None
            write_adapter(adapter, dict(tensors), aside, base_folder)
            write_base(base, aside)
            if with_base:
                bases[:] = bases or [detach(adapter.model)]
                (whole,) = bases
                write_model(whole, aside / BASE_FOLDER, whole.dtype)
                write_tokenizer(tokenizer, aside / BASE_FOLDER)
                written = weights_digest(weight_files(aside / BASE_FOLDER, "training.output_dir"))
                write_base({**base, "weights": written} if base else None, aside)
            write_tokenizer(tokenizer, aside)

    return assembly.trained[0].dtype, write_both


def _writing(plain: PreTrainedModel, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        with written_aside(target) as aside:
            write_model(plain, aside, dtype)
            write_tokenizer(tokenizer, aside)

    return write


def try_export(assembly: Assembly, tokenizer: PreTrainedTokenizerBase, target: Path) -> str:
    """Write next to `target` what an export writes, but for the bulk of a model's weights, read it back and delete it.

    Of each tensor of a model that is exported whole there is one row, which shares memory with that of a tied tensor as
    the whole does. An adapter is written as it is; what it is merged with, and tensors in parts, are left out. Whether
    there is room for it all is the plan's `disk_bytes`. Returns what was written, in words. Raises SaveFailed where the
    export itself would fail.
    """
    tried = aside_of(target)  # which the export takes up again, if this one is killed
    try:
        discard(tried)
        tried.mkdir(parents=True)
        _write_small(assembly, tried)
        write_tokenizer(tokenizer, tried)
        return ", ".join(sorted(file.name for file in tried.iterdir()))
    except Exception as error:
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise SaveFailed(f"the run would end without {target}, which cannot be written: {told}") from error
    finally:
        discard(tried)


def _write_small(assembly: Assembly, folder: Path) -> None:
    adapter, mode = assembly.adapter, assembly.config.peft.peft_save_mode
    if adapter is None:
        model = causal_model(assembly.model)
        dtype = model.config.dtype
        _write_configs(model, folder)
        if not assembly.is_in_parts:
            rows = {name: item[:1] if item.dim() else item for name, item in model.state_dict().items()}
            model.save_pretrained(folder, state_dict=rows, save_original_format=False)
            model.config.dtype = dtype  # where it notes what it has written
    elif mode is not PeftSaveMode.ADAPTER_ONLY:
        _write_configs(adapter.model.get_base_model(), folder)
    if adapter is not None and mode is not PeftSaveMode.MERGED and not assembly.is_in_parts:
        from framework.build.adapters.adapter import adapter_state  # peft takes seconds to import

        tensors = {name: item.detach().cpu().contiguous() for name, item in adapter_state(adapter.model)}
        write_adapter(adapter, tensors, folder, None)


def _write_configs(model: PreTrainedModel, folder: Path) -> None:
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """A plain model's folder, read back. Raises SaveFailed when it would not load elsewhere."""
    model.save_pretrained(folder)
    verify_folder(folder, dtype, "model")
    expected = revert_weight_conversion(model, dict(model.state_dict()))  # as it is written
    files = list(folder.glob("model*.safetensors"))
    if wrong := [name for file in files for name in differing(file, expected)]:
        raise SaveFailed(f"{folder} does not read back as written: {told(wrong)}")


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The tokenizer with its chat template, read back. Raises SaveFailed when it would render or encode otherwise."""
    tokenizer.save_pretrained(folder)
    again = type(tokenizer).from_pretrained(folder)
    for name, one, other in (
        ("chat template", tokenizer.chat_template, again.chat_template),
        ("number of tokens", len(tokenizer), len(again)),
        ("end token", tokenizer.eos_token, again.eos_token),
    ):
        if one != other:
            raise SaveFailed(f"the {name} of the tokenizer in {folder} is not the one that was trained with")


def write_adapter(adapter: "Adapter", tensors: dict[str, Tensor], folder: Path, base: str | None) -> None:
    """The adapter as peft writes one, from its tensors on the host. `base`: where the weights below it are written.

    What was taken out of the base's weights to start from is subtracted again, so that the adapter belongs on the
    original ones: W + (B A - B0 A0) is one adapter of twice the rank (peft's subtract_mutated_init).
    """
    config = copy.copy(adapter.model.peft_config["default"])
    if adapter.initial and base is None:
        config.r, config.lora_alpha = 2 * config.r, 2 * config.lora_alpha
        for name, start in adapter.initial.items():
            if "lora_A" in name:
                tensors[name] = torch.cat([tensors[name], start.to(tensors[name].dtype)], 0)
            elif "lora_B" in name:
                tensors[name] = torch.cat([tensors[name], -start.to(tensors[name].dtype)], 1)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # nothing is to be computed when it is loaded
    config.inference_mode = True
    if base is not None:
        config.base_model_name_or_path = base
    config.save_pretrained(str(folder))
    base_model = adapter.model.get_base_model()
    if base_model.can_generate():
        base_model.generation_config.save_pretrained(folder)  # which says where its answers end
    seen: set[int] = set()
    for name, tensor in tensors.items():  # a tied pair is written twice, as peft does: it is one again when loaded
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    verify_tensors(file, tensors)
    verify_folder(folder, None, "adapter_model")


def write_base(base: Mapping[str, Any] | None, folder: Path) -> None:
    """The record of the base that an adapter belongs on."""
    if base is not None:
        (folder / BASE_RECORD).write_text(json.dumps(base, indent=2) + "\n")


def verify_folder(folder: Path, dtype: torch.dtype | None, stem: str) -> None:
    """Every tensor present once, without a wrapper's prefix, in the dtype that the config states."""
    names: list[str] = []
    for file in sorted(folder.glob(f"{stem}*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names += stored.keys()
    wrapped = [name for name in names if "_orig_mod." in name or "_checkpoint_wrapped_module." in name]
    if not names or wrapped:
        raise SaveFailed(
            f"{folder} would not load elsewhere: {counted(len(names), 'tensor')}, wrapped names {wrapped[:3]}"
        )
    config = folder / "config.json"
    if dtype is not None and config.exists():
        stated = json.loads(config.read_text()).get("dtype")
        if stated != str(dtype).removeprefix("torch."):
            raise SaveFailed(f"{config} states dtype {stated}, the tensors are {dtype}")
