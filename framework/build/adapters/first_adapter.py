"""Initial weights of an adapter: random ones, or those of a saved adapter to continue.

Random numbers depend only on the run's seed and the modules' names, so that any number of processes and shards starts
the same.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.lora.layer import Embedding, LoraLayer, MultiheadAttention, ParamWrapper, _ConvNd
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from framework.build.hub import one_line
from framework.build.model_folder import local_folder
from framework.build.place import Place
from framework.build.ranks import local_part, shard_number
from framework.build.seeds import mixed
from framework.compose.own_adapter import find_adapter
from framework.errors import Problem, RequestError
from framework.hub import hub_is_reachable
from framework.paths import open_regular
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit
from framework.schema.peft import PeftParams

KEY = "peft.adapter_path"
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_COUNTED = {
    "peft_type": "peft_method",
    "use_rslora": "peft_method",
    "use_dora": "peft_method",
    "lora_alpha": "lora_alpha",
    "alpha_pattern": "alpha_pattern",
}
"""peft's settings that do not show in shapes -> our keys."""
_WITHOUT_ROWS = (Embedding, MultiheadAttention, ParamWrapper, _ConvNd)
"""Adapters whose A matrix has no matrix of token inputs: of embeddings, convolutions and stacked experts."""
_MOST = 3
"""Maximum number of names in a message."""


def load_first_adapter(written: str, model: PeftModel, is_rehearsed: bool) -> None:
    """Load the saved weights into the adapter of `model`. A rehearsal only compares names and shapes, and nothing for a
    hub adapter. Meta tensors are left to `FirstWeights`.

    Raises RequestError if the file is missing, damaged, or has other modules or sizes than the attached adapter.
    """
    if is_rehearsed and local_folder(written) is None:
        return
    with FirstWeights(written) as saved:
        # Settings under which the same weights would have another effect are refused.
        now = model.peft_config["default"].to_dict()
        problems = [
            Problem(f"peft.{key}", f"the adapter in {saved.file.parent} has {name}: {was}, here it is {now.get(name)}")
            for name, key in _COUNTED.items()
            if (was := saved.config.get(name)) is not None and was != now.get(name)
        ]
        if problems:
            raise RequestError(problems)
        attached = saved_names(model)
        shapes = {name: tuple(saved.tensors[name].get_slice(name).get_shape()) for name in saved.tensors}
        _require_same(saved.file, attached, shapes)
        if is_rehearsed:
            return
        on_meta = {name for name, tensor in attached.items() if tensor.is_meta}
        values = {name: saved.tensors[name].get_tensor(name) for name in shapes if name not in on_meta}
        if values:
            set_peft_model_state_dict(model, values)


def saved_names(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors by their names in a saved adapter, without computing any."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if model.active_peft_config.is_prompt_learning:
        return {"prompt_embeddings": named["prompt_encoder.default.embedding.weight"]}
    return dict(get_peft_model_state_dict(model, named, save_embedding_layers=False))


def as_saved(written: str, model: PeftModel) -> tuple[int, int]:
    """Number of the adapter's tensors with the saved values (of this rank's shards), and their total."""
    with FirstWeights(written) as saved:
        tensors = saved_names(model)
        return sum(_is_part(item, saved.tensors[name].get_tensor(name)) for name, item in tensors.items()), len(tensors)


def _is_part(tensor: Tensor, saved: Tensor) -> bool:
    """Whether a tensor, or this rank's shard, has the saved values, rounded to its dtype."""
    local = local_part(tensor.detach())
    if local is not tensor and getattr(tensor, "placements", None):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        parts = saved.chunk(mesh.size(mesh.ndim - 1), 0)
        number = shard_number(tensor)
        saved = parts[number] if number < len(parts) else saved[:0]
    if local.shape != saved.shape:  # split for tensor parallel
        return local.numel() < saved.numel()
    return bool(torch.equal(local.cpu(), saved.to(local.dtype)))


class FirstWeights:
    """The open file of a saved adapter, from which a sharded model loads unit by unit."""

    def __init__(self, written: str) -> None:
        found = find_adapter(written)
        if isinstance(found, Problem):
            raise RequestError([found])
        folder, self.config = found
        self.file = _weight_file(written, folder)
        self._files = ExitStack()

    def __enter__(self) -> "FirstWeights":
        try:
            open_regular(self.file).close()
            opened = self._files.enter_context(safe_open(self.file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise RequestError([Problem(KEY, f"{self.file} cannot be read: {one_line(error)}")]) from None
        self.tensors: Mapping[str, Any] = dict.fromkeys(opened.keys(), opened)
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.close()

    def fill(self, layer: nn.Module, name: str) -> None:
        """Load the saved values into the adapter's parameters of the base layer with this name."""
        for inner, parameter in layer.named_parameters():
            saved = f"base_model.model.{name}.{inner}".replace(".default", "")
            if ".default" in f".{inner}" and saved in self.tensors:
                parameter.data.copy_(self.tensors[saved].get_tensor(saved))


def _weight_file(written: str, folder: Path) -> Path:
    if local_folder(written) is not None:
        if not (folder / WEIGHTS).exists():
            pickled = f", and {PICKLED} is pickled, which is not read" if (folder / PICKLED).exists() else ""
            message = f"{folder} has no {WEIGHTS}{pickled}"
            raise RequestError([Problem(KEY, message, expected="weights in safetensors")])
        return folder / WEIGHTS
    try:
        file = cached_file(written, WEIGHTS, local_files_only=not hub_is_reachable())
    except Exception as error:  # the hub client and its cache raise many types
        raise RequestError([Problem(KEY, f"the weights of {written!r} do not load: {one_line(error)}")]) from None
    assert file is not None  # it raises otherwise
    return Path(file)


def _require_same(file: Path, attached: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise RequestError if the saved adapter has other tensors than the attached one."""
    lacking, extra = sorted(attached.keys() - shapes.keys()), sorted(shapes.keys() - attached.keys())
    other = [name for name in attached if name in shapes and tuple(attached[name].shape) != shapes[name]]
    reasons = []
    if lacking:
        reasons.append(f"has no weights for {_listed(lacking)}")
    if extra:
        reasons.append(f"has weights for {_listed(extra)}, which have no adapter in this model or recipe")
    if other:
        was, now = shapes[other[0]], tuple(attached[other[0]].shape)
        reasons.append(f"has other shapes for {_listed(other)} ({was}, here {now})")
    if reasons:
        expected = "the base that it was trained on, and peft.lora_target_modules unset"
        raise RequestError([Problem(KEY, f"{file} {'; it '.join(reasons)}", expected=expected)])


def _listed(names: list[str]) -> str:
    shown = ", ".join(name.removeprefix("base_model.model.") for name in names[:_MOST])
    return f"{shown} and {len(names) - _MOST} more" if len(names) > _MOST else shown


@contextmanager
def drawn_for(name: str, seed: int, place: Place) -> Iterator[None]:
    """Within the block random numbers are seeded by `name`; the generators are restored afterwards."""
    devices = [place.device] if place.kind == "cuda" and not place.rehearsed else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(mixed(seed, 0, zlib.crc32(name.encode())))
        yield


def peft_init(params: PeftParams) -> str | bool:
    """peft's `init_lora_weights` for LoRA's A matrices; EVA's are computed later, from rows."""
    is_gaussian = "lora_init" in ADAPTERS[params.peft_method].keys and params.lora_init is LoraInit.GAUSSIAN
    return "gaussian" if is_gaussian else True


def matrices_from_rows(model: nn.Module) -> dict[nn.Module, Tensor]:
    """The adapted modules whose A matrix EVA computes, with this matrix, `[rank, width]`.

    Raises RequestError if there are none: orthonormal rows need a linear layer of at least as many inputs.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and "default" in module.lora_A]
    matrices = {layer: layer.lora_A["default"].weight for layer in layers if not isinstance(layer, _WITHOUT_ROWS)}
    found = {layer: matrix for layer, matrix in matrices.items() if matrix.shape[0] <= matrix.shape[1]}
    if not found:
        widest = max((matrix.shape[1] for matrix in matrices.values()), default=0)
        message = f"the rank is above the width of each adapted module's input (at most {widest})"
        message = message if matrices else "eva computes the A matrices of linear layers, and none has an adapter"
        expected = "gaussian, or a lower rank" if matrices else "gaussian, or linear layers in peft.lora_target_modules"
        raise RequestError([Problem("peft.lora_init", message, expected=expected)])
    return found


def drawn_despite_rows(model: nn.Module) -> Iterator[str]:
    """Warning about adapters that keep a drawn A matrix under EVA. Raises as `matrices_from_rows` does."""
    computed = matrices_from_rows(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if others := [name for name, module in layers.items() if module not in computed]:
        why = "embeddings, convolutions, stacked experts, and ranks above the width of the input"
        yield f"peft.lora_init: {len(others)} of {len(layers)} adapters are drawn as kaiming ({why}): {_listed(others)}"


def start_layers(layers: Iterable[tuple[str, nn.Module]], seed: int, place: Place, params: PeftParams) -> None:
    """Initialize adapter layers whose initial values do not depend on the base. Names are those in the base model."""
    initialization = peft_init(params)
    for name, module in layers:
        if isinstance(module, LoraLayer):
            with drawn_for(name, seed, place), torch.no_grad():
                module.reset_lora_parameters("default", initialization)
        elif isinstance(module, IA3Layer):
            with torch.no_grad():  # IA3 starts at ones
                module.reset_ia3_parameters("default")
