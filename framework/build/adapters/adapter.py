"""`peft` becomes an adapter on the frozen model."""

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

from framework.build.adapters.first_adapter import drawn_for, load_first_adapter, start_layers, start_word
from framework.build.adapters.products import compute_in_input_dtype, norm_by_rows
from framework.build.adapters.quantize import Factors, is_packed
from framework.build.adapters.targets import KEY, Targets, find_targets, modules_within
from framework.build.hub import nearest, one_line
from framework.build.model.heads import answers_for_rows, head_modules
from framework.build.place import TORCH_DTYPES, Place
from framework.errors import Problem, RequestError
from framework.schema.adapters import ADAPTERS
from framework.schema.choices import PeftMethod, TorchDtype
from framework.schema.peft import PeftParams

"""Kinds that are tokens before the row and touch no module."""
NEVER_TIE = (PeftMethod.VERA, PeftMethod.IA3, PeftMethod.OFT)
"""Kinds that peft trains whole modules of a shared weight apart beside; of the others it trains them as one."""
MOVES_WEIGHTS = {PeftMethod.PISSA: "pissa_niter_16", PeftMethod.OLORA: "olora"}
"""Kinds that take their start out of the base's weights, with peft's word for it. 16 iterations of the fast singular
value decomposition are what the authors of PiSSA recommend (arXiv 2404.02948, table 4): seconds instead of minutes."""


_TIED = "Model has `tie_word_embeddings=True`"
"""Beginning of peft's warnings about a head and an embedding that share their weights."""
_TIES_NOTHING = "You have requested `ensure_weight_tying`, but no tied modules"
MOVED = {word: method for method, word in MOVES_WEIGHTS.items()}


@dataclass(frozen=True)
class Adapter:
    """The adapted model, what it was put on, and what undoes its start.

    `initial` holds the adapter's tensors before training, on the host, where the base's weights were moved into them.
    """

    model: PeftModel
    targets: Targets
    initial: dict[str, Tensor] = field(default_factory=dict)
    starts_from_losses: int = 0
    """Modules whose adapter starts from what quantisation has lost there."""

    @property
    def cautions(self) -> tuple[str, ...]:
        """What the user should know before it trains."""
        return self.targets.cautions


def attach_adapter(
    params: PeftParams, model: PreTrainedModel, place: Place, masters: bool, lost: Factors, seed: int
) -> Adapter:
    """The model with its weights frozen and the adapter next to them, in float32 unless another dtype was asked for.

    `masters`: there is autocast, so that modules trained whole can be float32 too; else they keep the base's dtype.
    `lost`: the factors that loftq starts from. `seed`: of what else an adapter starts from, whatever was drawn before.
    Raises RequestError naming the linear layers there are when a target matches none of them, and where the adapter of
    `peft.adapter_path` is another one.
    """
    params = _training_the_head(params, model)
    is_prompt = ADAPTERS[params.peft_method].is_prompt
    targets = Targets(()) if is_prompt else find_targets(params, model)
    if not is_prompt:
        _check_saved_modules(params, model)
        targets = replace(targets, cautions=(*targets.cautions, *_untied(params, model, targets)))
    _refuse_whole(params, model, targets)
    _refuse_transposed(params, model, targets)
    _refuse_moved_ties(params, model, targets)
    config = _config(params, model, targets, place)
    was_shared = ties_any(model, list(params.lora_modules_to_save))
    if params.peft_method is PeftMethod.PREFIX:
        # peft hands its cache over under the name of before transformers 5.24, at each forward pass
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    try:
        with warnings.catch_warnings(), drawn_for("adapter", seed, place):
            # peft reads a property that transformers 5.20 renamed; nothing a user could change
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            for said in (_TIED, _TIES_NOTHING):  # by `_untied` and `_apart`
                warnings.filterwarnings("ignore", said, UserWarning)
            adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        key = "peft.peft_method" if is_prompt else KEY
        raise RequestError([Problem(key, f"peft cannot put {params.peft_method} there: {one_line(error)}")]) from None
    if was_shared and params.peft_method not in NEVER_TIE:  # of which `_untied` has told
        targets = replace(targets, cautions=(*targets.cautions, *_apart(model)))
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
    if params.adapter_path is not None:
        load_first_adapter(params.adapter_path, adapted, place.rehearsed)
    moved = params.peft_method in MOVES_WEIGHTS and not place.rehearsed
    initial = {name: tensor.detach().cpu().clone() for name, tensor in adapter_state(adapted)} if moved else {}
    return Adapter(adapted, targets, initial, started)


def _training_the_head(params: PeftParams, model: PreTrainedModel) -> PeftParams:
    """The head of a task of rows is new, and nothing of it may stay as it was drawn: it is trained in full."""
    if not answers_for_rows(model):
        return params
    whole = tuple(dict.fromkeys((*params.lora_modules_to_save, *head_modules(model))))
    return params.model_copy(update={"lora_modules_to_save": whole})


def _cast_projections(adapted: PeftModel, dtype: torch.dtype) -> None:
    """VeRA's shared random matrices in the dtype of the vectors between them, which peft 0.21 does not see to."""
    for shared in (adapted.base_model.vera_A, adapted.base_model.vera_B):
        for name in list(shared.keys()):
            shared[name] = shared[name].to(dtype)


def _start_from(layer: nn.Module, factors: tuple[Tensor, Tensor]) -> bool:
    """LoftQ (arXiv 2310.08659): base and adapter together begin where the base was before it was quantised."""
    if not isinstance(layer, LoraLayer):
        return False
    layer.lora_A["default"].weight.data.copy_(factors[0])
    layer.lora_B["default"].weight.data.copy_(factors[1] / layer.scaling["default"])
    return True


def adapter_state(model: PeftModel, named: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors by the names that a saved adapter gives them; of `named`, in place of the model's own."""
    if named is not None and model.active_peft_config.is_prompt_learning:
        # peft would ask the model's embedding for each virtual token in turn; without a projection that is its weight
        yield "prompt_embeddings", named["prompt_encoder.default.embedding.weight"]
        return
    yield from get_peft_model_state_dict(model, named, save_embedding_layers=False).items()


def adapter_dtype(params: PeftParams, model: PreTrainedModel) -> torch.dtype:
    """The dtype that the trained tensors are held in."""
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
        narrowing = _feedforward(model, named)
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
        # without values there is nothing to decompose, and the shapes are the same
        init_lora_weights=True if place.rehearsed else MOVES_WEIGHTS.get(method, start_word(params)),
        trainable_token_indices=_token_rows(params, model),
        ensure_weight_tying=bool(saved) and ties_any(model, saved or []),
    )


def _token_rows(params: PeftParams, model: PreTrainedModel) -> dict[str, list[int]] | None:
    """The trained rows of the embedding, and of a head of its own, by the name of each."""
    if not params.trainable_token_indices:
        return None
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[1] is None or ends[1].weight is ends[0].weight:
        ends = ends[:1]  # which peft ties a tied head to
    rows = sorted(set(params.trainable_token_indices))
    if rows[-1] >= (size := ends[0].weight.shape[0]):
        message = f"{rows[-1]} is no token of this model"
        raise RequestError([Problem("peft.trainable_token_indices", message, expected=f"ids from 0 to {size - 1}")])
    return {name: rows for name, module in model.named_modules() if any(module is end for end in ends)}


def _check_blocks(size: int, model: PreTrainedModel, names: list[str]) -> None:
    """Raises RequestError for a size that does not divide the input of a target, where peft would take another."""
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


def _feedforward(model: PreTrainedModel, names: list[str]) -> list[str]:
    """The targets whose input IA3 scales instead of their output: those that lead back from a wider layer."""
    return [name for name in names if _narrows(model.get_submodule(name), model.config.get_text_config().hidden_size)]


def _narrows(module: nn.Module, hidden: int) -> bool:
    if isinstance(module, Conv1D):
        return bool(module.nf == hidden and module.weight.shape[0] > hidden)
    return bool(getattr(module, "out_features", 0) == hidden and getattr(module, "in_features", 0) > hidden)


def _refuse_transposed(params: PeftParams, model: PreTrainedModel, targets: Targets) -> None:
    """peft's OLoRA takes GPT-2's matrices the wrong way round (olora_init in peft/tuners/lora/layer.py)."""
    if params.peft_method is PeftMethod.OLORA and any(
        isinstance(model.get_submodule(name), Conv1D) for name in targets.modules
    ):
        message = "peft cannot start olora on Conv1D layers, which hold their matrices transposed"
        raise RequestError([Problem("peft.peft_method", message, expected="pissa, or lora")])


def _refuse_moved_ties(params: PeftParams, model: PreTrainedModel, targets: Targets) -> None:
    """What such a kind takes out of the head's weight at its start would be gone from the embedding too."""
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
    """An adapter has no place on what is trained whole, of a shared weight under either name; packed weights are not
    trained."""
    whole = modules_within(model, params.lora_modules_to_save)
    if packed := [name for name in sorted(whole) if any(map(is_packed, model.get_submodule(name).parameters(False)))]:
        message = f"{packed[0]} is held in few bits (peft.q_lora), and cannot be trained whole"
        raise RequestError([Problem("peft.lora_modules_to_save", message, expected="modules that stay unquantised")])
    shared = [model.get_output_embeddings(), model.get_input_embeddings()]
    if params.peft_method not in NEVER_TIE and ties_any(model, list(params.lora_modules_to_save)):
        whole |= {name for name, module in model.named_modules() if any(module is other for other in shared)}
    if both := [name for name in targets.modules if name in whole]:
        message = f"{both[0]} is trained whole (peft.lora_modules_to_save), so that an adapter cannot be on it"
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
    """Whether one of the modules shares its weight with the embedding or the head: both are then trained as one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    tied = [name for name, module in model.named_modules() if module is head or module is embedding]
    return any(name == wanted or name.endswith(f".{wanted}") for name in tied for wanted in names)


def adapter_kind(adapter: Adapter) -> str:
    """The kind of adapter that the built layers are, by our name for it."""
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
    """What comes apart that shared one weight: peft ties whole modules of LoRA's kinds, and nothing else."""
    apart = list(params.lora_modules_to_save) if params.peft_method in NEVER_TIE else []
    if ties_any(model, [*apart, *targets.modules]):
        yield (
            "head and embedding share one weight, and the adapter is trained apart from the other of the two: a merged "
            "model has both. With peft.lora_modules_to_save a LoRA kind trains them as one"
        )


def _apart(model: PreTrainedModel) -> Iterator[str]:
    """What to tell where head and embedding, which shared one weight, no longer do: peft 0.21 finds no head for an
    embedding whose name it does not know, as GPT-2's."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        name = next(name for name, module in model.named_modules() if module is head)
        yield (
            f"head and embedding share one weight, and peft trains the embedding apart from {name}: what is exported "
            f"and merged has both. {name} in peft.lora_modules_to_save trains them as one"
        )


def still_zero(model: nn.Module) -> list[str]:
    """Names of LoRA's B matrices that training has left at zero: their modules do what they did without an adapter."""
    matrices = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if "lora_B" in name and parameter.requires_grad
    ]
    return [name for name, parameter in matrices if not bool(parameter.any())]
