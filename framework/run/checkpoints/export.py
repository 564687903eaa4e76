"""Export of the final model: a folder that plain `from_pretrained` loads, with tokenizer and chat template."""

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
from framework.run.checkpoints.read_back import count_differing, differing, verify_tensors
from framework.run.record.layout import aside_of, discard
from framework.schema.choices import PeftSaveMode
from framework.schema.plural import counted

if TYPE_CHECKING:
    from framework.build.adapters.adapter import Adapter

BASE_FOLDER = "base_model"
"""Folder of the base, next to its adapter."""


def export(
    assembly: Assembly,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    base: Mapping[str, Any] | None = None,
    fallback: Path | None = None,
) -> torch.dtype:
    """Write model (or adapter) and tokenizer to `target`, completely or not at all. Returns the dtype written.

    `base` is the record of an adapter's base.

    A model is written in the dtype of its original checkpoint, whatever it was trained in, and `config.json` agrees. An
    adapter is written unchanged, with its base next to it or merged into the base if the config asks for it. An
    optimizer's averaged weights replace the weights, and the model is dismantled and cast in place: call this only
    after training. Raises SaveFailed if the folder cannot be written or does not read back, even if writing to
    `fallback` then succeeded.
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
    """Whether the export changes trained tensors in place, so that they must be saved first."""
    adapter, mode = assembly.adapter, assembly.config.peft.peft_save_mode
    if adapter is not None:
        return mode is not PeftSaveMode.ADAPTER_ONLY
    return any(parameter.dtype != assembly.export_dtype for parameter in assembly.trained)


def leaves_model(assembly: Assembly) -> bool:
    """Whether the export reads the model and changes nothing of it, so that both may be used at a time."""
    if assembly.config.training.exports_average or assembly.streamed is not None:
        return False
    if assembly.adapter is not None:
        return assembly.config.peft.peft_save_mode is PeftSaveMode.ADAPTER_ONLY
    return _is_all(causal_model(assembly.model), assembly.export_dtype)


def _is_all(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether all that is written of a model has that dtype, but for whole numbers."""
    return all(item.dtype == dtype or not item.is_floating_point() for item in model.state_dict().values())


def _prepared(
    assembly: Assembly, tokenizer: PreTrainedTokenizerBase, base: Mapping[str, Any] | None
) -> tuple[torch.dtype, Callable[[Path], None]]:
    """Returns the dtype of the export and a function that writes it to a folder, which may be called again after a
    failure."""
    adapter, mode, dtype = assembly.adapter, assembly.config.peft.peft_save_mode, assembly.export_dtype
    if adapter is None:
        plain = causal_model(assembly.model)
        return dtype, _writing(plain if _is_all(plain, dtype) else plain.to(dtype), dtype, tokenizer)
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
    """Test the export next to `target` without the bulk of a model's weights: write, read back and delete.

    Each tensor of a full model is represented by one row, which shares memory with a tied tensor's row as the tensors
    do. An adapter is written as it is; a base to merge into and sharded tensors are left out. The plan's `disk_bytes`
    covers the space needed. Returns a description of what was written. Raises SaveFailed if the export would fail.
    """
    tried = aside_of(target)  # reused by the export if this attempt is killed
    try:
        discard(tried)
        tried.mkdir(parents=True)
        _write_small(assembly, tried)
        write_tokenizer(tokenizer, tried)
        return ", ".join(sorted(file.name for file in tried.iterdir()))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise SaveFailed(f"the run would end without {target}, which cannot be written: {reason}") from error
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
            model.config.dtype = dtype  # where save_pretrained records the written dtype
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
    """Write a plain model's folder and read it back. Raises SaveFailed if it would not load elsewhere."""
    model.save_pretrained(folder)
    verify_folder(folder, dtype, "model")
    expected = revert_weight_conversion(model, dict(model.state_dict()))  # as it is written
    files = list(folder.glob("model*.safetensors"))
    if wrong := [name for file in files for name in differing(file, expected)]:
        raise SaveFailed(f"{folder} does not read back as written: {count_differing(wrong)}")


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer with its chat template and read it back. Raises SaveFailed if it would render or encode
    differently."""
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
    """Write an adapter as peft does, from its tensors on the host. `base` is the path of the base in its config.

    An initialization that was taken out of the base's weights is subtracted again, so that the adapter fits the
    original weights: W + (B A - B0 A0) is an adapter of twice the rank (peft's subtract_mutated_init).
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
        config.init_lora_weights = True  # loading it must not compute an initialization
    config.inference_mode = True
    if base is not None:
        config.base_model_name_or_path = base
    config.save_pretrained(str(folder))
    base_model = adapter.model.get_base_model()
    if base_model.can_generate():
        base_model.generation_config.save_pretrained(folder)  # has the end tokens
    seen: set[int] = set()
    for name, tensor in tensors.items():  # a tied pair is written twice, as peft does; loading ties it again
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    verify_tensors(file, tensors)
    verify_folder(folder, None, "adapter_model")


def write_base(base: Mapping[str, Any] | None, folder: Path) -> None:
    """Write the record of an adapter's base."""
    if base is not None:
        (folder / BASE_RECORD).write_text(json.dumps(base, indent=2) + "\n")


def verify_folder(folder: Path, dtype: torch.dtype | None, stem: str) -> None:
    """Check that every tensor is present once, without a wrapper's prefix, in the dtype stated by the config."""
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
