"""Attaching of an adapter to the frozen model, as `peft` asks."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.build.adapters.first_adapter import (
    drawn_despite_rows,
    drawn_for,
    load_first_adapter,
    peft_init,
    start_layers,
)
from framework.build.adapters.products import compute_in_input_dtype, norm_by_rows
from framework.build.adapters.quantize import Factors, is_quantized_weight
from framework.build.adapters.targets import KEY, Targets, find_targets, modules_within
from framework.build.hub import nearest, one_line
from framework.build.model.heads import answers_for_rows, head_modules
from framework.build.place import TORCH_DTYPES, Place
from framework.errors import Problem, RequestError
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import PeftMethod, TorchDtype
from framework.schema.peft import PeftParams

"""Kinds that put virtual tokens before the row and adapt no module."""
NEVER_TIE = (PeftMethod.VERA, PeftMethod.IA3, PeftMethod.OFT)
"""Kinds for which peft trains tied modules in `modules_to_save` separately; for the others it keeps them tied."""
MOVES_WEIGHTS = {PeftMethod.PISSA: "pissa_niter_16", PeftMethod.OLORA: "olora"}
"""Kinds initialized from the base's weights -> peft's `init_lora_weights`. The authors of PiSSA recommend 16 iterations
of the fast singular value decomposition (arXiv 2404.02948, table 4): seconds instead of minutes."""


_TIED = "Model has `tie_word_embeddings=True`"
"""Beginning of peft's warnings about a head and an embedding that share their weights."""
_TIES_NOTHING = "You have requested `ensure_weight_tying`, but no tied modules"
MOVED = {word: method for method, word in MOVES_WEIGHTS.items()}


@dataclass(frozen=True)
class Adapter:
    """The adapted model, its targets, and the initial values needed to undo a changed base.

    `initial` has the adapter's tensors before training, on the host, if the base's weights were moved into them.
    """

    model: PeftModel
    targets: Targets
    initial: dict[str, Tensor] = field(default_factory=dict)
    starts_from_losses: int = 0
    """Modules whose adapter is initialized with the quantization error."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Notes for the user before training."""
        return self.targets.warnings


def attach_adapter(
    params: PeftParams, model: PreTrainedModel, place: Place, masters: bool, lost: Factors, seed: int
) -> Adapter:
    """Attach the adapter to the frozen model, in float32 unless another dtype is set.

    `masters`: with autocast, modules trained in full are float32 too; else they keep the base's dtype. `lost`: LoftQ's
    initial factors. `seed`: for all other initial values, independent of earlier draws. Raises RequestError, with the
    existing linear layers, if a target matches none of them, if the adapter of `peft.adapter_path` does not fit, and if
    EVA can initialize no module.
    """
    params = _training_the_head(params, model)
    is_prompt = ADAPTERS[params.peft_method].is_prompt
    targets = Targets(()) if is_prompt else find_targets(params, model)
    if not is_prompt:
        _check_saved_modules(params, model)
        targets = replace(targets, warnings=(*targets.warnings, *_untied(params, model, targets)))
    _refuse_whole(params, model, targets)
    _refuse_transposed(params, model, targets)
    _refuse_moved_ties(params, model, targets)
    config = _config(params, model, targets, place)
    was_shared = ties_any(model, list(params.lora_modules_to_save))
    if params.peft_method is PeftMethod.PREFIX:
        # peft passes its cache under the argument's name before transformers 5.24, at each forward pass
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    adapted = _attached(params, model, config, place, seed)
    if was_shared and params.peft_method not in NEVER_TIE:  # `_untied` reports it
        targets = replace(targets, warnings=(*targets.warnings, *_apart(model)))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            whole = torch.float32 if masters else model.dtype  # peft's own layers cast what they are given
            dtype = whole if ".modules_to_save." in name else adapter_dtype(params, model)
            parameter.data = parameter.data.to(dtype)
    if ADAPTERS[params.peft_method].has_own_start:
        layers = (named for named in model.named_modules() if isinstance(named[1], BaseTunerLayer))
        drawn = [named for named in layers if not any(item.is_meta for item in named[1].parameters())]
        start_layers(drawn, seed, place, params)
    if params.lora_freeze_a and ADAPTERS[params.peft_method].has_factors:
        for name, parameter in adapted.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and ".lora_A." not in name)
    if params.peft_method is PeftMethod.VERA:
        _cast_projections(adapted, adapter_dtype(params, model))
    compute_in_input_dtype(adapted)
    norm_by_rows(adapted)
    started = sum(_start_from(adapted.get_submodule(f"base_model.model.{name}"), lost[name]) for name in lost)
    if params.starts_from_rows:
        targets = replace(targets, warnings=(*targets.warnings, *drawn_despite_rows(adapted)))
    if params.adapter_path is not None:
        load_first_adapter(params.adapter_path, adapted, place.rehearsed)
    moved = params.peft_method in MOVES_WEIGHTS and not place.rehearsed
    initial = {name: tensor.detach().cpu().clone() for name, tensor in adapter_state(adapted)} if moved else {}
    return Adapter(adapted, targets, initial, started)


def _attached(params: PeftParams, model: PreTrainedModel, config: PeftConfig, place: Place, seed: int) -> PeftModel:
    """The model with peft's adapter. Raises RequestError if peft cannot attach it."""
    try:
        with warnings.catch_warnings(), drawn_for("adapter", seed, place):
            # peft uses a property that transformers 5.20 renamed; nothing a user could change
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            for text in (_TIED, _TIES_NOTHING):  # reported by `_untied` and `_apart`
                warnings.filterwarnings("ignore", text, UserWarning)
            adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=True)
            return adapted
    except (ValueError, TypeError, NotImplementedError) as error:
        key = "peft.peft_method" if ADAPTERS[params.peft_method].is_prompt else KEY
        message = f"peft cannot attach {params.peft_method} there: {one_line(error)}"
        raise RequestError([Problem(key, message)]) from None


def _training_the_head(params: PeftParams, model: PreTrainedModel) -> PeftParams:
    """Modules trained in full, with the head of a task of rows, whose initial weights are random."""
    if not answers_for_rows(model):
        return params
    whole = tuple(dict.fromkeys((*params.lora_modules_to_save, *head_modules(model))))
    return params.model_copy(update={"lora_modules_to_save": whole})


def _cast_projections(adapted: PeftModel, dtype: torch.dtype) -> None:
    """Cast VeRA's shared random matrices to the dtype of its vectors, which peft 0.21 does not do."""
    for shared in (adapted.base_model.vera_A, adapted.base_model.vera_B):
        for name in list(shared.keys()):
            shared[name] = shared[name].to(dtype)


def _start_from(layer: nn.Module, factors: tuple[Tensor, Tensor]) -> bool:
    """LoftQ (arXiv 2310.08659): base and adapter together start as the base before quantization."""
    if not isinstance(layer, LoraLayer):
        return False
    layer.lora_A["default"].weight.data.copy_(factors[0])
    layer.lora_B["default"].weight.data.copy_(factors[1] / layer.scaling["default"])
    return True


def adapter_state(model: PeftModel, named: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors by their names in a saved adapter; from `named` if given, else from the model."""
    if named is not None and model.active_peft_config.is_prompt_learning:
        # peft would run its embedding for each virtual token; without a projection that is just its weight
        yield "prompt_embeddings", named["prompt_encoder.default.embedding.weight"]
        return
    yield from get_peft_model_state_dict(model, named, save_embedding_layers=False).items()


def adapter_dtype(params: PeftParams, model: PreTrainedModel) -> torch.dtype:
    """dtype of the trained tensors."""
    if params.adapter_dtype is TorchDtype.AUTO:
        dtype: torch.dtype = model.dtype
        return dtype
    return TORCH_DTYPES[TorchDtype(params.adapter_dtype or TorchDtype.FLOAT32)]


def _config(params: PeftParams, model: PreTrainedModel, targets: Targets, place: Place) -> PeftConfig:
    method, kind = params.peft_method, "SEQ_CLS" if answers_for_rows(model) else "CAUSAL_LM"
    if method is PeftMethod.PREFIX:
        return PrefixTuningConfig(task_type=kind, num_virtual_tokens=params.num_virtual_tokens)
    if method is PeftMethod.PROMPT:
        return PromptTuningConfig(task_type=kind, num_virtual_tokens=params.num_virtual_tokens)
    named = list(targets.modules)
    saved = list(params.lora_modules_to_save) or None
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    if method is PeftMethod.IA3:
        # IA3 scales their input instead of their output
        hidden = model.config.get_text_config().hidden_size
        narrowing = [name for name in named if _narrows(model.get_submodule(name), hidden)]
        return IA3Config(
            task_type=kind,
            target_modules=named,
            feedforward_modules=narrowing,
            modules_to_save=saved,
            fan_in_fan_out=transposed,
        )
    if method is PeftMethod.OFT:
        _check_blocks(params.oft_block_size, model, named)
        return OFTConfig(
            task_type=kind,
            oft_block_size=params.oft_block_size,
            target_modules=named,
            modules_to_save=saved,
        )
    if method is PeftMethod.VERA:
        return VeraConfig(
            task_type=kind,
            r=params.lora_r,
            target_modules=named,
            vera_dropout=params.lora_dropout,
            modules_to_save=saved,
            fan_in_fan_out=transposed,
        )
    return LoraConfig(
        task_type=kind,
        r=params.lora_r,
        lora_alpha=params.lora_alpha,
        rank_pattern=params.rank_pattern.thaw(),
        alpha_pattern=params.alpha_pattern.thaw(),
        lora_dropout=params.lora_dropout,
        target_modules=named,
        target_parameters=list(targets.parameters) or None,
        modules_to_save=saved,
        fan_in_fan_out=transposed,
        use_rslora=method is PeftMethod.RSLORA,
        use_dora=method is PeftMethod.DORA,
        # on meta tensors nothing can be decomposed, and the shapes are the same
        init_lora_weights=True if place.rehearsed else MOVES_WEIGHTS.get(method, peft_init(params)),
        trainable_token_indices=_token_rows(params, model),
        ensure_weight_tying=bool(saved) and ties_any(model, saved or []),
    )


def _token_rows(params: PeftParams, model: PreTrainedModel) -> dict[str, list[int]] | None:
    """Trained rows of the embedding, and of an untied head, by module name."""
    if not params.trainable_token_indices:
        return None
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[1] is None or ends[1].weight is ends[0].weight:
        ends = ends[:1]  # peft ties a tied head to it
    rows = sorted(set(params.trainable_token_indices))
    if rows[-1] >= (size := ends[0].weight.shape[0]):
        message = f"{rows[-1]} is not a token of this model"
        raise RequestError([Problem("peft.trainable_token_indices", message, expected=f"ids from 0 to {size - 1}")])
    return {name: rows for name, module in model.named_modules() if any(module is end for end in ends)}


def _check_blocks(size: int, model: PreTrainedModel, names: list[str]) -> None:
    """Raise RequestError for a block size that does not divide a target's inputs, where peft would use another."""
    modules = {name: model.get_submodule(name) for name in names}
    widths = {
        name: module.embedding_dim if isinstance(module, nn.Embedding) else getattr(module, "in_features", size)
        for name, module in modules.items()
    }
    odd = next((name for name, width in widths.items() if width % size), None)
    if odd is not None:
        common = math.gcd(*widths.values())
        fitting = ", ".join(str(block) for block in (8, 16, 32, 64, 128) if common % block == 0)
        message = f"{size} does not divide the {widths[odd]} inputs of {odd}"
        expected = fitting or f"a divisor of {common}"
        raise RequestError([Problem("peft.oft_block_size", message, expected=expected)])


def _narrows(module: nn.Module, hidden: int) -> bool:
    """Whether a layer projects back from a wider one."""
    if isinstance(module, Conv1D):
        return bool(module.nf == hidden and module.weight.shape[0] > hidden)
    return bool(getattr(module, "out_features", 0) == hidden and getattr(module, "in_features", 0) > hidden)


def _refuse_transposed(params: PeftParams, model: PreTrainedModel, targets: Targets) -> None:
    """Refuse OLoRA on Conv1D layers, whose matrices peft does not transpose (olora_init in
    peft/tuners/lora/layer.py)."""
    if params.peft_method is PeftMethod.OLORA and any(
        isinstance(model.get_submodule(name), Conv1D) for name in targets.modules
    ):
        message = "peft cannot initialize olora on Conv1D layers, which store their matrices transposed"
        raise RequestError([Problem("peft.peft_method", message, expected="pissa, or lora")])


def _refuse_moved_ties(params: PeftParams, model: PreTrainedModel, targets: Targets) -> None:
    """Refuse kinds that subtract their initial values from a head that is tied to the embedding."""
    head = model.get_output_embeddings()
    tied = [name for name in targets.modules if model.get_submodule(name) is head]
    if params.peft_method in MOVES_WEIGHTS and ties_any(model, tied):
        message = (
            f"{params.peft_method} moves a part of each weight into the adapter, and {tied[0]} shares its weight with "
            "the embedding, which would lose that part"
        )
        expected = f"lora there, or {params.peft_method} on other modules"
        raise RequestError([Problem("peft.peft_method", message, expected=expected)])


def _refuse_whole(params: PeftParams, model: PreTrainedModel, targets: Targets) -> None:
    """Refuse adapters on modules trained in full (under either name of a tied weight), and full training of quantized
    weights."""
    whole = modules_within(model, params.lora_modules_to_save)
    if quantized := [
        name for name in sorted(whole) if any(map(is_quantized_weight, model.get_submodule(name).parameters(False)))
    ]:
        message = f"{quantized[0]} is quantized (peft.q_lora), and cannot be trained in full"
        raise RequestError([Problem("peft.lora_modules_to_save", message, expected="modules that stay unquantized")])
    shared = [model.get_output_embeddings(), model.get_input_embeddings()]
    if params.peft_method not in NEVER_TIE and ties_any(model, list(params.lora_modules_to_save)):
        whole |= {name for name, module in model.named_modules() if any(module is other for other in shared)}
    if both := [name for name in targets.modules if name in whole]:
        message = f"{both[0]} is trained in full (peft.lora_modules_to_save), so it cannot have an adapter"
        raise RequestError([Problem(KEY, message, expected="modules named in one of the two")])


def _check_saved_modules(params: PeftParams, model: PreTrainedModel) -> None:
    names = [name for name, _ in model.named_modules()]
    last = dict.fromkeys(part for name in names if not (part := name.rsplit(".", 1)[-1]).isdigit())
    problems = [
        Problem(
            f"peft.lora_modules_to_save[{index}]",
            f"{wanted!r} names no module of this model",
            nearest=nearest(wanted.rsplit(".", 1)[-1], last),
        )
        for index, wanted in enumerate(params.lora_modules_to_save)
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names)
    ]
    if problems:
        raise RequestError(problems)


def ties_any(model: PreTrainedModel, names: list[str]) -> bool:
    """Whether one of the modules shares its weight with the embedding or the head, so that both are trained as one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    tied = [name for name, module in model.named_modules() if module is head or module is embedding]
    return any(name == wanted or name.endswith(f".{wanted}") for name in tied for wanted in names)


def adapter_kind(adapter: Adapter) -> str:
    """The kind of adapter of the built layers."""
    model = adapter.model
    layers = [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer)
    ]
    config = getattr(model, "peft_config", {}).get("default")
    if not layers or config is None:
        return "no adapter"
    if not all(isinstance(module, LoraLayer) for module in layers):
        return str(config.peft_type.value).lower()
    if all(getattr(module, "lora_magnitude_vector", None) for module in layers):
        return "dora"
    if any(module.use_rslora.get("default") for module in layers):
        return "rslora"
    if adapter.starts_from_losses == len(layers):
        return "loftq"
    return str(MOVED.get(config.init_lora_weights, PeftMethod.LORA))


def _untied(params: PeftParams, model: PreTrainedModel, targets: Targets) -> Iterator[str]:
    """Warning about a tied weight that an adapter unties: peft keeps only modules trained in full with LoRA's kinds
    tied."""
    apart = list(params.lora_modules_to_save) if params.peft_method in NEVER_TIE else []
    if ties_any(model, [*apart, *targets.modules]):
        yield (
            "head and embedding share one weight, and the adapter is trained on only one of them: a merged model has "
            "separate weights. With peft.lora_modules_to_save a LoRA kind trains them as one"
        )


def _apart(model: PreTrainedModel) -> Iterator[str]:
    """Warning if head and embedding were tied and no longer are: peft 0.21 finds no head for an embedding with an
    unknown name, such as GPT-2's."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        name = next(name for name, module in model.named_modules() if module is head)
        yield (
            f"head and embedding share one weight, and peft trains the embedding separately from {name}: exported and "
            f"merged models have separate weights. {name} in peft.lora_modules_to_save trains them as one"
        )


def still_zero(model: nn.Module) -> list[str]:
    """Names of LoRA's B matrices that are still zero after training, so that their adapters have no effect."""
    matrices = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if "lora_B" in name and parameter.requires_grad
    ]
    return [name for name, parameter in matrices if not bool(parameter.any())]
