"""`peft`: a small trained adapter on frozen weights."""

from typing import Annotated

from pydantic import Field

from framework.schema.choices import PeftMethod, PeftSaveMode, Quantization, TorchDtype
from framework.schema.params import Integer, Number, Params, Strings
from framework.schema.training import Positive


class PeftParams(Params):
    """The adapter. In effect when `training.use_peft` is true."""

    peft_method: PeftMethod = PeftMethod.LORA
    """Kind of adapter."""
    lora_r: Positive = 8
    """Rank: trained parameters grow in proportion (rank x (in + out) per adapted matrix)."""
    lora_alpha: Annotated[Number, Field(gt=0)] = 8.0
    """Scale: the update is multiplied by alpha / rank. No memory."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Above 0 it keeps one more copy of each adapted input, plus a mask."""
    lora_target_modules: Strings | None = None
    """Names of the adapted modules, or `[all-linear]`. Each one keeps its input for backward."""
    lora_modules_to_save: Strings = ()
    """Modules trained in full and saved beside the adapter. Cost full gradients and states."""
    adapter_dtype: TorchDtype | None = None
    """dtype of the adapter's weights. Unset: float32 under autocast, else the base's."""
    q_lora: bool = False
    """Hold the frozen base in 4 or 8 bits."""
    q_lora_bits: Annotated[Integer, Field(multiple_of=4, ge=4, le=8)] = 4
    """4 or 8 bits a frozen weight."""
    bnb_4bit_quant_type: Quantization = Quantization.NF4
    """Code of the 4-bit numbers."""
    use_bnb_nested_quant: bool = False
    """Quantise the scales too: 0.4 bits a weight less."""
    peft_save_mode: PeftSaveMode = PeftSaveMode.ADAPTER_ONLY
    """What the final export holds."""
