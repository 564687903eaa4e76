"""`peft`: a small trained adapter on frozen weights."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from framework.schema.choices import LoraInit, PeftMethod, PeftSaveMode, Quantization, TorchDtype
from framework.schema.facts import NO_MEMORY, Facts, Resume, UsedWith
from framework.schema.params import FrozenMapping, Integer, Number, Params, Strings, parse_sequence
from framework.schema.training import Count, Positive
from framework.schema.urls import NoURL

Layers = Annotated[tuple[Count, ...], BeforeValidator(parse_sequence)]
EVA_PASSES = 64
"""Most forward passes of `lora_init: eva`. Random llamas of 4 layers settled in 3 to 10, at ranks of 16 and 64."""


class PeftParams(Params):
    """The adapter. In effect when `training.use_peft` is true."""

    adapter_path: Annotated[
        NoURL | None, Facts(resume=Resume.STEERING), UsedWith("training.use_peft", refused=True)
    ] = None
    """Folder or hub id of an adapter that is trained on: a run's (its `final/` is taken) or one that peft has saved.
    Its kind, rank, scale, targets and whole modules are the adapter's, and the base too where `model.model_name` is
    unset. A preference then has the base with this adapter as its reference: the adapter's weights once more on the
    device, unless `training.preference.precompute_reference` asks it once."""
    peft_method: PeftMethod = PeftMethod.LORA
    """Kind of adapter. `pissa` and `olora` move a part of the base's weights into the adapter, `loftq` starts it from
    what quantisation loses, `vera` and `ia3` train vectors alone, `oft` rotates the inputs of the adapted modules,
    `prefix` and `prompt` train tokens before the row."""
    lora_r: Positive = 8
    """Rank: trained parameters grow in proportion (rank x (in + out) per adapted matrix). VeRA's is of matrices that
    all layers share and nobody trains: 256 is usual there."""
    lora_alpha: Annotated[Number, Field(gt=0), NO_MEMORY] = 8.0
    """Scale: the update is multiplied by alpha / rank. No memory."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Above 0 it keeps one more copy of each adapted input, plus a mask."""
    lora_init: Annotated[LoraInit, UsedWith("peft.adapter_path", (None,))] = LoraInit.KAIMING
    """Where the A matrices start: `kaiming` (uniform), `gaussian` (of standard deviation 1 / rank), or `eva`, the
    principal components of the adapted modules' inputs on training rows, which takes forward passes before the first
    step and, for a moment, float32 copies of one module's inputs. No memory later."""
    lora_freeze_a: bool = False
    """LoRA-FA: the A matrices stay as they start. Saves their gradients and states, and the inputs that they keep for
    backward."""
    oft_block_size: Annotated[Integer, Field(ge=2)] = 32
    """Width of the blocks that `oft` rotates, a divisor of each adapted input: block x (block - 1) / 2 trained
    parameters for each. Each adapted module keeps its input in the adapter's dtype, before and after the rotation."""
    lora_plus_lr_ratio: Annotated[Annotated[Number, Field(gt=0)] | None, NO_MEMORY] = None
    """LoRA+: the B matrices learn at this many times the learning rate (16 is usual). No memory."""
    lora_target_modules: Strings | str | None = None
    """Names of the adapted modules (or of stacked expert weights), `[all-linear]`, or one text that is a regular
    expression for whole module names. Each one keeps its input for backward. Unset: peft's choice for the model."""
    lora_exclude_modules: Strings = ()
    """Names, or regular expressions for whole module names, of targets that are not adapted after all."""
    layers_to_transform: Layers | None = None
    """Numbers of the transformer blocks that are adapted, from 0. Unset: all. Backward stops at the lowest of them."""
    rank_pattern: FrozenMapping = FrozenMapping()
    """Ranks of some targets: their names, or regular expressions for the ends of whole names, to ranks."""
    alpha_pattern: Annotated[FrozenMapping, NO_MEMORY] = FrozenMapping()
    """`lora_alpha` of some targets, in the same way. No memory."""
    lora_modules_to_save: Strings = ()
    """Modules trained in full and saved next to the adapter. Cost full gradients and states."""
    trainable_token_indices: Layers | None = None
    """Ids of tokens whose rows of the embedding, and of a head of its own, are trained and saved with the adapter. They
    cost their rows, and a copy of each matrix in forward; the loss is over all logits at once where they are the head's
    too. Unset: those of `model.added_tokens`; [] trains none."""
    num_virtual_tokens: Positive = 20
    """Trained tokens before each row (`prefix`: keys and values of every layer; `prompt`: embeddings)."""
    adapter_dtype: TorchDtype | None = None
    """dtype of the adapter's weights; `auto` is the base's. Unset: float32, where small updates do not round away; the
    base's next to a sharded `q_lora` without autocast, since a unit is gathered in one dtype. Modules trained whole are
    float32 under autocast, else in the base's dtype."""
    q_lora: bool = False
    """Hold the frozen base in 4 or 8 bits. With `fsdp` its 4 bits are split over the devices, scales included."""
    q_lora_bits: Annotated[Integer, Field(multiple_of=4, ge=4, le=8), UsedWith("peft.q_lora")] = 4
    """4 or 8 bits a frozen weight; sharded 4."""
    bnb_4bit_quant_type: Annotated[Quantization, UsedWith("peft.q_lora")] = Quantization.NF4
    """Code of the 4-bit numbers."""
    use_bnb_nested_quant: Annotated[bool, UsedWith("peft.q_lora")] = False
    """Quantise the scales too: 0.4 bits a weight less."""
    peft_save_mode: Annotated[PeftSaveMode, NO_MEMORY] = PeftSaveMode.ADAPTER_ONLY
    """What the final export holds: the adapter; the adapter and, in `base_model/`, the weights it belongs on; or a
    plain model with the adapter added into its weights (a quantised base is dequantised for it)."""
