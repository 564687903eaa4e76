"""`peft`: an adapter trained on frozen weights."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from framework.schema.adapters import ADAPTERS
from framework.schema.choices import LoraInit, PeftMethod, PeftSaveMode, Quantization, TorchDtype
from framework.schema.facts import NO_MEMORY, Facts, Resume, UsedWith
from framework.schema.params import FrozenMapping, Integer, Number, Params, Strings, parse_sequence
from framework.schema.training import Count, Positive
from framework.schema.urls import NoURL

Layers = Annotated[tuple[Count, ...], BeforeValidator(parse_sequence)]
EVA_PASSES = 64
"""Most forward passes of `lora_init: eva`. Random llamas of 4 layers settled in 3 to 10, at ranks of 16 and 64."""


class PeftParams(Params):
    """The adapter. Used if `training.use_peft` is true."""

    adapter_path: Annotated[
        NoURL | None, Facts(resume=Resume.STEERING), UsedWith("training.use_peft", refused=True)
    ] = None
    """Folder or hub id of an adapter to continue training: a run's (its `final/` is used) or one saved by peft. Kind,
    rank, scale, targets and modules trained in full are taken from it, and the base if `model.model_name` is unset. The
    reference of a preference is then the base with this adapter: the adapter's weights once more on the device, unless
    `training.preference.precompute_reference` is true."""
    peft_method: PeftMethod = PeftMethod.LORA
    """Kind of adapter. `pissa` and `olora` move a part of the base's weights into the adapter, `loftq` initializes it
    with the quantization error, `vera` and `ia3` train only vectors, `oft` rotates the inputs of the adapted modules,
    `prefix` and `prompt` train tokens before the row."""
    lora_r: Positive = 8
    """Rank: trained parameters grow in proportion (rank x (in + out) per adapted matrix). VeRA's is the rank of frozen
    matrices that all layers share, usually 256."""
    lora_alpha: Annotated[Number, Field(gt=0), NO_MEMORY] = 8.0
    """Scale: the update is multiplied by alpha / rank. No memory."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Above 0 it keeps one more copy of each adapted input, plus a mask."""
    lora_init: Annotated[LoraInit, UsedWith("peft.adapter_path", (None,))] = LoraInit.KAIMING
    """Initialization of the A matrices: `kaiming` (uniform), `gaussian` (of standard deviation 1 / rank), or `eva`, the
    principal components of the adapted modules' inputs on training rows, which takes forward passes before the first
    step with float32 and float64 copies of one module's inputs (the phase `start` of a plan). No memory later."""
    lora_freeze_a: bool = False
    """LoRA-FA: the A matrices keep their initial values. Saves their gradients and states, and the inputs kept for
    their backward."""
    oft_block_size: Annotated[Integer, Field(ge=2)] = 32
    """Width of the blocks that `oft` rotates, a divisor of each adapted input width: block x (block - 1) / 2 trained
    parameters per block. Each adapted module keeps its input before and after the rotation, in the adapter's dtype."""
    lora_plus_lr_ratio: Annotated[Annotated[Number, Field(gt=0)] | None, NO_MEMORY] = None
    """LoRA+: ratio of the B matrices' learning rate to `training.learning_rate` (usually 16). No memory."""
    lora_target_modules: Strings | str | None = None
    """Names of the adapted modules (or of stacked expert weights), `[all-linear]`, or a single text, a regular
    expression for full module names. Each one keeps its input for backward. Unset: peft's choice for the model."""
    lora_exclude_modules: Strings = ()
    """Names, or regular expressions for full module names, of targets to exclude."""
    layers_to_transform: Layers | None = None
    """Indices of the transformer blocks to adapt, from 0. Unset: all. Backward stops at the lowest of them."""
    rank_pattern: FrozenMapping = FrozenMapping()
    """Ranks of some targets, by name or by a regular expression for the end of the full name."""
    alpha_pattern: Annotated[FrozenMapping, NO_MEMORY] = FrozenMapping()
    """`lora_alpha` of some targets, likewise. No memory."""
    lora_modules_to_save: Strings = ()
    """Modules trained in full and saved with the adapter. They cost full gradients and states."""
    trainable_token_indices: Layers | None = None
    """Ids of tokens whose rows of the embedding, and of an untied head, are trained and saved with the adapter. They
    cost their rows and a copy of each matrix in forward; with rows of the head the loss is not chunked. Unset: those of
    `model.added_tokens`; [] trains none."""
    num_virtual_tokens: Positive = 20
    """Trained tokens before each row (`prefix`: keys and values of every layer; `prompt`: embeddings)."""
    adapter_dtype: TorchDtype | None = None
    """dtype of the adapter's weights; `auto` is the base's. Unset: float32, so that small updates do not round away;
    for a sharded `q_lora` without autocast the base's, since a unit is gathered in one dtype. Modules trained in full
    are float32 under autocast, else in the base's dtype."""
    q_lora: bool = False
    """Quantize the frozen base to 4 or 8 bits. With `fsdp` a 4-bit base is sharded, scales included."""
    q_lora_bits: Annotated[Integer, Field(multiple_of=4, ge=4, le=8), UsedWith("peft.q_lora")] = 4
    """4 or 8 bits a frozen weight; a sharded base needs 4."""
    bnb_4bit_quant_type: Annotated[Quantization, UsedWith("peft.q_lora")] = Quantization.NF4
    """4-bit data type."""
    use_bnb_nested_quant: Annotated[bool, UsedWith("peft.q_lora")] = False
    """Quantize the scales too (double quantization): 0.4 bits a weight less."""
    peft_save_mode: Annotated[PeftSaveMode, NO_MEMORY] = PeftSaveMode.ADAPTER_ONLY
    """Contents of the final export: the adapter; the adapter and its base in `base_model/`; or a plain model with the
    adapter merged into its weights (a quantized base is dequantized for it)."""

    @property
    def starts_from_rows(self) -> bool:
        """Whether a new adapter's A matrices are computed from training rows (`lora_init: eva`)."""
        is_used = self.adapter_path is None and "lora_init" in ADAPTERS[self.peft_method].keys
        return is_used and self.lora_init is LoraInit.EVA
