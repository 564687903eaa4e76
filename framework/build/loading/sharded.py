"""Loading of a sharded model unit by unit, so that no device holds more than its shard and one unit.

The model is built without weights. Each unit is filled right before it is sharded: with random values seeded by the
unit's name, so that they are the same on any number of ranks; or from the checkpoint's files, which every rank
memory-maps. If transformers renames or joins a checkpoint's tensors, the first rank loads it on its host (one copy of
the model there, none elsewhere) and broadcasts each tensor.
"""

import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from framework.build.adapters.quantize import is_quantized_weight, refuse_other_quantization
from framework.build.hub import UNLOADABLE, one_line
from framework.build.loading.model import build_model
from framework.build.loading.vocabulary import changes_rows
from framework.build.model.heads import is_new
from framework.build.model_folder import checkpoint_files, local_folder, weight_files
from framework.build.place import Place
from framework.build.ranks import Ranks
from framework.build.seeds import mixed
from framework.errors import Problem, RequestError
from framework.schema.adapters import ADAPTERS
from framework.schema.config import TrainingConfig

_HOST = torch.device("cpu")
_ADAPTED = ".default"
"""Part of the names of peft's parameters."""

Source = Callable[[str, Tensor], bool]
"""Fills a tensor with the values of a name; returns whether there are any."""


def await_weights(
    config: TrainingConfig, architecture: PretrainedConfig, place: Place, ranks: Ranks
) -> "ShardLoader | None":
    """The loader of a model that is filled while it is sharded; None if the model is built with its weights."""
    is_split = config.fsdp.is_sharded or config.fsdp.tensor_parallel_size > 1
    has_parts = is_split and ranks.world > 1 and not place.rehearsed
    return ShardLoader(config, architecture, place, ranks) if has_parts else None


def needs_whole_model(config: TrainingConfig) -> bool:
    """Whether the initialization of an adapter needs the full weights, so that every host loads the whole model."""
    peft = config.peft
    copies = (
        bool(peft.lora_modules_to_save) or bool(peft.trainable_token_indices) or config.training.task.facts.is_of_rows
    )
    return config.training.use_peft and (not ADAPTERS[peft.peft_method].has_own_start or copies)


def is_sent(config: TrainingConfig, model: nn.Module) -> bool:
    """Whether the first rank will load the checkpoint and broadcast it, as far as known in advance: if transformers
    joins tensors of this model, or a local folder has other names."""
    if not config.model.load_pretrained_weights:
        return False
    if changes_rows(config.model):
        return True
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    if any(isinstance(transform, WeightConverter) for transform in transforms):
        return True
    folder = local_folder(str(config.model.model_name))
    if folder is None:
        return False
    stored = set[str]()
    has_weights = any(folder.glob("*.safetensors*"))  # a folder without weights can be planned too
    with ExitStack() as files:
        for file in weight_files(folder, "model.model_name") if has_weights else ():
            stored.update(files.enter_context(_opened(file)).keys())
    names = (name.replace(".base_layer", "") for name, _ in model.named_parameters() if _ADAPTED not in name)
    return any(name not in stored and not is_new(model, name) for name in names)


class ShardLoader:
    """A `model` on meta with the source of its weights. `new` names weights that the checkpoint lacks; modules added to
    the model are made at `place`.

    If the adapter needs the full weights (DoRA, PiSSA, modules trained in full), every host loads all of them first.
    """

    def __init__(self, config: TrainingConfig, architecture: PretrainedConfig, place: Place, ranks: Ranks) -> None:
        self._config, self._place, self.place = config, place, Place(_HOST, place.kind)
        self._filled: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # units are released
        self._files = ExitStack()
        self._source: Source = lambda name, tensor: False
        self._names: dict[int, str] = {}
        self.new: tuple[str, ...] = ()
        refuse_other_quantization(config, architecture)
        if needs_whole_model(config):
            self.model, self.new = build_model(config, architecture, self.place)
            return
        model = config.model.model_copy(update={"load_pretrained_weights": False})
        with init_empty_weights(include_buffers=False):
            self.model, _ = build_model(config.model_copy(update={"model": model}), architecture, self.place)
        self.model.tie_weights()  # each parameter was made anew when it went to meta
        if config.model.load_pretrained_weights:
            self._source = self._find_source(architecture, ranks)

    def learn_names(self) -> None:
        """Record the names of the base's weights for the lookup in `fill`; call it before modules are added."""
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}

    def fill(self, unit: nn.Module) -> None:
        """Fill the meta tensors of `unit`, and quantize them if requested: each as it is read, or all after random
        initialization. Each rank must call this for the same units in the same order."""
        modules = [module for module in unit.modules() if any(map(_is_empty, module._parameters.values()))]
        complete = all(map(_is_empty, unit.parameters()))
        missing, adapted = set[nn.Module](), set[Tensor]()
        drawn: list[Any] = []
        for module in modules:
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not _is_empty(parameter):
                    continue
                real = self._filled.get(id(parameter))
                if real is None:
                    real = nn.Parameter(self._room(module, parameter), parameter.requires_grad)
                    known = self._names.get(id(parameter))
                    has_values = known is None or self._source(known, real.data)
                    if known is None:
                        adapted.add(real)
                    elif not has_values:
                        missing.add(module)
                    if is_quantized_weight(parameter) and has_values:
                        cast(Any, module).pack(real.data)
                        continue
                    if is_quantized_weight(parameter):
                        drawn.append(module)
                    self._filled[id(parameter)] = real
                module._parameters[name] = real
        if missing or adapted:
            self._draw(unit, missing, adapted, complete)
        for module in drawn:
            module.pack(module.weight)

    def _room(self, module: nn.Module, parameter: Tensor) -> Tensor:
        if is_quantized_weight(parameter):
            room: Tensor = cast(Any, module).empty_matrix(self._place.device)
            return room
        return torch.empty_like(parameter, device=self._place.device)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._files.close()

    def _draw(self, unit: nn.Module, missing: set[nn.Module], adapted: set[Tensor], complete: bool) -> None:
        """Initialize as transformers and peft do, children first; the same on every rank. `complete`: the whole unit
        was empty, so all of it may be initialized."""
        names = {id(module): name for name, module in self.model.named_modules()}
        seed = mixed(self._config.training.seed, 0, zlib.crc32(names.get(id(unit), "the rest").encode()))
        devices = [self._place.device] if self._place.kind == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            for module in reversed(list(unit.modules())):
                if module in missing or (complete and len(missing) > 1):
                    self.model._init_weights(module)
        if adapted:
            from framework.build.adapters.first_adapter import FirstWeights, start_layers  # peft: seconds to import

            layers = [(names.get(id(module), ""), module) for module in unit.modules()]
            started = [(name, layer) for name, layer in layers if not adapted.isdisjoint(layer.parameters())]
            start_layers(started, self._config.training.seed, self._place, self._config.peft)
            if self._config.peft.adapter_path is not None:
                with torch.no_grad(), FirstWeights(self._config.peft.adapter_path) as saved:
                    for name, layer in started:
                        saved.fill(layer, name)

    def _find_source(self, architecture: PretrainedConfig, ranks: Ranks) -> Source:
        files = list(checkpoint_files(self._config.model))
        opened = [self._files.enter_context(_opened(file)) for file in files]
        stored = {name: tensors for tensors in opened for name in sorted(tensors.keys())}
        wanted = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        absent = [name for name in wanted if name not in stored]
        same = all(tuple(stored[name].get_slice(name).get_shape()) == wanted[name] for name in wanted if name in stored)
        if files and same and not changes_rows(self._config.model) and all(is_new(self.model, name) for name in absent):
            self.new = tuple(sorted(absent))
            return lambda name, tensor: _read(stored.get(name), name, tensor)
        return self._sent_by_first(architecture, ranks)

    def _sent_by_first(self, architecture: PretrainedConfig, ranks: Ranks) -> Source:
        """A source in which the first rank loads the checkpoint with transformers and broadcasts each tensor."""
        loaded: PreTrainedModel | None = None
        if ranks.is_main:
            # each rank quantizes the tensors that it receives
            plain = self._config.peft.model_copy(update={"q_lora": False})
            config = self._config.model_copy(update={"peft": plain})
            loaded, self.new = build_model(config, architecture, Place(_HOST, self._place.kind))
        names = [self.new]
        torch.distributed.broadcast_object_list(names, 0)
        self.new = names[0]
        values = dict(loaded.named_parameters()) if loaded is not None else {}

        def send(name: str, tensor: Tensor) -> bool:
            if ranks.is_main:
                tensor.copy_(values.pop(name).detach())
            torch.distributed.broadcast(tensor, 0)
            return True

        return send


def _is_empty(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.is_meta


def _read(tensors: Any, name: str, target: Tensor) -> bool:
    if tensors is None:
        return False
    target.copy_(tensors.get_tensor(name))
    return True


def _opened(file: Path) -> Any:
    """Open a safetensors file. Raises RequestError if it is missing or damaged."""
    try:
        return safe_open(file, framework="pt")
    except UNLOADABLE as error:
        raise RequestError([Problem("model.model_name", f"{file} does not load: {one_line(error)}")]) from None
